"""Depthwise convolution: each channel has its own filter, NHWC.

    y[p, c] = EPILOGUE((sum_t a[p, t, c] w[t, c] + bias[c]) scale[c], residual[p, c])

p is an output pixel, c a channel, t a tap; a[p, t, c] is the input under the tap, 0 outside the
image. This is no GEMM and is memory-bound, so a block computes ROWS output rows and loads each
input pixel once for all of them.

Weights are [tap row, tap column, channel], row-major.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import load_residual, store_with_epilogue


@triton.jit
def depthwise(
    x, weights, bias, scale, scalars, residual, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixel columns, blocks of channels). A column is ROWS output pixels high."""
    pixel_column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ROW_BLOCKS = (OUT[0] + ROWS - 1) // ROWS
    image = pixel_column // (ROW_BLOCKS * OUT[1])
    row = pixel_column // OUT[1] % ROW_BLOCKS * ROWS
    column = pixel_column % OUT[1]
    # Beyond the last image every row is outside.
    top = tl.where(image < batch, row * STRIDE[0] - PAD[0], -(2**24))
    left = column * STRIDE[1] - PAD[1]
    corner = ((image * SIZE[0] + row * STRIDE[0] - PAD[0]) * SIZE[1] + left) * X_PITCH
    x += corner[:, None] + c[None, :]

    ACCUMULATOR: tl.constexpr = tl.float32 if scale is None else tl.int32
    total = (tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR),) * ROWS
    COUNT: tl.constexpr = TAPS[0] * TAPS[1]
    if COUNT < 50:
        # Unrolled as a whole, INT8 windows beyond 3x3 take more registers than a thread has.
        UNROLL: tl.constexpr = 1 if COUNT > 9 and scale is not None else TAPS[1]
        for first in range(0, TAPS[1], UNROLL):
            for unrolled in tl.static_range(UNROLL):
                column_tap = first + unrolled
                w = left + column_tap * DILATION[1]
                column_inside = (w >= 0) & (w < SIZE[1])
                for under in tl.static_range(
                    (ROWS - 1) * STRIDE[0] + (TAPS[0] - 1) * DILATION[0] + 1
                ):
                    h = top + under
                    inside = column_inside & (h >= 0) & (h < SIZE[0])
                    inside = inside[:, None] & (c < CHANNELS)[None, :]
                    offset = (under * SIZE[1] + column_tap * DILATION[1]) * X_PITCH
                    a = tl.load(x + offset, mask=inside, other=0).to(ACCUMULATOR)
                    total = _accumulate_row(
                        total, a, weights + column_tap * CHANNELS + c, c < CHANNELS, under,
                        TAPS[1] * CHANNELS, TAPS[0], STRIDE[0], DILATION[0], ROWS, ACCUMULATOR,
                    )  # fmt: skip
    else:  # unrolling thousands of taps takes minutes to compile
        tl.static_assert(ROWS == 1, "large windows compute one row per block")
        accumulators = total[0]
        for tap in range(COUNT):
            under = tap // TAPS[1] * DILATION[0]
            aside = tap % TAPS[1] * DILATION[1]
            h, w = top + under, left + aside
            inside = (h >= 0) & (h < SIZE[0]) & (w >= 0) & (w < SIZE[1])
            inside = inside[:, None] & (c < CHANNELS)[None, :]
            a = tl.load(x + (under * SIZE[1] + aside) * X_PITCH, mask=inside, other=0)
            b = tl.load(weights + tap * CHANNELS + c, mask=c < CHANNELS, other=0)
            accumulators += a.to(ACCUMULATOR) * b.to(ACCUMULATOR)[None, :]
        total = (accumulators,)

    pixels = batch * OUT[0] * OUT[1]
    for i in tl.static_range(ROWS):
        p = (image * OUT[0] + row + i) * OUT[1] + column
        p = tl.where(row + i < OUT[0], p, pixels)  # outside below the last row
        residual_tile = load_residual(residual, p, c, pixels, CHANNELS, R_PITCH)
        store_with_epilogue(
            total[i], bias, scale, residual_tile, y, p, c, pixels, CHANNELS, Y_PITCH, EPILOGUE,
            scalars,
        )  # fmt: skip


@triton.jit
def _accumulate_row(
    total, a, weights, present, under: tl.constexpr, PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    ROWS: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    """Add the products of an input row, `under` rows below the first, to each output row."""
    accumulators = ()
    for i in tl.static_range(ROWS):
        if _is_tap_row(under - i * STRIDE, TAP_ROWS, DILATION):
            b = tl.load(weights + (under - i * STRIDE) // DILATION * PITCH, mask=present, other=0)
            accumulators = accumulators + (total[i] + a * b.to(ACCUMULATOR)[None, :],)
        else:
            accumulators = accumulators + (total[i],)
    return accumulators


@triton.constexpr_function
def _is_tap_row(below, taps, dilation):
    """Whether an input row `below` the first is under a tap of the filter."""
    return below >= 0 and below % dilation == 0 and below // dilation < taps
