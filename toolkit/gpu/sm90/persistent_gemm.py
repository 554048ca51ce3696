"""Persistent, weight-stationary INT8 products, alone or back to back.

A program loads the weights of its columns into shared memory once and streams row blocks past them.
There are as many programs as SMs hold at once; one more would run after the others, alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.schedule import Schedule
from toolkit.gpu.ir.gemm import DenseLoader, GemmProblem, Im2colLoader, Loader, MatrixStrides
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.view import View
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt
from toolkit.gpu.sm90.row_panel import (
    COLUMNS,
    block_depth,
    can_pack,
    dense_int8_refusal,
    panel_constants,
)
from toolkit.gpu.target import GpuTarget, sm_limits
from toolkit.plugins import Constant

MAX_PAIR_COLUMNS = 128  # of a second product: 64 accumulators a thread beside those of the first
_ROWS = 64  # of a block
_WARPS = 4
_MAX_WEIGHT_BYTES = 64 * 1024  # of a pair; beyond, programs are few
_RESERVED_BYTES = 5 * 1024  # of shared memory: bias and scales of a block, and the system's share
# Programs of an SM by the registers of Triton 3.9 for sm_90: up to 128 of a thread without a
# residual, 187 with one or a second product of 64 columns, 238 with a second of 128.
_MAX_PROGRAMS, _MAX_PROGRAMS_RESIDUAL, _MAX_PROGRAMS_WIDE = 4, 3, 2
# Of two and three stages of copies three are the faster at 128 images and more, where as many
# programs have room; two at 32, where more have. Fewer columns of a program are faster with a
# residual, more without. Times of ResNet-50 on an H200.
_FEW_STAGES, _MANY_STAGES = 2, 3
_MAX_RUN_RESIDUAL, _MAX_RUN = 2, 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of the left operand begin: `kernels.mma_layout.row_offsets`.

    `image`: None for a matrix; else (pixels of a row, of an image, elements from one image row, and
    from one image, to the next that is read).
    """

    strides: MatrixStrides
    image: tuple[int, ...] | None


def rows_of(left: Loader) -> Rows | None:
    """Return the rows of a matrix or of a strided 1x1 convolution; None for another loader."""
    if isinstance(left, DenseLoader):
        return Rows(left.strides, None)
    strided = isinstance(left, Im2colLoader) and left.window.is_strided_pointwise
    if not isinstance(left, Im2colLoader) or not strided or left.groups > 1:
        return None
    height, width = left.size
    image = (
        left.output_size[1],
        left.output_size[0] * left.output_size[1],
        left.window.strides[0] * width * left.pitch,
        height * width * left.pitch,
    )
    row = left.window.strides[1] * left.pitch
    return Rows(MatrixStrides(row), image) if all(map(fixed, image)) else None


def _refusal(problem: GemmProblem, gpu: GpuTarget) -> str | None:
    rows = rows_of(problem.left)
    if rows is None:
        return "the left operand is neither a matrix nor that of a strided 1x1 convolution"
    reason = dense_int8_refusal(problem, rows.strides, gpu)
    if reason is not None:
        return reason
    return None if can_pack(problem) else "results cannot be packed in INT32"


def persistent_gemm_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each number of stages, none where rows are too few for all programs."""
    plain = problem.residual is None
    run = min(_MAX_RUN if plain else _MAX_RUN_RESIDUAL, ceil_div(problem.shape.columns, COLUMNS))
    programs = _MAX_PROGRAMS if plain else _MAX_PROGRAMS_RESIDUAL
    return tuple(_tactics(ctx, problem, None, run=run, max_programs=programs))


PERSISTENT_GEMM = Schedule("persistent", _refusal, persistent_gemm_tactics)


def persistent_pair_tactics(
    ctx: LoweringContext, first: GemmProblem, second: GemmProblem
) -> tuple[Tactic, ...]:
    """Return tactics that compute `first` and then `second` of its result, where weights fit."""
    columns = first.shape.columns
    wide = _pair_columns(second)
    if columns * (block_depth(first) + wide) > _MAX_WEIGHT_BYTES:
        return ()
    programs = _MAX_PROGRAMS_RESIDUAL if wide == COLUMNS else _MAX_PROGRAMS_WIDE
    run = ceil_div(columns, COLUMNS)
    return tuple(_tactics(ctx, first, second, run=run, max_programs=programs))


def _pair_columns(second: GemmProblem) -> int:
    return COLUMNS if second.shape.columns <= COLUMNS else MAX_PAIR_COLUMNS


def _tactics(
    ctx: LoweringContext,
    problem: GemmProblem,
    second: GemmProblem | None,
    *,
    run: int,
    max_programs: int,
) -> Iterator[Tactic]:
    """Yield tactics with `run` column blocks, and as many stages and programs as fit."""
    rows = rows_of(problem.left)
    if rows is None:
        return
    depth, columns = block_depth(problem), run * COLUMNS
    second_columns = 0 if second is None else _pair_columns(second)
    stage_bytes = _ROWS * (depth + (0 if problem.residual is None else columns))
    fixed_bytes = columns * (depth + second_columns) + _RESERVED_BYTES
    shared = sm_limits(ctx.gpu.sm).shared_bytes
    many, few = (
        min(max_programs, shared // (fixed_bytes + (stages - 1) * stage_bytes))
        for stages in (_MANY_STAGES, _FEW_STAGES)
    )
    runs = ceil_div(problem.shape.columns, columns)
    blocks = ceil_div(opt(problem.shape.rows), _ROWS) * runs
    choices = [(_MANY_STAGES, many)] + ([(_FEW_STAGES, few)] if few > many else [])
    for stages, programs in choices:
        if programs < 2 or blocks < programs * ctx.gpu.sm_count:
            continue
        grid = max(programs * ctx.gpu.sm_count // runs, 1) * runs  # each run has as many
        yield (_launch(ctx, problem, rows, second, grid=grid, run=run, stages=stages),)


def _launch(
    ctx: LoweringContext,
    problem: GemmProblem,
    rows: Rows,
    second: GemmProblem | None,
    *,
    grid: int,
    run: int,
    stages: int,
) -> KernelLaunch:
    return make_launch(
        "persistent_gemm",
        (grid, 1, 1),
        {
            "a": problem.left.view,
            "b": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
            **_second_operands(second),
            "rows": problem.shape.rows,
        },
        {
            **panel_constants(ctx, problem, rows.strides, packed=True),
            **_second_constants(second),
            "A_IMAGE": rows.image,
            "BLOCK_M": _ROWS,
            "RUN": run,
            "STAGES": stages,
            "WARPS": _WARPS,
        },
        writes=(problem.y,) if second is None else (problem.y, second.y),
        warps=_WARPS,
        stages=stages,
    )


def _second_operands(second: GemmProblem | None) -> dict[str, View | None]:
    if second is None:
        return dict.fromkeys(("z_b", "z_bias", "z_scale", "z_scalars", "z"))
    return {
        "z_b": second.right,
        "z_bias": second.epilogue.bias,
        "z_scale": second.epilogue.scale,
        "z_scalars": second.epilogue.scalars,
        "z": second.y,
    }


def _second_constants(second: GemmProblem | None) -> dict[str, Constant]:
    if second is None:
        return {
            "Z_COLUMNS": COLUMNS,
            "Z_B_COLUMN": 0,
            "Z_PITCH": 0,
            "Z_EPILOGUE": (),
            "BLOCK_Z": COLUMNS,
        }
    return {
        "Z_COLUMNS": second.shape.columns,
        "Z_B_COLUMN": second.right_strides.column,
        "Z_PITCH": second.y_strides.row,
        "Z_EPILOGUE": second.epilogue.ops,
        "BLOCK_Z": _pair_columns(second),
    }
