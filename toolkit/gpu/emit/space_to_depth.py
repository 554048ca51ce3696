"""First convolutions of few channels: a padded copy of the input, whose rows of taps are one tap.

Three channels are too few for vectorized loads of 16 bytes. So the input is copied with four
channels and the padding of the convolution, and read through a view in which the taps of a row are
one tap:

    a pixel of the view is RUN adjacent pixels of 4 channels, and the next starts one pixel later.

To the convolution's kernel these are channels, with a pitch less than their number.

Convolutions of stride 2 read blocks of pixels instead (`toolkit.gpu.passes.first_convolutions`).
"""

from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.emit.pad import padded_copy
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import Shape, View, channels_last
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.graph.window import Window

CHANNELS = 4  # two pixels are 16 bytes of FP16, 8 of INT8
_PIXEL_BLOCKS = 128  # 2x2 pixels: one for each thread


@dataclass(frozen=True, slots=True)
class Stem:
    """The convolution of the copy: no padding, one column of taps."""

    x: View
    weights: Array
    window: Window


def is_stem(weights: Array, groups: int, window: Window, shape: Shape) -> bool:
    """Whether a convolution of an input of this shape gains from it."""
    few = groups == 1 and weights.shape[1] <= CHANNELS
    return few and window.kernel[1] > 1 and window.dilations[1] == 1 and all(map(fixed, shape[2:]))


def make_stem(
    ctx: LoweringContext, name: str, weights: Array, window: Window, result: Shape
) -> Stem:
    """Add the padded copy of the tensor `name`; return the convolution of it."""
    view = ctx.read(name)
    filters, channels, tap_rows, tap_columns = weights.shape
    run = tap_columns + tap_columns % 2  # the last weights may be 0
    shape = (
        view.shape[0],
        CHANNELS,
        (result[2] - 1) * window.strides[0] + (tap_rows - 1) * window.dilations[0] + 1,
        ceil_div((result[3] - 1) * window.strides[1] + run, 2) * 2,
    )
    dtype = ctx.float_type(name) if view.scale is None else view.dtype
    padded = ctx.allocate(f"{name} (padded)", dtype, shape, channels_last(shape))
    padded = replace(padded, scale=view.scale)
    before = {1: 0, 2: window.before[0], 3: window.before[1]}
    ctx.add_op((), (padded_copy(view, padded, before),))
    rows = np.zeros((filters, tap_rows, run, CHANNELS), weights.dtype)
    rows[:, :, :tap_columns, :channels] = weights.transpose(0, 2, 3, 1)
    return Stem(
        padded,
        rows.reshape(filters, tap_rows, 1, -1).transpose(0, 3, 1, 2),
        replace(
            window, kernel=(tap_rows, 1), dilations=(window.dilations[0], 1), pads=(0, 0, 0, 0)
        ),
    )


def emit_space_to_depth_stem(ctx: LoweringContext, group: Group) -> None:
    """Add a SpaceToDepthStem with its epilogue."""
    op = group.root_operation
    x = ctx.read(op.inputs[0])
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    batch, _, rows, columns = y.shape
    before = op.integers("before", (0, 0))
    copied = not group.after and x.scale == y.scale
    steps = () if copied else ctx.expression(op.outputs[0], group.after, x.scale).ops
    launch = make_launch(
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
    ctx.add_op(group.nodes, (launch,))
