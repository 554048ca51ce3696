"""Back-to-back INT8 products: one kernel computes a product, and the product of its result.

The first writes a tensor that the second is the next to read: in a residual network the last
convolution of a block and the first of the next. Both become one operation, so that memory planning
knows that one kernel reads and writes all tensors of both.
"""

from collections.abc import Sequence

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import WEIGHTS
from toolkit.gpu.ir.gemm import DenseLoader, GemmProblem
from toolkit.gpu.ir.launch import Tactic, TunableOp
from toolkit.gpu.shapes.sizes import fixed
from toolkit.gpu.sm90.persistent_gemm import (
    MAX_PAIR_COLUMNS,
    PERSISTENT_GEMM,
    persistent_pair_tactics,
    rows_of,
)


def fuse_back_to_back(ctx: LoweringContext, ops: Sequence[TunableOp]) -> tuple[TunableOp, ...]:
    """Fuse adjacent pairs of products that one kernel can compute.

    The tactics of a pair are each tactic of the first followed by each of the second, then those
    that compute both. So its first tactic is the first of both.
    """
    fused: list[TunableOp] = []
    for op in ops:
        fused_tactics = _pair_tactics(ctx, fused[-1], op) if fused else ()
        if fused_tactics:
            before = fused.pop()
            separate = (first + second for first in before.tactics for second in op.tactics)
            fused.append(TunableOp((*before.nodes, *op.nodes), (*separate, *fused_tactics)))
        else:
            fused.append(op)
    return tuple(fused)


def _pair_tactics(ctx: LoweringContext, first: TunableOp, second: TunableOp) -> tuple[Tactic, ...]:
    if first.problem is None or second.problem is None:
        return ()
    persistent = PERSISTENT_GEMM.refusal(first.problem, ctx.gpu) is None
    if not persistent or not _can_follow(second.problem):
        return ()
    if not _reads_result(second.problem, first.problem):
        return ()
    if not PERSISTENT_GEMM.tactics(ctx, first.problem):  # SMs have too few rows
        return ()
    return persistent_pair_tactics(ctx, first.problem, second.problem)


def _can_follow(problem: GemmProblem) -> bool:
    """Whether a product is of INT8, with few columns, constant weights and no residual."""
    left, shape = problem.left, problem.shape
    if not isinstance(left, DenseLoader) or problem.layout != "rows":
        return False
    int8 = left.view.dtype == problem.y.dtype == "int8"
    constant = problem.right.base == WEIGHTS and problem.residual is None
    dense = left.strides.column == 1 and problem.right_strides.row == 1
    few = fixed(shape.columns) and shape.columns <= MAX_PAIR_COLUMNS
    single = fixed(shape.batch) and shape.batch == 1
    return int8 and constant and dense and few and single and fixed(problem.y_strides.row)


def _reads_result(second: GemmProblem, first: GemmProblem) -> bool:
    """Whether the rows of `second` are all rows and columns that `first` computes."""
    rows = rows_of(first.left)
    if rows is None or not isinstance(second.left, DenseLoader):
        return False
    pitches = (rows.strides.row, first.y_strides.row, first.residual_strides.row)
    if not all(map(fixed, pitches)):
        return False
    read, written = second.left.view, first.y
    same_tensor = (read.base, read.offset) == (written.base, written.offset)
    same_rows = second.shape.rows == first.shape.rows
    same_columns = (second.shape.depth, second.left.strides.row) == (
        first.shape.columns,
        first.y_strides.row,
    )
    return same_tensor and same_rows and same_columns
