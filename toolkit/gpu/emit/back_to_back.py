"""A product whose weights are kept and the product of its result -> calls of `kept` for both.

The first writes a tensor that the second is the next to read: in a residual network the last
convolution of a block and the first of the next. Both become one piece of work, so that memory
planning knows that one kernel may read and write all that they touch.
"""

from collections.abc import Sequence

from toolkit.gpu.emit.persistent_gemm import persistent_pair_launches
from toolkit.gpu.ir.launch import Argument, InWeights, KernelLaunch, KernelSpec, Tactic, TunableOp
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

_WIDEST = 128  # columns of the second product: 64 sums a lane are kept while the first goes on
_PRODUCTS = ("persistent_gemm", "matmul")
_OPERANDS = ("bias", "scale", "scalars")
_FIXED = {"a", "b", *_OPERANDS, "y", "rows"}  # arguments where no other size is dynamic
_PITCHES = ("A_ROW", "B_COLUMN", "Y_PITCH", "R_PITCH")
_GIVEN = ("DEPTH", "COLUMNS", "A_PICTURE", *_PITCHES, "EPILOGUE", "SCALARS", "BLOCK_N", "BLOCK_K")


def fuse_back_to_back(works: Sequence[TunableOp], gpu: GpuTarget) -> tuple[TunableOp, ...]:
    """Return the work with each two products that one kernel can compute as one piece.

    Its tactics are the tactics of the first, each followed by one of the second, and the calls that
    compute both. The first tactic stays the one that each had by itself.
    """
    joined: list[TunableOp] = []
    for work in works:
        chained = _back_to_back_tactics(joined[-1], work, gpu) if joined else ()
        if chained:
            before = joined.pop()
            apart = (first + second for first in before.tactics for second in work.tactics)
            joined.append(TunableOp((*before.nodes, *work.nodes), (*apart, *chained)))
        else:
            joined.append(work)
    return tuple(joined)


def _back_to_back_tactics(
    first: TunableOp, second: TunableOp, gpu: GpuTarget
) -> tuple[Tactic, ...]:
    """Return calls that compute both."""
    maker = next((call for call in _products(first) if call.spec.kernel == "persistent_gemm"), None)
    readers = (call for call in _products(second) if call.spec.kernel == "matmul")
    reader = next(filter(_can_follow, readers), None)
    if maker is None or reader is None or not _reads_result(reader, maker):
        return ()
    return tuple((call,) for call in persistent_pair_launches(_pair(maker, reader), gpu))


def _products(work: TunableOp) -> list[KernelLaunch]:
    """Return the calls of products that do all of a piece of work by themselves."""
    calls = [tactic[0] for tactic in work.tactics if len(tactic) == 1]
    return [call for call in calls if call.spec.kernel in _PRODUCTS]


def _can_follow(call: KernelLaunch) -> bool:
    """Whether a product of INT8 has few columns, one matrix of weights and no residual."""
    sizes, arguments = _constants(call), _arguments(call)
    if not set(arguments) <= _FIXED or not isinstance(arguments["b"], InWeights):
        return False
    columns, types = sizes["COLUMNS"], dict(call.spec.signature)
    dense = sizes.get("A_COLUMN", 1) == 1 and sizes.get("B_ROW", 1) == 1
    single = call.grid[1] == 1
    bytes_only = types["a"].startswith("*i8") and types["y"].startswith("*i8")
    return isinstance(columns, int) and columns <= _WIDEST and dense and single and bytes_only


def _reads_result(reader: KernelLaunch, maker: KernelLaunch) -> bool:
    """Whether the rows that one product reads are all rows and columns that the other makes."""
    read, made = _arguments(reader), _arguments(maker)
    sizes, given = _constants(reader), _constants(maker)
    return (
        set(made) <= _FIXED | {"residual"}
        and (read["a"], read["rows"]) == (made["y"], made["rows"])
        and (sizes["DEPTH"], sizes["A_ROW"]) == (given["COLUMNS"], given["Y_PITCH"])
    )


def _pair(maker: KernelLaunch, reader: KernelLaunch) -> KernelLaunch:
    """Return a call of both; `kept_pairs` adds its blocks and its grid."""
    given, sizes = _constants(maker), _constants(reader)
    read, made = _arguments(reader), _arguments(maker)
    types, own = dict(reader.spec.signature), dict(maker.spec.signature)
    added = {"z_b": "b", **{f"z_{name}": name for name in _OPERANDS}, "z": "y"}
    added = {name: of for name, of in added.items() if of in read}
    of_rows = ("rows", own.pop("rows"))
    signature = (*own.items(), *((name, types[of]) for name, of in added.items()), of_rows)
    arguments = {**made, **{name: read[of] for name, of in added.items()}}
    columns = sizes["COLUMNS"]
    assert isinstance(columns, int)
    constants: dict[str, Constant] = {
        **{name: given[name] for name in _GIVEN},
        **{name: None for name in (*_OPERANDS, "residual") if name not in made},
        **{f"z_{name}": None for name in _OPERANDS if name not in read},
        "Z_COLUMNS": columns,
        "Z_B_COLUMN": sizes["B_COLUMN"],
        "Z_PITCH": sizes["Y_PITCH"],
        "Z_EPILOGUE": sizes["EPILOGUE"],
        "BLOCK_Z": 64 if columns <= 64 else _WIDEST,
    }
    names = tuple(sorted(constants.items()))
    spec = KernelSpec("persistent_gemm", signature, names, maker.spec.warps, 1, exact=True)
    writes = {*maker.writes, *reader.writes}
    return KernelLaunch(
        spec,
        (1, 1, 1),
        tuple(arguments[name] for name, _ in signature),
        tuple(sorted({*maker.reads, *reader.reads} - writes)),
        tuple(sorted(writes)),
    )


def _constants(call: KernelLaunch) -> dict[str, Constant]:
    return dict(call.spec.constants)


def _arguments(call: KernelLaunch) -> dict[str, Argument]:
    names = (name for name, _ in call.spec.signature)
    return dict(zip(names, call.arguments, strict=True))
