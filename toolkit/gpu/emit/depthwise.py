"""Lower depthwise convolutions: a thread computes a few channels of a patch of pixels.

INT8 ones of few taps go to `depthwise_int8`, which multiplies four taps in one instruction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.convolution_operands import Conv2d
from toolkit.gpu.emit.launches import make_launch
from toolkit.gpu.ir.launch import KernelLaunch, Tactic
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.ir.windows import window_constants
from toolkit.gpu.shapes.sizes import ceil_div, opt
from toolkit.gpu.target import WARP
from toolkit.graph.window import Window
from toolkit.plugins import Constant

_INT8X4 = 4  # channels of an INT32
_MAX_UNROLLED_TAPS = 49  # with more a thread has one pixel, and INT8 one product an instruction
_THREADS = 128  # of a block


@dataclass(frozen=True, slots=True)
class _Patch:
    """Output pixels of a thread, and their channels."""

    rows: int
    columns: int
    channels: int = 4


_PATCHES = (_Patch(2, 4), _Patch(4, 2), _Patch(2, 2), _Patch(4, 4))
_PATCHES_OF_MANY_TAPS = (_Patch(2, 4), _Patch(4, 4), _Patch(2, 8), _Patch(2, 2))
_PIXEL = (_Patch(1, 1),)
_INT8X4_PATCHES = (_Patch(4, 4), _Patch(7, 4), _Patch(2, 4), _Patch(4, 2), _Patch(2, 2))
_INT8X4_PATCHES_OF_MANY_TAPS = (_Patch(4, 2), _Patch(2, 4), _Patch(2, 2))  # registers
_INT8X4_PATCHES_OF_MOST_TAPS = (_Patch(2, 4), _Patch(2, 2), _Patch(1, 4))
_MANY_TAPS = 10
_MOST_TAPS = 26
_MAX_TACTICS = 3  # of an engine
# Fixed time of a launch, in blocks of a busy SM. Fitted to 12 layers of MobileNetV2 and
# EfficientNet-B0 at batch 32 and 128 on one H200, in INT8: the first tactic takes 3 % longer
# than the fastest on average, 12 % at most; the best of three 0.5 % and 7 %.
_BLOCK_OVERHEAD = 1
_LOAD_CYCLES = 6  # of a thread's load: its mask, its address, and 0 where it reads nothing


def emit_depthwise(ctx: LoweringContext, nodes: tuple[str, ...], conv: Conv2d) -> None:
    """Add a depthwise convolution, weights (C, 1, rows, columns), with its best patches."""
    window, taps = conv.left.window, _taps(conv.left.window)
    patches: tuple[_Patch, ...]
    if _fits_int8x4(conv):
        spacing = 2 if window.kernel[1] <= 3 else 4  # fewest instructions
        weights = ctx.weights.pack(packed_taps(conv.weights[:, 0], spacing), "int32")
        constants: dict[str, Constant] = {**window_constants(window), "SPACING": spacing}
        del constants["DILATION"]
        patches = _INT8X4_PATCHES_OF_MANY_TAPS if taps >= _MANY_TAPS else _INT8X4_PATCHES
        tactics = _tactics(
            ctx,
            conv,
            _INT8X4_PATCHES_OF_MOST_TAPS if taps >= _MOST_TAPS else patches,
            lambda patch: _int8x4_cycles(patch, window, spacing),
            lambda patch: ("depthwise_int8", weights, constants),
        )
    else:
        patches = _PATCHES_OF_MANY_TAPS if taps >= _MANY_TAPS else _PATCHES
        if taps > _MAX_UNROLLED_TAPS:
            patches = _PIXEL

        def kernel(patch: _Patch) -> tuple[str, View, Mapping[str, Constant]]:
            channels = conv.weights.shape[0]
            padded = (0, ceil_div(channels, patch.channels) * patch.channels - channels)
            values = np.pad(conv.weights[:, 0].transpose(1, 2, 0), ((0, 0), (0, 0), padded))
            packed = ctx.weights.pack(values, "float32")
            return "depthwise", packed, {**window_constants(window), "VECTOR": patch.channels}

        tactics = _tactics(ctx, conv, patches, lambda patch: _cycles(patch, window), kernel)
    ctx.add_op(nodes, *tactics)


def _tactics(
    ctx: LoweringContext,
    conv: Conv2d,
    patches: tuple[_Patch, ...],
    cycles: Callable[[_Patch], float],
    kernel: Callable[[_Patch], tuple[str, View, Mapping[str, Constant]]],
) -> tuple[Tactic, ...]:
    """Return a launch for each of the best patches; `cycles` are those of a thread."""
    y = conv.y

    def threads(patch: _Patch) -> int:
        down, across = ceil_div(y.shape[2], patch.rows), ceil_div(y.shape[3], patch.columns)
        return y.shape[0] * down * across * ceil_div(conv.weights.shape[0], patch.channels)

    def cost(patch: _Patch) -> float:
        blocks = opt(threads(patch)) / (_THREADS * ctx.gpu.sm_count)
        return cycles(patch) * (blocks + _BLOCK_OVERHEAD)

    def launch(patch: _Patch) -> KernelLaunch:
        name, weights, constants = kernel(patch)
        return make_launch(
            name,
            (ceil_div(threads(patch), _THREADS), 1, 1),
            {**conv.operands(), "weights": weights},
            {
                **conv.constants(),
                **constants,
                "ROWS": patch.rows,
                "COLUMNS": patch.columns,
                "BLOCK": _THREADS,
            },
            writes=(y,),
            warps=_THREADS // WARP,
        )

    best = sorted(patches, key=cost)[: None if ctx.gpu.exhaustive else _MAX_TACTICS]
    return tuple((launch(patch),) for patch in best)


def packed_taps(weights: Array, spacing: int) -> Array:
    """Pack int8 weights (channel, row, column) as `depthwise_int8` reads them.

    (row, o, k, channel), int32: taps 4 k - o to 4 k - o + 3 of a row, the first the lowest byte.
    """
    channels, rows, columns = weights.shape
    each = ceil_div(spacing - 1 + columns, _INT8X4)
    packed = np.zeros((rows, spacing, each, channels, _INT8X4), np.int8)
    for o in range(spacing):
        for tap in range(columns):
            packed[:, o, (tap + o) // _INT8X4, :, (tap + o) % _INT8X4] = weights[:, :, tap].T
    return packed.view("<i4")[..., 0]


def _taps(window: Window) -> int:
    return window.kernel[0] * window.kernel[1]


def _fits_int8x4(conv: Conv2d) -> bool:
    """Whether operands are INT8 and can be read four channels at a time, with few taps."""
    window = conv.left.window
    whole = conv.weights.shape[0] % _INT8X4 == 0 and conv.left.pitch % _INT8X4 == 0
    near = window.dilations == (1, 1) and max(window.strides) <= 2
    int8 = conv.left.view.item_bytes == 1 and conv.epilogue.scale is not None
    return int8 and whole and near and _taps(window) <= _MAX_UNROLLED_TAPS


def _int8x4_cycles(patch: _Patch, window: Window, spacing: int) -> int:
    """Estimate the time of one thread in cycles: multiply-adds plus loads."""
    taps, strides = window.kernel, window.strides
    furthest = (spacing - 1) // strides[1] * strides[1]
    products = taps[0] * ceil_div(furthest + taps[1], _INT8X4)
    return products * patch.rows * patch.columns + _inputs(patch, window)


def _cycles(patch: _Patch, window: Window) -> int:
    """Estimate the time of one thread in cycles: multiply-adds, conversions and loads."""
    pixels = patch.rows * patch.columns
    loads = _inputs(patch, window) + pixels
    return _taps(window) * pixels * patch.channels + loads * (patch.channels + _LOAD_CYCLES)


def _inputs(patch: _Patch, window: Window) -> int:
    """Return the input pixels of a patch."""
    down = (patch.rows - 1) * window.strides[0] + window.spans[0]
    across = (patch.columns - 1) * window.strides[1] + window.spans[1]
    return down * across
