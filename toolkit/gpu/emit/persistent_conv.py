"""Convolutions of INT8 whose weights stay in shared memory -> calls of `resident`."""

from collections.abc import Mapping

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.windows import window_constants
from toolkit.gpu.ir.launch import KernelLaunch
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.shapes.sizes import ceil_div, fixed
from toolkit.gpu.target import sm_limits
from toolkit.graph.window import Window
from toolkit.plugins import Constant

_ROWS = 64  # pixels of a block: what four warps multiply at once
_WARPS = 4
_PIECE = 64  # of k: what the lanes of a row load at once
# Pieces of a product. 64 channels at batch 256: 70 us, of 4 pieces 78, of 8 96; 16 channels: of one
# piece 3 to 5 % faster than of two.
_RUN = 2
_RUN_OF_FEW = 1
_FEW = 16  # channels
_ALIGNED = 16  # channels that one lane loads, and the least block of columns
_WIDTHS = (64, 32, 16)  # of blocks of columns
_MOST_TAPS = 31  # a bit each
_MOST_FILTERS = 128  # their sums take half the registers
# ResNet-50 and a detector at batch 32 to 256 on one H200: up to here 1.1 to 2.6 times as fast as
# copies of both operands; half the filters of twice as many weights are slower.
_MOST_KEPT = 72 * 1024
# Programs of an SM, by filters at most: as many as its registers hold comes first, and they are
# known when the kernel is compiled. Measured as above.
_PROGRAMS = {16: (7, 6, 14), 32: (5, 4, 6), _MOST_FILTERS: (4, 3, 2)}


def persistent_conv_launches(
    ctx: LoweringContext,
    weights: Array,
    window: Window,
    *,
    operands: Mapping[str, View | int | None],
    constants: Mapping[str, Constant],
) -> tuple[KernelLaunch, ...]:
    """Return calls of a convolution of one group, weights (F, C, rows, columns), the best first.

    They share a kernel and differ in their programs. There are none where operands are not of
    INT8, or weights are too many to stay. `constants` hold sizes, pitches and steps.
    """
    y = operands["y"]
    assert isinstance(y, View)
    if not _suits(ctx, weights, window, operands, constants["X_PITCH"]):
        return ()
    packed = operand_order(weights)
    limits = sm_limits(ctx.gpu.sm)
    room = limits.shared_bytes // (packed.size + limits.reserved_bytes)
    pixels = y.shape[0] * y.shape[2] * y.shape[3]
    blocks = ceil_div(pixels, _ROWS)
    wanted = next(n for filters, n in _PROGRAMS.items() if weights.shape[0] <= filters)
    most = [ctx.gpu.sm_count * n for n in wanted if n <= room]
    counts = {min(n, blocks): None for n in most} if fixed(pixels) else dict.fromkeys(most)
    view = ctx.pack_constant(packed, "int8")
    return tuple(
        ctx.make_launch(
            "persistent_conv",
            (count, 1, 1),
            {**operands, "weights": view},
            {
                **constants,
                "CHANNELS": weights.shape[1],
                "W_PITCH": packed.shape[1],
                **window_constants(window),
                "RUNS": _runs(packed.shape[1] // _PIECE, weights.shape[1]),
                "WIDTHS": _widths(weights.shape[0]),
                "BLOCK_M": _ROWS,
                "WARPS": _WARPS,
            },
            writes=(y,),
            warps=_WARPS,
        )
        for count in counts
    )


def operand_order(weights: Array) -> Array:
    """Pack int8 weights (filter, channel, row, column) as `resident` reads them: (filter, k).

    k is counted by tap row, tap column and channel, filled up to whole pieces, and of each piece
    number 16 q + 8 s + 4 h + b is at place 32 s + 16 h + 4 q + b.
    """
    filters = weights.shape[0]
    flat = weights.transpose(0, 2, 3, 1).reshape(filters, -1)
    filled = np.pad(flat, ((0, 0), (0, -flat.shape[1] % _PIECE)))
    pieces: Array = filled.reshape(filters, -1, 4, 2, 2, 4).transpose(0, 1, 3, 4, 2, 5)
    return pieces.reshape(filters, -1)


def _suits(
    ctx: LoweringContext,
    weights: Array,
    window: Window,
    operands: Mapping[str, View | int | None],
    x_pitch: Constant,
) -> bool:
    x, y = operands["x"], operands["y"]
    assert isinstance(x, View)
    assert isinstance(y, View)
    assert isinstance(x_pitch, int)
    taps = window.kernel[0] * window.kernel[1]
    bytes_only = x.item_bytes == 1 and y.item_bytes == 1 and operands["scale"] is not None
    whole = weights.shape[0] % _ALIGNED == 0 and weights.shape[1] % _ALIGNED == 0
    aligned = whole and x_pitch % _ALIGNED == 0
    few = taps <= _MOST_TAPS and weights.shape[0] <= _MOST_FILTERS
    depth = ceil_div(weights.shape[1] * taps, _PIECE) * _PIECE
    kept = few and weights.shape[0] * depth <= _MOST_KEPT
    return ctx.gpu.has_wgmma and bytes_only and aligned and kept


def _runs(pieces: int, channels: int) -> tuple[tuple[int, int], ...]:
    """Return (first, count) of runs of pieces; the last may be shorter."""
    each = _RUN if channels > _FEW else _RUN_OF_FEW
    return tuple((at, min(each, pieces - at)) for at in range(0, pieces, each))


def _widths(columns: int) -> tuple[int, ...]:
    """Return blocks of columns, the widest first, that make up a multiple of 16."""
    widths: list[int] = []
    for width in _WIDTHS:
        widths += [width] * ((columns - sum(widths)) // width)
    return tuple(widths)
