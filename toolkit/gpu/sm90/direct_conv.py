"""Direct convolutions: a thread reads the window of its pixels from the tensor as it is stored."""

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import pixel_product, read_filters
from toolkit.gpu.emit.epilogue import precision_of, weight_matrix
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.schedule import Schedule, add_gemm
from toolkit.gpu.emit.windows import read_window, window_constants
from toolkit.gpu.ir.expressions import requantize_ops
from toolkit.gpu.ir.gemm import DirectLoader, GemmProblem
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two
from toolkit.gpu.sm90.passes.direct_conv import ROUNDING_SCALE, WINDOW_ELEMENTS
from toolkit.gpu.target import WARP, GpuTarget

# Pixels of a block and its warps, the largest first: a thread of a large one has two pixels.
_SHAPES = ((256, 4), (128, 4), (64, 2))
_MAX_ACCUMULATORS = 64  # of a thread, beside the elements that it reads
_MIN_COLUMNS = 16  # of an MMA instruction


def emit_direct_conv(ctx: LoweringContext, group: Group) -> None:
    """Add a DirectConv; it quantizes what it reads where the operation says so."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    scale = op.number(ROUNDING_SCALE, 0.0) or x.scale
    filters = read_filters(ctx, group, scale)
    prologue = requantize_ops(x.scale, scale)
    if not filters.is_int8 and scale is not None:  # dequantized values are multiplied
        prologue = (*prologue, ("real", len(prologue), scale))
    values = filters.values.transpose(0, 2, 3, 1).reshape(len(filters.values), -1)
    depth = values.shape[1]
    values = np.pad(values, ((0, 0), (0, WINDOW_ELEMENTS - depth)))
    packed = weight_matrix(ctx, values.T, "int8" if filters.is_int8 else ctx.dtype)
    result = ctx.network.shapes[group.result]
    window = read_window(op, filters.values.shape[2:], x.shape, result)
    y = ctx.output_view(group.result, channels_last(result))
    left = DirectLoader(x, (result[2], result[3]), window, prologue)
    add_gemm(ctx, group.nodes, pixel_product(left, packed, y, filters.epilogue, depth))


def _refusal(problem: GemmProblem, gpu: GpuTarget) -> str | None:
    if not isinstance(problem.left, DirectLoader):
        return "the left operand is stored"
    return None if gpu.has_wgmma else "the kernel is not timed on this GPU"


def direct_tactics(ctx: LoweringContext, problem: GemmProblem) -> tuple[Tactic, ...]:
    """Return a tactic for each block size whose accumulators stay in registers."""
    left, pixels = problem.left, problem.shape.rows
    if not isinstance(left, DirectLoader):
        return ()
    columns = max(_MIN_COLUMNS, power_of_two(problem.shape.columns))

    def order(shape: tuple[int, int]) -> tuple[bool, int]:
        return ceil_div(opt(pixels), shape[0]) < 2 * ctx.gpu.sm_count, -shape[0]

    shapes = [(m, w) for m, w in _SHAPES if m * columns <= _MAX_ACCUMULATORS * w * WARP]
    return tuple(
        (_launch(ctx, problem, left, columns=columns, rows=rows, warps=warps),)
        for rows, warps in sorted(shapes, key=order)
    )


DIRECT = Schedule("direct", _refusal, direct_tactics)


def _launch(
    ctx: LoweringContext,
    problem: GemmProblem,
    left: DirectLoader,
    *,
    columns: int,
    rows: int,
    warps: int,
) -> KernelLaunch:
    x = left.view
    return make_launch(
        "direct_conv",
        (ceil_div(problem.shape.rows, rows), 1, 1),
        {
            "x": x,
            "weights": problem.right,
            **problem.epilogue.operands(),
            "y": problem.y,
            "batch": x.shape[0],
        },
        {
            "SIZE": x.shape[2:],
            "OUT": left.output_size,
            "CHANNELS": x.shape[1],
            "STRIDES": x.strides,
            "FILTERS": problem.shape.columns,
            "W_PITCH": problem.right_strides.column,
            "Y_PITCH": problem.y_strides.row,
            **window_constants(left.window),
            "PROLOGUE": left.prologue,
            "EPILOGUE": problem.epilogue.ops,
            "PRECISION": precision_of(ctx.gpu, problem.right.dtype),
            "DEPTH": WINDOW_ELEMENTS,
            "LEVELS": WINDOW_ELEMENTS.bit_length() - 1,
            "BLOCK_M": rows,
            "BLOCK_N": columns,
        },
        writes=(problem.y,),
        warps=warps,
    )
