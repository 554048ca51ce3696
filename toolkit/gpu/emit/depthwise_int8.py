"""Lower INT8 depthwise convolutions to `depthwise_int8`, which packs four channels in an INT32."""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv2d import Conv2d
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.gpu.target import WARP
from toolkit.graph.window import Window

_CHANNELS_PER_THREAD = 4  # channels of a thread, one INT32
_MAX_TAPS = 25  # more take more registers than there are
_THREADS = 128  # of a block


@dataclass(frozen=True, slots=True)
class _Patch:
    """Output pixels of a thread."""

    rows: int
    columns: int


_PATCHES = (_Patch(4, 4), _Patch(7, 4), _Patch(2, 4), _Patch(4, 2), _Patch(2, 2))
_PATCHES_OF_MANY_TAPS = (_Patch(4, 2), _Patch(2, 4), _Patch(2, 2))  # larger ones fill registers
_MANY_TAPS = 10
_MAX_TACTICS = 3  # of an engine
# Fixed time of a launch, in blocks of a busy SM. Fitted to 12 layers of MobileNetV2 and
# EfficientNet-B0 at batch 32 and 128 on one H200: the first tactic takes 3 % longer
# than the fastest on average, 12 % at most; the best of three 0.5 % and 7 %.
_BLOCK_OVERHEAD = 1


def depthwise_int8_launches(ctx: LoweringContext, conv: Conv2d) -> tuple[KernelLaunch, ...]:
    """Return launches of a depthwise convolution, weights (C, 1, rows, columns), the best first.

    There are none where operands are not INT8, or cannot be read four channels at a time.
    """
    if not _applies(conv):
        return ()
    window, y = conv.left.window, conv.y
    channels: int = conv.weights.shape[0]
    spacing = 2 if window.kernel[1] <= 3 else 4  # fewest instructions
    packed = ctx.weights.pack(packed_taps(conv.weights[:, 0], spacing), "int32")
    many = window.kernel[0] * window.kernel[1] >= _MANY_TAPS

    def threads(patch: _Patch) -> int:
        down, across = ceil_div(y.shape[2], patch.rows), ceil_div(y.shape[3], patch.columns)
        return y.shape[0] * down * across * (channels // _CHANNELS_PER_THREAD)

    def cost(patch: _Patch) -> float:
        blocks = opt(threads(patch)) / (_THREADS * ctx.gpu.sm_count)
        return _thread_cycles(patch, window, spacing) * (blocks + _BLOCK_OVERHEAD)

    best = sorted(_PATCHES_OF_MANY_TAPS if many else _PATCHES, key=cost)
    return tuple(
        make_launch(
            "depthwise_int8",
            (ceil_div(threads(patch), _THREADS), 1, 1),
            {**conv.operands(), "weights": packed},
            {
                **conv.constants(),
                "TAPS": window.kernel,
                "STRIDE": window.strides,
                "PAD": window.before,
                "ROWS": patch.rows,
                "COLUMNS": patch.columns,
                "SPACING": spacing,
                "BLOCK": _THREADS,
            },
            writes=(y,),
            warps=_THREADS // WARP,
        )
        for patch in (best if ctx.gpu.exhaustive else best[:_MAX_TACTICS])
    )


def packed_taps(weights: Array, spacing: int) -> Array:
    """Pack int8 weights (channel, row, column) as `depthwise_int8` reads them.

    (row, o, k, channel), int32: taps 4 k - o to 4 k - o + 3 of a row, the first the lowest byte.
    """
    channels, rows, columns = weights.shape
    each = ceil_div(spacing - 1 + columns, _CHANNELS_PER_THREAD)
    packed = np.zeros((rows, spacing, each, channels, _CHANNELS_PER_THREAD), np.int8)
    for o in range(spacing):
        for tap in range(columns):
            packed[:, o, (tap + o) // _CHANNELS_PER_THREAD, :, (tap + o) % _CHANNELS_PER_THREAD] = (
                weights[:, :, tap].T
            )
    return packed.view("<i4")[..., 0]


def _applies(conv: Conv2d) -> bool:
    window = conv.left.window
    whole = (
        conv.weights.shape[0] % _CHANNELS_PER_THREAD == 0
        and conv.left.pitch % _CHANNELS_PER_THREAD == 0
    )
    near = window.dilations == (1, 1) and max(window.strides) <= 2
    few = window.kernel[0] * window.kernel[1] <= _MAX_TAPS
    int8 = conv.left.view.item_bytes == 1 and conv.epilogue.scale is not None
    return int8 and whole and near and few


def _thread_cycles(patch: _Patch, window: Window, spacing: int) -> int:
    """Estimate the time of one thread in cycles: multiply-adds plus loads."""
    taps, strides = window.kernel, window.strides
    furthest = (spacing - 1) // strides[1] * strides[1]
    products = taps[0] * ceil_div(furthest + taps[1], _CHANNELS_PER_THREAD)
    down = (patch.rows - 1) * strides[0] + taps[0]
    across = (patch.columns - 1) * strides[1] + taps[1]
    return products * patch.rows * patch.columns + down * across
