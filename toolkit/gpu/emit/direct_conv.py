"""First convolutions of few numbers -> calls of `picture`."""

from math import prod

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import (
    constant_weights,
    epilogue_of,
    gemm_constants,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.emit.windows import read_window_2d, window_constants
from toolkit.gpu.ir.expressions import requantize_ops
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.view import channels_last
from toolkit.gpu.passes.direct_conv import MOST_NUMBERS, ROUNDED
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import Tile
from toolkit.gpu.shapes.sizes import ceil_div, opt, power_of_two

# Pixels of a block and its warps, the largest first: a thread of a large one has two pixels.
_SHAPES = ((256, 4), (128, 4), (64, 2))
_MOST_SUMS = 64  # of a thread, beside the numbers that it reads
_WARP = 32
_LEAST_COLUMNS = 16  # of a product of tensor cores


def emit_direct_conv(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvPicture: the picture is read as it lies, rounded, multiplied and stored."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    weights = constant_weights(ctx, op, 1)
    filters = weights.shape[0]
    grid = op.number(ROUNDED, 0.0) or x.scale
    integer = int8_weights(ctx, op, 0, filters, prod(weights.shape[1:]), grid=grid)
    epilogue = epilogue_of(ctx, group, op.input(2), integer)
    given = requantize_ops(x.scale, grid)
    if integer is None and grid is not None:  # the real numbers of the grid are multiplied
        given = (*given, ("real", len(given), grid))
    values = (integer.values if integer else weights).transpose(0, 2, 3, 1).reshape(filters, -1)
    values = np.pad(values, ((0, 0), (0, MOST_NUMBERS - values.shape[1])))
    packed = weight_matrix(ctx, values.T, "int8" if integer else ctx.dtype)
    result = ctx.network.shapes[group.result]
    window = read_window_2d(op, weights.shape[2:], x.shape, result)
    y = ctx.output_view(group.result, channels_last(result))
    pixels, columns = result[0] * result[2] * result[3], max(_LEAST_COLUMNS, power_of_two(filters))

    def call(rows: int, warps: int) -> KernelLaunch:
        tile = Tile(rows, columns, MOST_NUMBERS, warps, 1)
        constants = gemm_constants(ctx, tile, packed.dtype)
        del constants["BLOCK_K"]
        return ctx.make_launch(
            "direct_conv",
            (ceil_div(pixels, rows), 1, 1),
            {
                "x": x,
                "weights": packed,
                "bias": epilogue.bias,
                "scale": epilogue.scale,
                "scalars": epilogue.scalars,
                "y": y,
                "batch": x.shape[0],
            },
            {
                "HEIGHT": x.shape[2],
                "WIDTH": x.shape[3],
                "CHANNELS": x.shape[1],
                "STRIDES": x.strides,
                "OUT_HEIGHT": result[2],
                "OUT_WIDTH": result[3],
                "FILTERS": filters,
                "W_PITCH": packed.strides[1],
                "Y_PITCH": y.pixel_pitch(),
                **window_constants(window),
                "GIVEN": given,
                "EPILOGUE": epilogue.steps,
                "DEPTH": MOST_NUMBERS,
                "LEVELS": MOST_NUMBERS.bit_length() - 1,
                **constants,
            },
            writes=(y,),
            warps=warps,
        )

    def order(shape: tuple[int, int]) -> tuple[bool, int]:
        return ceil_div(opt(pixels), shape[0]) < 2 * ctx.gpu.sm_count, -shape[0]

    shapes = [(m, w) for m, w in _SHAPES if m * columns <= _MOST_SUMS * w * _WARP]
    ctx.add_op(group.nodes, *((call(*shape),) for shape in sorted(shapes, key=order)))
