"""Row panels: INT8 products of little depth, whose rows are loaded once for several column blocks.

A program loads a panel of rows with all their depth, and multiplies it with blocks of 64 columns,
one after the other.
"""

from dataclasses import dataclass

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.schedule import Schedule
from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.gemm import DenseLoader, GemmProblem, MatrixStrides
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.network import Network
from toolkit.gpu.passes.quantized import ROUND
from toolkit.gpu.shapes.sizes import ceil_div, fixed, opt, power_of_two
from toolkit.gpu.target import GpuTarget
from toolkit.plugins import Constant

COLUMNS = 64  # of a block: a thread holds 16 adjacent ones
_MIN_DEPTH = 32  # one MMA instruction
_MAX_DEPTH = 256  # deeper panels leave too little shared memory for prefetches
_LARGE_DEPTH = 256  # from here on rows take long to load: more columns a program, fewer rows
_MIN_RUN = 3  # blocks that a program computes; with fewer, tiles are faster
# Rows and warps, the best first by times on an H200; two blocks are prefetched.
_SHAPES = ((128, 4), (64, 4))
_STAGES = 3
_PACKED = 4  # adjacent results that are computed as one INT32
_ROUNDING = ("relu_int8_by", "round_int8_by")  # last operations that pack results


@dataclass(frozen=True, slots=True)
class _RowPanel:
    """Blocks of `rows` x 64 results, `run` of them one after the other by one program."""

    rows: int
    warps: int
    run: int


def dense_int8_refusal(problem: GemmProblem, strides: MatrixStrides, gpu: GpuTarget) -> str | None:
    """Return why rows at `strides` are no INT8 product of one matrix and little depth, or None."""
    shape = problem.shape
    if not gpu.has_wgmma or shape.item_bytes != 1 or problem.y.item_bytes != 1:
        return "the operands are not INT8, or the GPU has no wgmma"
    if problem.layout != "rows" or not (fixed(shape.batch) and shape.batch == 1):
        return "it is batched, or the result is NCHW"
    if strides.column != 1 or problem.right_strides.row != 1:
        return "an operand is transposed"
    shallow = fixed(shape.depth) and shape.depth <= _MAX_DEPTH
    return None if shallow and fixed(shape.columns) else "it is too deep, or a size is dynamic"


def _refusal(problem: GemmProblem, gpu: GpuTarget) -> str | None:
    if not isinstance(problem.left, DenseLoader):
        return "the left operand is not a matrix"
    return dense_int8_refusal(problem, problem.left.strides, gpu)


def row_panel_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each panel height, none where the rows are too few for all SMs."""
    left = problem.left
    if not isinstance(left, DenseLoader):
        return ()
    return tuple(
        (_launch(ctx, problem, left, _RowPanel(rows, warps, run)),)
        for rows, warps in _shapes(problem)
        if (run := _run(problem, rows, ctx.gpu)) >= _MIN_RUN
    )


ROW_PANEL = Schedule("row panel", _refusal, row_panel_tactics)


def panel_constants(
    ctx: LoweringContext, problem: GemmProblem, strides: MatrixStrides, packed: bool
) -> dict[str, Constant]:
    """Return the constants that all kernels of row panels have.

    `packed`: the epilogue computes four adjacent results as one INT32.
    """
    ops, scalars = problem.epilogue.ops, problem.epilogue.scalars
    return {
        "DEPTH": problem.shape.depth,
        "COLUMNS": problem.shape.columns,
        "A_ROW": strides.row,
        "B_COLUMN": problem.right_strides.column,
        "Y_PITCH": problem.y_strides.row,
        "R_PITCH": problem.residual_strides.row,
        "EPILOGUE": _rectified_ops(ctx.network, problem, ops) if packed else ops,
        "SCALARS": 0 if scalars is None else scalars.elements,
        "BLOCK_N": COLUMNS,
        "BLOCK_K": block_depth(problem),
    }


def block_depth(problem: GemmProblem) -> int:
    """Return the depth of a panel: all of the product's, as a power of two."""
    return max(_MIN_DEPTH, power_of_two(problem.shape.depth))


def can_pack(problem: GemmProblem) -> bool:
    """Whether four adjacent results of a row, and of the residual, are one aligned INT32."""
    aligned = [problem.shape.columns, problem.y.offset, problem.y_strides.row]
    if problem.residual is not None:
        if problem.residual.scale is None:  # floats of two or four bytes
            return False
        aligned += [problem.residual.offset, problem.residual_strides.row]
    whole = all(fixed(n) and n % _PACKED == 0 for n in aligned)
    return whole and problem.epilogue.ops[-1][0] in _ROUNDING


def _launch(
    ctx: LoweringContext, problem: GemmProblem, left: DenseLoader, panel: _RowPanel
) -> KernelLaunch:
    shape = problem.shape
    packed = can_pack(problem)
    return make_launch(
        "row_panel_gemm",
        (ceil_div(shape.rows, panel.rows) * ceil_div(shape.columns, panel.run * COLUMNS), 1, 1),
        {
            "a": left.view,
            "b": problem.right,
            **problem.epilogue_operands(),
            "y": problem.y,
            "rows": shape.rows,
        },
        {
            **panel_constants(ctx, problem, left.strides, packed),
            "INT8X4": packed,
            "WARPS": panel.warps,
            "RUN": panel.run,
            "STAGES": _STAGES,
            "BLOCK_M": panel.rows,
        },
        writes=(problem.y,),
        warps=panel.warps,
        stages=_STAGES,
    )


def _rectified_ops(
    network: Network, problem: GemmProblem, ops: tuple[ExprOp, ...]
) -> tuple[ExprOp, ...]:
    """Return the operations; a residual that is never negative is read by a shorter one."""
    if problem.residual is None or ops[0][:2] != ("real_by", 1):
        return ops
    producers = {name: op for op in network.operations for name in op.outputs}
    rounding = producers.get(problem.residual.base)
    relu = producers.get(rounding.inputs[0]) if rounding and rounding.kind == ROUND else None
    if relu is None or relu.kind != "Relu":
        return ops
    return (("rectified_by", *ops[0][1:]), *ops[1:])


def _shapes(problem: GemmProblem) -> tuple[tuple[int, int], ...]:
    """Return the panels to try: low ones first for a large depth, else only for a residual."""
    high, low = _SHAPES
    if problem.shape.depth >= _LARGE_DEPTH:
        return (low, high)
    return (high, low) if problem.residual is not None else (high,)


def _run(problem: GemmProblem, rows: int, gpu: GpuTarget) -> int:
    """Return how many blocks of columns a program computes: fewer where SMs would be idle."""
    shape = problem.shape
    run = min(ceil_div(shape.columns, COLUMNS), 8 if shape.depth >= _LARGE_DEPTH else 4)
    panels = ceil_div(opt(shape.rows), rows)
    while run > 1 and panels * ceil_div(shape.columns, run * COLUMNS) < 2 * gpu.sm_count:
        run //= 2
    return run
