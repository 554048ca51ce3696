"""First convolutions: few channels, read in long runs from a picture with a border.

Three channels are too few to lie side by side in the pieces of 16 bytes that GPUs copy. So the
picture gets four, the border that the convolution wants, and a look at it in which the taps of one
row are one tap:

    a pixel of it is RUN pixels of 4 channels side by side, and the next begins one pixel later.

The kernel that computes convolutions does not know: it sees channels, and a pitch less than them.

Convolutions of stride 2 read blocks of pixels instead (`toolkit.gpu.passes.space_to_depth`).
"""

from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.gemm import Window
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import Shape, View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import order_of
from toolkit.gpu.shapes.sizes import ceil_div, fixed

CHANNELS = 4  # with 2 pixels a step, FP16 is read 16 bytes at a time and INT8 8
_BLOCK = 1024  # elements of one block of the kernel that makes the border
_PIXEL_BLOCKS = 128  # blocks of pixels that one block of the GPU makes: one for each thread


@dataclass(frozen=True, slots=True)
class Stem:
    """The convolution as its kernel sees it: no padding, one column of taps."""

    x: View
    weights: Array
    window: Window


def is_stem(weights: Array, groups: int, window: Window, shape: Shape) -> bool:
    """Whether a convolution over pictures of this shape gains from it."""
    few = groups == 1 and weights.shape[1] <= CHANNELS
    return few and window.taps[1] > 1 and window.dilations[1] == 1 and all(map(fixed, shape[2:]))


def make_stem(
    ctx: LoweringContext, name: str, weights: Array, window: Window, result: Shape
) -> Stem:
    """Add the picture with its border; returns the convolution over it."""
    view = ctx.read(name)
    filters, channels, tap_rows, tap_columns = weights.shape
    run = tap_columns + tap_columns % 2  # whole pieces: the last weights are 0 then
    shape = (
        view.shape[0],
        CHANNELS,
        (result[2] - 1) * window.strides[0] + (tap_rows - 1) * window.dilations[0] + 1,
        ceil_div((result[3] - 1) * window.strides[1] + run, 2) * 2,
    )
    dtype = ctx.dtype if view.scale is None else view.dtype
    picture = ctx.allocate(f"{name} (bordered)", dtype, shape, channels_last(shape))
    picture = replace(picture, scale=view.scale)
    before = (0, 0, window.pads[0], window.pads[1])
    way = order_of(shape, [picture.strides, (view.strides[0], 0, 0, 0)], apart=[1, 2, 3])
    call = ctx.make_launch(
        "pad",
        (ceil_div(picture.elements, _BLOCK), 1, 1),
        {"x": view, "y": picture, "elements": picture.elements},
        {
            "SHAPE": way.shape,
            "Y_STRIDES": way.strides[0],
            "X_STRIDES": way.strides[1],
            "DIMS": tuple(way.places[at] for at in (1, 2, 3)),
            "BEFORE": before[1:],
            "SIZES": view.shape[1:],
            "BORDER_STRIDES": view.strides[1:],
            "MODE": "constant",
            "VALUE": 0,
            "BLOCK": _BLOCK,
        },
        writes=(picture,),
    )
    ctx.add_op((), (call,))
    spread = np.zeros((filters, tap_rows, run, CHANNELS), weights.dtype)
    spread[:, :, :tap_columns, :channels] = weights.transpose(0, 2, 3, 1)
    return Stem(
        picture,
        spread.reshape(filters, tap_rows, 1, -1).transpose(0, 3, 1, 2),
        replace(window, taps=(tap_rows, 1), dilations=(window.dilations[0], 1), pads=(0, 0, 0, 0)),
    )


def emit_space_to_depth_stem(ctx: LoweringContext, group: Group) -> None:
    """Add PixelBlocks, and a rounding after it: one call reads the picture as it is given."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    batch, _, rows, columns = y.shape
    before = op.integers("before", (0, 0))
    copied = not group.after and x.scale == y.scale
    steps = () if copied else ctx.expression(op.outputs[0], group.after, x.scale).ops
    call = ctx.make_launch(
        "space_to_depth",
        (ceil_div(batch * rows * columns, _PIXEL_BLOCKS), 1, 1),
        {"x": x, "y": y, "batch": batch},
        {
            "CHANNELS": x.shape[1],
            "HEIGHT": x.shape[2],
            "WIDTH": x.shape[3],
            "STRIDES": x.strides,
            "OUT_HEIGHT": rows,
            "OUT_WIDTH": columns,
            "TOP": before[0],
            "LEFT": before[1],
            "EPILOGUE": steps,
            "BLOCK": _PIXEL_BLOCKS,
        },
        writes=(y,),
    )
    ctx.add_op(group.nodes, (call,))
