"""Split-K: where blocks are few, several share the depth, and a second kernel adds their sums."""

from dataclasses import replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.gemm import IDENTITY, DenseLoader, GemmProblem, Im2colLoader, MatrixStrides
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import View, row_major
from toolkit.gpu.schedule.tiles import row_tile
from toolkit.gpu.shapes.sizes import ceil_div, fixed

_MIN_ROWS = 8  # of a block that adds: 4 numbers of a row for each thread


def split_k_refusal(problem: GemmProblem) -> str | None:
    """Return why the depth cannot be shared; None if it can."""
    left, shape = problem.left, problem.shape
    if problem.layout != "rows":
        return "the result is NCHW"
    if isinstance(left, Im2colLoader):
        return None
    if not isinstance(left, DenseLoader):
        return f"no split-K kernel has a {type(left).__name__}"
    if left.strides.column != 1 or problem.right_strides.row != 1:
        return "an operand is transposed"
    if not (fixed(shape.batch) and shape.batch == 1):
        return "it is batched"
    return None if fixed(shape.depth) and fixed(shape.columns) else "its sizes are dynamic"


def partial_sums(ctx: LoweringContext, problem: GemmProblem, parts: int) -> GemmProblem:
    """Return the problem that stores sums as (parts, rows, columns), FP32 or INT32."""
    left, shape = problem.left, problem.shape
    columns = shape.columns * shape.batch
    sizes = (parts, shape.rows, columns)
    dtype = "int32" if left.view.dtype == "int8" else "float32"
    sums = ctx.allocate(f"{problem.y.base} (parts)", dtype, sizes, row_major(sizes))
    sums = replace(sums, scale=left.view.scale)  # INT8: its reader rounds as other INT8 kernels do
    return replace(
        problem,
        y=sums,
        y_strides=MatrixStrides(columns),
        epilogue=IDENTITY,
        residual=None,
        residual_strides=MatrixStrides(0),
    )


def split_k_reduce_launch(ctx: LoweringContext, problem: GemmProblem, sums: View) -> KernelLaunch:
    """Return the launch that adds the sums of all parts and applies the problem's epilogue."""
    rows, columns = problem.shape.rows, problem.shape.columns * problem.shape.batch
    tile = row_tile(rows, columns)
    column_blocks = ceil_div(columns, tile.columns)
    height = tile.rows
    while height > _MIN_ROWS and ceil_div(rows, height) * column_blocks < ctx.gpu.sm_count:
        height //= 2
    return make_launch(
        "split_k_reduce",
        (ceil_div(rows, height) * column_blocks, 1, 1),
        {"x": sums, **problem.epilogue_operands(), "y": problem.y, "rows": rows},
        {
            "COLUMNS": columns,
            "Y_PITCH": problem.y_strides.row,
            "R_PITCH": problem.residual_strides.row,
            "EPILOGUE": problem.epilogue.ops,
            "SPLIT_K": sums.shape[0],
            "BLOCK_M": height,
            "BLOCK_N": tile.columns,
        },
        writes=(problem.y,),
        warps=tile.warps,
    )
