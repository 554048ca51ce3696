"""Calls of `strips` -> calls of `kept`, which keeps its weights, alone or for two products.

Programs are as many as the SMs hold at once: each makes its share of the blocks of rows, and one
that came later would make it alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.gpu.target import GpuTarget, sm_limits
from toolkit.plugins import Constant

COLUMNS = 64  # of a block
ROWS = 64  # of a block
_WARPS = 4
_KEPT_BYTES = 64 * 1024  # of weights; programs are few beyond
_OTHERS_BYTES = 5 * 1024  # of shared memory: bias and factors of a block, and what the system takes
# Programs of an SM by the registers of Triton 3.9 for sm_90: up to 128 of a thread without a
# residual, 187 with one or a second product of 64 columns, 238 with a second of 128.
_PLAIN, _WITH_RESIDUAL, _WIDE_PAIR = 4, 3, 2
# Of two and three stages of copies three are the faster at 128 pictures and more, where as many
# programs have room; two at 32, where more have. Fewer columns of a program are faster with a
# residual, more without. Times of ResNet-50 on an H200.
_FEW, _MANY = 2, 3
_RUN_WITH_RESIDUAL, _RUN_PLAIN = 2, 4
_NO_SECOND: Mapping[str, Constant] = {
    **dict.fromkeys(("z_b", "z_bias", "z_scale", "z_scalars", "z")),
    "Z_COLUMNS": COLUMNS,
    "Z_B_COLUMN": 0,
    "Z_PITCH": 0,
    "Z_EPILOGUE": (),
    "BLOCK_Z": COLUMNS,
}


def persistent_gemm_launches(
    strips: KernelLaunch, picture: tuple[int, ...] | None, gpu: GpuTarget
) -> tuple[KernelLaunch, ...]:
    """Return calls that make what a call of `strips` does, where SMs have enough to do.

    `picture`: `kernels.lanes.row_places`.
    """
    given = dict(strips.spec.constants)
    if not given.pop("INT8X4"):
        return ()
    plain = "residual" in given
    run = min(
        _RUN_PLAIN if plain else _RUN_WITH_RESIDUAL, ceil_div(_size(given, "COLUMNS"), COLUMNS)
    )
    given |= {**_NO_SECOND, "A_PICTURE": picture}
    return _calls(strips, given, gpu, run=run, most=_PLAIN if plain else _WITH_RESIDUAL)


def persistent_pair_launches(pair: KernelLaunch, gpu: GpuTarget) -> tuple[KernelLaunch, ...]:
    """Return calls that make both products of a pair, where all weights fit."""
    given = dict(pair.spec.constants)
    columns, wide = _size(given, "COLUMNS"), _size(given, "BLOCK_Z")
    if columns * (_size(given, "BLOCK_K") + wide) > _KEPT_BYTES:
        return ()
    most = _WITH_RESIDUAL if wide == COLUMNS else _WIDE_PAIR
    return _calls(pair, given, gpu, run=ceil_div(columns, COLUMNS), most=most)


def _calls(
    call: KernelLaunch, given: Mapping[str, Constant], gpu: GpuTarget, *, run: int, most: int
) -> tuple[KernelLaunch, ...]:
    """Return calls with these blocks of columns, and as many stages and programs as fit."""
    depth, columns = _size(given, "BLOCK_K"), run * COLUMNS
    second = 0 if given.get("z_b", 0) is None else _size(given, "BLOCK_Z")
    ahead = ROWS * (depth + (0 if "residual" in given else columns))
    kept = columns * (depth + second) + _OTHERS_BYTES
    held = sm_limits(gpu.sm).shared_bytes
    many, few = (min(most, held // (kept + (n - 1) * ahead)) for n in (_MANY, _FEW))
    found = _call(call, given, gpu, run=run, stages=_MANY, programs=many)
    if few > many:
        found += _call(call, given, gpu, run=run, stages=_FEW, programs=few)
    return found


def _call(
    call: KernelLaunch,
    given: Mapping[str, Constant],
    gpu: GpuTarget,
    *,
    run: int,
    stages: int,
    programs: int,
) -> tuple[KernelLaunch, ...]:
    """Return the call, if each of two or more programs of an SM has a block of rows."""
    names = (name for name, _ in call.spec.signature)
    rows = dict(zip(names, call.arguments, strict=True))["rows"]
    assert isinstance(rows, int)
    runs = ceil_div(_size(given, "COLUMNS"), run * COLUMNS)
    if programs < 2 or ceil_div(opt(rows), ROWS) * runs < programs * gpu.sm_count:
        return ()
    constants = {
        **given,
        "BLOCK_M": ROWS,
        "RUN": run,
        "STAGES": stages,
        "WARPS": _WARPS,
    }
    spec = replace(
        call.spec,
        kernel="persistent_gemm",
        constants=tuple(sorted(constants.items())),
        warps=_WARPS,
        stages=stages,
    )
    whole = max(programs * gpu.sm_count // runs, 1) * runs  # each run has as many
    return (replace(call, spec=spec, grid=(whole, 1, 1)),)


def _size(given: Mapping[str, Constant], name: str) -> int:
    value = given[name]
    assert isinstance(value, int)
    return value
