"""Depthwise convolutions of INT8 by words of four bytes -> calls of `depthwise_int8`."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.graph.window import Window
from toolkit.plugins import Constant

_QUAD = 4  # channels of a lane, and bytes of a word
_MOST_TAPS = 25  # more take more registers than there are
_LANES = 128  # of a block


@dataclass(frozen=True, slots=True)
class _Patch:
    """Pixels that a lane makes."""

    rows: int
    columns: int


_PATCHES = (_Patch(4, 4), _Patch(7, 4), _Patch(2, 4), _Patch(4, 2), _Patch(2, 2))
_PATCHES_OF_MANY_TAPS = (_Patch(4, 2), _Patch(2, 4), _Patch(2, 2))  # larger ones fill registers
_MANY_TAPS = 10
_CARRIED = 3  # patches, of each of which an engine carries a kernel
# What a block by itself takes, in blocks of a busy SM. Fitted to 12 layers of MobileNetV2 and
# EfficientNet-B0 at batch 32 and 128 on one H200: what comes first takes 3 % longer than the
# fastest on average, 12 % at most, the best of three 0.5 % and 7 %.
_ALONE = 1


def int8x4_launches(
    ctx: LoweringContext,
    weights: Array,
    window: Window,
    *,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[KernelLaunch, ...]:
    """Return calls of a depthwise convolution, weights (C, 1, rows, columns), the best first.

    There are none where operands are not of INT8, or lie so that no words are read. `constants`
    hold sizes, pitches and steps.
    """
    x, y = operands["x"], operands["y"]
    assert isinstance(x, View)
    assert isinstance(y, View)
    if not _suits(weights, window, constants["X_PITCH"], x, operands["scale"]):
        return ()
    channels: int = weights.shape[0]
    spacing = 2 if window.kernel[1] <= 3 else 4  # fewest instructions
    packed = ctx.pack_constant(packed_taps(weights[:, 0], spacing), "int32")
    patches = _PATCHES if np.prod(window.kernel) < _MANY_TAPS else _PATCHES_OF_MANY_TAPS

    def lanes(patch: _Patch) -> int:
        down, across = ceil_div(y.shape[2], patch.rows), ceil_div(y.shape[3], patch.columns)
        return y.shape[0] * down * across * (channels // _QUAD)

    def cost(patch: _Patch) -> float:
        blocks = opt(lanes(patch)) / (_LANES * ctx.gpu.sm_count)
        return _work(patch, window, spacing) * (blocks + _ALONE)

    best = sorted(patches, key=cost)
    return tuple(
        ctx.make_launch(
            "depthwise_int8",
            (ceil_div(lanes(patch), _LANES), 1, 1),
            {**operands, "weights": packed},
            {
                **constants,
                "CHANNELS": channels,
                "TAP_ROWS": window.kernel[0],
                "TAP_COLUMNS": window.kernel[1],
                "STRIDE_H": window.strides[0],
                "STRIDE_W": window.strides[1],
                "PAD_TOP": window.before[0],
                "PAD_LEFT": window.before[1],
                "ROWS": patch.rows,
                "COLUMNS": patch.columns,
                "SPACING": spacing,
                "BLOCK": _LANES,
            },
            writes=(y,),
            warps=_LANES // 32,
        )
        for patch in (best if ctx.gpu.exhaustive else best[:_CARRIED])
    )


def packed_taps(weights: Array, spacing: int) -> Array:
    """Pack int8 weights (channel, row, column) as `depthwise_int8` reads them.

    (row, o, k, channel), int32: taps 4 k - o to 4 k - o + 3 of a row, the first the lowest byte.
    """
    channels, rows, columns = weights.shape
    each = ceil_div(spacing - 1 + columns, _QUAD)
    words = np.zeros((rows, spacing, each, channels, _QUAD), np.int8)
    for o in range(spacing):
        for tap in range(columns):
            words[:, o, (tap + o) // _QUAD, :, (tap + o) % _QUAD] = weights[:, :, tap].T
    return words.view("<i4")[..., 0]


def _suits(
    weights: Array, window: Window, x_pitch: Constant, x: View, scale: View | int | None
) -> bool:
    assert isinstance(x_pitch, int)
    whole = weights.shape[0] % _QUAD == 0 and x_pitch % _QUAD == 0
    near = window.dilations == (1, 1) and max(window.strides) <= 2
    few = window.kernel[0] * window.kernel[1] <= _MOST_TAPS
    return x.item_bytes == 1 and scale is not None and whole and near and few


def _work(patch: _Patch, window: Window, spacing: int) -> int:
    """Return how long a lane takes, about: its products, and the pixels that it reads."""
    taps, strides = window.kernel, window.strides
    furthest = (spacing - 1) // strides[1] * strides[1]
    products = taps[0] * ceil_div(furthest + taps[1], _QUAD)
    down = (patch.rows - 1) * strides[0] + taps[0]
    across = (patch.columns - 1) * strides[1] + taps[1]
    return products * patch.rows * patch.columns + down * across
