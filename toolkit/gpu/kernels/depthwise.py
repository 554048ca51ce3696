"""Depthwise convolution: each channel with a filter of its own, on channels-last tensors.

    y[p, c] = STEPS((sum_t a[p, t, c] w[t, c] + bias[c]) scale[c], residual[p, c])

p is an output pixel, c a channel, t a tap; a[p, t, c] is the input under the tap, 0 outside the
picture. There is no product of matrices in this: it runs at the speed of memory, so a block makes
ROWS output rows, and reads each input pixel once for all of them that it lies under.

Weights are [tap row, tap column, channel], row-major.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import load_residual, store_with_epilogue


@triton.jit
def depthwise(
    x, weights, bias, scale, scalars, residual, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of strips, blocks of channels). A strip is ROWS pixels above each other."""
    strip = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    STRIPS = (OUT_HEIGHT + ROWS - 1) // ROWS  # above each other
    image = strip // (STRIPS * OUT_WIDTH)
    row = strip // OUT_WIDTH % STRIPS * ROWS
    column = strip % OUT_WIDTH
    top = tl.where(image < batch, row * STRIDE_H - PAD_TOP, -(2**24))  # none beyond the last image
    left = column * STRIDE_W - PAD_LEFT
    corner = ((image * HEIGHT + row * STRIDE_H - PAD_TOP) * WIDTH + left) * X_PITCH
    x += corner[:, None] + c[None, :]

    NUMBER: tl.constexpr = tl.float32 if scale is None else tl.int32
    total = (tl.zeros((BLOCK_M, BLOCK_N), NUMBER),) * ROWS
    TAPS: tl.constexpr = TAP_ROWS * TAP_COLUMNS
    if TAPS < 50:
        # Unrolled as a whole, the windows of INT8 beyond 3x3 hold more numbers than a thread can.
        AT_ONCE: tl.constexpr = 1 if TAPS > 9 and scale is not None else TAP_COLUMNS
        for first in range(0, TAP_COLUMNS, AT_ONCE):
            for part in tl.static_range(AT_ONCE):
                column_tap = first + part
                w = left + column_tap * DILATION_W
                beside = (w >= 0) & (w < WIDTH)
                for under in tl.static_range(
                    (ROWS - 1) * STRIDE_H + (TAP_ROWS - 1) * DILATION_H + 1
                ):
                    h = top + under
                    inside = (beside & (h >= 0) & (h < HEIGHT))[:, None] & (c < CHANNELS)[None, :]
                    offset = (under * WIDTH + column_tap * DILATION_W) * X_PITCH
                    a = tl.load(x + offset, mask=inside, other=0).to(NUMBER)
                    total = _add_row(
                        total, a, weights + column_tap * CHANNELS + c, c < CHANNELS, under,
                        TAP_COLUMNS * CHANNELS, TAP_ROWS, STRIDE_H, DILATION_H, ROWS, NUMBER,
                    )  # fmt: skip
    else:  # thousands unrolled compile for minutes
        tl.static_assert(ROWS == 1, "large windows make one row at a time")
        one = total[0]
        for tap in range(TAPS):
            under = tap // TAP_COLUMNS * DILATION_H
            aside = tap % TAP_COLUMNS * DILATION_W
            h, w = top + under, left + aside
            inside = (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            inside = inside[:, None] & (c < CHANNELS)[None, :]
            a = tl.load(x + (under * WIDTH + aside) * X_PITCH, mask=inside, other=0)
            b = tl.load(weights + tap * CHANNELS + c, mask=c < CHANNELS, other=0)
            one += a.to(NUMBER) * b.to(NUMBER)[None, :]
        total = (one,)

    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    for i in tl.static_range(ROWS):
        p = (image * OUT_HEIGHT + row + i) * OUT_WIDTH + column
        p = tl.where(row + i < OUT_HEIGHT, p, pixels)  # none below the last row
        operand = load_residual(residual, p, c, pixels, CHANNELS, R_PITCH)
        store_with_epilogue(
            total[i], bias, scale, operand, y, p, c, pixels, CHANNELS, Y_PITCH, EPILOGUE,
            scalars,
        )  # fmt: skip


@triton.jit
def _add_row(
    total, a, weights, present, under: tl.constexpr, PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    ROWS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Add what an input row, `under` rows below the first, gives to each output row."""
    sums = ()
    for i in tl.static_range(ROWS):
        if _lies_under(under - i * STRIDE, TAP_ROWS, DILATION):
            b = tl.load(weights + (under - i * STRIDE) // DILATION * PITCH, mask=present, other=0)
            sums = sums + (total[i] + a * b.to(NUMBER)[None, :],)
        else:
            sums = sums + (total[i],)
    return sums


@triton.constexpr_function
def _lies_under(below, taps, dilation):
    """Whether a row this far below the first lies under a tap of a filter."""
    return below >= 0 and below % dilation == 0 and below // dilation < taps
