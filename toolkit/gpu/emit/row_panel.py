"""Products of INT8 with little depth -> calls of `strips` and `kept`, beside `matmul`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from toolkit.gpu.emit.context import Draft
from toolkit.gpu.emit.epilogue import product_call
from toolkit.gpu.emit.persistent_gemm import kept_calls
from toolkit.gpu.emit.split_k import may_be_in_parts, product_in_parts
from toolkit.gpu.ir.elementwise_ops import Step
from toolkit.gpu.ir.launch import Call, Tactic
from toolkit.gpu.ir.network import Network
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.quantized import ROUND
from toolkit.gpu.schedule.tiles import Product, Tile, product_tiles
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.plugins import Constant

_COLUMNS = 64  # of a block: a lane holds 16 neighbours of them
_LEAST_DEPTH = 32  # one product of the tensor cores
_DEEPEST = 256  # deeper strips leave too little shared memory for what is copied ahead
_DEEP = 256  # from here on rows are long to read: runs are longer, blocks lower
_SHORTEST = 3  # blocks that one program makes at least, or tiles are faster
# Rows and warps, the best first by times on an H200; copies run two blocks ahead.
_SHAPES = ((128, 4), (64, 4))
_STAGES = 3
_PARAMETERS = ("DEPTH", "COLUMNS", "A_ROW", "B_COLUMN", "Y_PITCH", "R_PITCH")
_WORD = 4  # neighbouring results that are made at once
_ROUNDED = ("relu_int8_by", "round_int8_by")  # last steps that make words


@dataclass(frozen=True, slots=True)
class _Strip:
    """Blocks of `rows` x 64 results, `run` of them one after the other by one program."""

    rows: int
    warps: int
    run: int


def product_tactics(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[Tactic, ...]:
    """Return the ways to compute a product with `matmul`'s operands and constants."""

    def tactic(tile: Tile) -> Tactic:
        if tile.parts > 1:
            return product_in_parts(draft, product, operands, constants, tile)
        return (product_call(draft, product, operands, constants, tile),)

    tiles = product_tiles(product, draft.gpu, in_parts=may_be_in_parts(product, constants))
    return (
        *((call,) for call in strip_calls(draft, product, operands, constants)),
        *(tactic(tile) for tile in tiles),
        *((call,) for call in kept_products(draft, product, operands, constants)),
    )


def strip_calls(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[Call, ...]:
    """Return calls that compute a product of `matmul`'s operands and constants in strips.

    There are none where depth or columns do not suit, where there are too few rows for all SMs, or
    where tensor cores leave sums in other places than `kernels.lanes` says.
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(draft, product, y, constants):
        return ()
    return tuple(
        _call(draft, product, operands, constants, _Strip(rows, warps, run))
        for rows, warps in _shapes(product, operands["residual"] is not None)
        if (run := _run(draft, product, rows)) >= _SHORTEST
    )


def kept_products(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    picture: tuple[int, ...] | None = None,
) -> tuple[Call, ...]:
    """Return calls that compute a product as strips do, with weights that stay in shared memory.

    Few columns suit, too. `picture`: how rows lie that are pixels apart (`kernels.lanes`).
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(draft, product, y, constants):
        return ()
    strips = _call(draft, product, operands, constants, _Strip(*_SHAPES[0], 1))
    return kept_calls(strips, picture, draft.gpu)


def _call(
    draft: Draft,
    product: Product,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
    strip: _Strip,
) -> Call:
    y, numbers, residual = operands["y"], operands["numbers"], operands["residual"]
    assert isinstance(y, View)
    assert not isinstance(residual, int)
    steps = cast("tuple[Step, ...]", constants["STEPS"])
    words = _in_words(product, y, residual, constants, steps)
    runs = ceil_div(product.columns, strip.run * _COLUMNS)
    return draft.make_call(
        "strips",
        (ceil_div(product.rows, strip.rows) * runs, 1, 1),
        operands,
        {
            **{name: constants[name] for name in _PARAMETERS},
            "STEPS": _of_rectified(draft.network, residual, steps) if words else steps,
            "WORDS": words,
            "NUMBERS": numbers.elements if isinstance(numbers, View) else 0,
            "WARPS": strip.warps,
            "RUN": strip.run,
            "STAGES": _STAGES,
            "BLOCK_M": strip.rows,
            "BLOCK_N": _COLUMNS,
            "BLOCK_K": max(_LEAST_DEPTH, power_of_two(product.depth)),
        },
        writes=(y,),
        warps=strip.warps,
        stages=_STAGES,
    )


def _in_words(
    product: Product,
    y: View,
    residual: View | None,
    constants: Mapping[str, Constant],
    steps: tuple[Step, ...],
) -> bool:
    """Whether four neighbours of a row are the bytes of a word, of a residual, too."""
    places = [product.columns, y.offset, constants["Y_PITCH"]]
    if residual is not None:
        if residual.scale is None:  # real numbers of two or four bytes
            return False
        places += [residual.offset, constants["R_PITCH"]]
    whole = all(isinstance(n, int) and fixed(n) and n % _WORD == 0 for n in places)
    return whole and steps[-1][0] in _ROUNDED


def _of_rectified(
    network: Network, residual: View | None, steps: tuple[Step, ...]
) -> tuple[Step, ...]:
    """Return the steps, of a residual that is never negative with the shorter way to read it."""
    if residual is None or steps[0][:2] != ("real_by", 1):
        return steps
    makers = {name: op for op in network.operations for name in op.outputs}
    rounded = makers.get(residual.base)
    rectified = makers.get(rounded.inputs[0]) if rounded and rounded.kind == ROUND else None
    if rectified is None or rectified.kind != "Relu":
        return steps
    return (("rectified_by", *steps[0][1:]), *steps[1:])


def _suits(draft: Draft, product: Product, y: View, constants: Mapping[str, Constant]) -> bool:
    dense = constants["A_COLUMN"] == 1 and constants["B_ROW"] == 1
    short = fixed(product.depth) and product.depth <= _DEEPEST
    single = fixed(product.products) and product.products == 1
    integers = product.item_bytes == 1 and y.item_bytes == 1
    return (
        draft.gpu.multiplies_from_shared
        and integers
        and single
        and dense
        and short
        and fixed(product.columns)
    )


def _shapes(product: Product, residual: bool) -> tuple[tuple[int, int], ...]:
    """Return which blocks are tried: low ones first where rows are long, else for a residual."""
    high, low = _SHAPES
    if product.depth >= _DEEP:
        return (low, high)
    return (high, low) if residual else (high,)


def _run(draft: Draft, product: Product, rows: int) -> int:
    """Return how many blocks of columns one program takes: fewer where SMs would be idle."""
    run = min(ceil_div(product.columns, _COLUMNS), 8 if product.depth >= _DEEP else 4)
    strips = ceil_div(opt(product.rows), rows)
    while run > 1 and strips * ceil_div(product.columns, run * _COLUMNS) < 2 * draft.gpu.sm_count:
        run //= 2
    return run
