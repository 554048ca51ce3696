"""Pooling over windows, and global average pooling, NHWC.

    y[p, c] = EPILOGUE(max_t a[p, t, c])                  pool, MODE "max"
    y[p, c] = EPILOGUE(sum_t a[p, t, c] / counted taps)   pool, MODE "average"
    y[i, c] = EPILOGUE(sum_p x[i, p, c] / pixels)         global_average_pool, in one launch or two

Row p is an output pixel, c a channel, t a tap of the window. An average counts the taps inside the
image, with COUNT_PADDING those in its padding too.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import store_with_epilogue
from toolkit.gpu.kernels.int8 import add_bytes


@triton.jit
def pool(
    x, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    PAD_BOTTOM: tl.constexpr, PAD_RIGHT: tl.constexpr,
    MODE: tl.constexpr, COUNT_PADDING: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels, blocks of channels)."""
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    image = p // (OUT_HEIGHT * OUT_WIDTH)
    top = p // OUT_WIDTH % OUT_HEIGHT * STRIDE_H - PAD_TOP
    left = p % OUT_WIDTH * STRIDE_W - PAD_LEFT

    OUTSIDE: tl.constexpr = float("-inf") if MODE == "max" else 0.0
    total = tl.full((BLOCK_M, BLOCK_N), OUTSIDE, tl.float32)
    counted = tl.zeros((BLOCK_M,), tl.float32)
    TAPS: tl.constexpr = TAP_ROWS * TAP_COLUMNS
    UNROLL: tl.constexpr = TAPS if TAPS < 50 else 1  # thousands unrolled compile for minutes
    for start in range(0, TAPS, UNROLL):
        for unrolled in tl.static_range(UNROLL):
            tap = start + unrolled
            h = top + tap // TAP_COLUMNS * DILATION_H
            w = left + tap % TAP_COLUMNS * DILATION_W
            inside = (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            if COUNT_PADDING:
                counts = (h < HEIGHT + PAD_BOTTOM) & (w < WIDTH + PAD_RIGHT)
            else:
                counts = inside
            offset = ((image * HEIGHT + h) * WIDTH + w) * X_PITCH
            mask = (inside & (p < pixels))[:, None] & (c < CHANNELS)[None, :]
            a = tl.load(x + offset[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            if MODE == "max":
                a = tl.where(mask, a, float("-inf"))
                total = tl.where((a > total) | (a != a), a, total)  # NaN stays, as in ONNX
            else:
                total += a
                counted += counts.to(tl.float32)
    if MODE == "average":
        total = tl.div_rn(total, tl.where(counted > 0.0, counted, 1.0)[:, None])

    store_with_epilogue(total, None, None, None, y, p, c, pixels, CHANNELS, Y_PITCH, EPILOGUE)


@triton.jit
def global_average_pool(
    x, y, batch,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    SPLIT_K: tl.constexpr, DIVISOR: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (images, blocks of channels, SPLIT_K).

    The pixels of an image are split into SPLIT_K ranges; each sum is divided by DIVISOR and is a
    row of y.
    """
    SPLIT_PIXELS = (PIXELS + SPLIT_K - 1) // SPLIT_K
    image = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    SUM: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for start in range(0, SPLIT_PIXELS, BLOCK_M):
        at = start + tl.arange(0, BLOCK_M)
        p = split * SPLIT_PIXELS + at
        inside = ((at < SPLIT_PIXELS) & (p < PIXELS))[:, None] & (c < CHANNELS)[None, :]
        offset = (image * PIXELS + p[:, None]) * X_PITCH + c[None, :]
        total = add_bytes(total, tl.load(x + offset, mask=inside, other=0))
    mean = tl.div_rn(tl.sum(total, 0)[None, :].to(tl.float32), DIVISOR * 1.0)
    row = image * SPLIT_K + split + tl.arange(0, 1)
    rows = batch * SPLIT_K
    store_with_epilogue(mean, None, None, None, y, row, c, rows, CHANNELS, Y_PITCH, EPILOGUE)
