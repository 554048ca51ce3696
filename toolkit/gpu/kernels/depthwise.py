"""Depthwise convolution: each channel with a filter of its own, on channels-last tensors.

    y[p, c] = STEPS((sum_t a[p, t, c] w[t, c] + bias[c]) scale[c], residual[p, c])

Row p is an output pixel, c a channel, t a tap; a[p, t, c] is the input under the tap, 0 outside the
picture. There is no product of matrices in this: it runs at the speed of memory.

Weights are [tap row, tap column, channel], row-major.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import store_rows


@triton.jit
def depthwise(
    x, weights, bias, scale, numbers, residual, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels, blocks of channels)."""
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    image = p // (OUT_HEIGHT * OUT_WIDTH)
    top = p // OUT_WIDTH % OUT_HEIGHT * STRIDE_H - PAD_TOP
    left = p % OUT_WIDTH * STRIDE_W - PAD_LEFT

    NUMBER: tl.constexpr = tl.float32 if scale is None else tl.int32
    total = tl.zeros((BLOCK_M, BLOCK_N), NUMBER)
    TAPS: tl.constexpr = TAP_ROWS * TAP_COLUMNS
    AT_ONCE: tl.constexpr = TAPS if TAPS < 50 else 1  # thousands unrolled compile for minutes
    for start in range(0, TAPS, AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            tap = start + part
            h = top + tap // TAP_COLUMNS * DILATION_H
            w = left + tap % TAP_COLUMNS * DILATION_W
            inside = (p < pixels) & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            place = ((image * HEIGHT + h) * WIDTH + w) * X_PITCH
            inside = inside[:, None] & (c < CHANNELS)[None, :]
            a = tl.load(x + place[:, None] + c[None, :], mask=inside, other=0)
            b = tl.load(weights + tap * CHANNELS + c, mask=c < CHANNELS, other=0)
            total += a.to(NUMBER) * b.to(NUMBER)[None, :]

    store_rows(
        total, bias, scale, residual, y, p, c, pixels, CHANNELS, Y_PITCH, R_PITCH, STEPS, numbers
    )
