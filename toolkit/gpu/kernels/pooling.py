"""Pooling over one to three dimensions, channels-last, max unpooling, and global average pooling.

    y[p, c] = EPILOGUE(max_t a[p, t, c])                          pool, MODE "max"
    y[p, c] = EPILOGUE(sum_t a[p, t, c] / counted taps)           pool, MODE "average"
    y[p, c] = EPILOGUE((sum_t |a[p, t, c]|^POWER)^(1 / POWER))    pool, MODE "lp"
    y[i, c] = EPILOGUE(sum_p x[i, p, c] / pixels)                 global_average_pool

Row p is an output element (image, depth, row, column), c a channel, t a tap inside x. An average
counts the taps inside, with COUNT_PADDING those in the padding too. `indices` receives the flat
index in x of the first maximum, as ONNX counts it.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import store_with_epilogue
from toolkit.gpu.kernels.int8 import add_bytes


@triton.jit
def pool(
    x, y, indices, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    INDEX_STRIDES: tl.constexpr, Y_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    PAD: tl.constexpr, PAD_AFTER: tl.constexpr,
    MODE: tl.constexpr, COUNT_PADDING: tl.constexpr, POWER: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of output elements, blocks of channels).

    Tuples are (depth, row, column). INDEX_STRIDES: of these three in ONNX's flat index.
    """
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = batch * OUT[0] * OUT[1] * OUT[2]
    image = p // (OUT[0] * OUT[1] * OUT[2])
    first_d = p // (OUT[1] * OUT[2]) % OUT[0] * STRIDE[0] - PAD[0]
    first_h = p // OUT[2] % OUT[1] * STRIDE[1] - PAD[1]
    first_w = p % OUT[2] * STRIDE[2] - PAD[2]

    START: tl.constexpr = float("-inf") if MODE == "max" else 0.0
    total = tl.full((BLOCK_M, BLOCK_N), START, tl.float32)
    counted = tl.zeros((BLOCK_M,), tl.float32)
    best_index = tl.full((BLOCK_M, BLOCK_N), -1, tl.int32)
    COUNT: tl.constexpr = TAPS[0] * TAPS[1] * TAPS[2]
    UNROLL: tl.constexpr = COUNT if COUNT < 50 else 1  # thousands unrolled compile for minutes
    for start in range(0, COUNT, UNROLL):
        for unrolled in tl.static_range(UNROLL):
            tap = start + unrolled
            d = first_d + tap // (TAPS[1] * TAPS[2]) * DILATION[0]
            h = first_h + tap // TAPS[2] % TAPS[1] * DILATION[1]
            w = first_w + tap % TAPS[2] * DILATION[2]
            inside = (h >= 0) & (h < SIZE[1]) & (w >= 0) & (w < SIZE[2]) & (d >= 0) & (d < SIZE[0])
            counts = inside
            if COUNT_PADDING:
                counts = (h < SIZE[1] + PAD_AFTER[1]) & (w < SIZE[2] + PAD_AFTER[2])
                counts = counts & (d < SIZE[0] + PAD_AFTER[0])
            mask = (inside & (p < rows))[:, None] & (c < CHANNELS)[None, :]
            offset = (((image * SIZE[0] + d) * SIZE[1] + h) * SIZE[2] + w) * X_PITCH
            a = tl.load(x + offset[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            if MODE == "max":
                better = (a > total) | (a != a)  # NaN stays, as in ONNX
                if indices is not None:
                    better = better | (best_index < 0)
                    index = d * INDEX_STRIDES[0] + h * INDEX_STRIDES[1] + w * INDEX_STRIDES[2]
                    best_index = tl.where(mask & better, index[:, None], best_index)
                total = tl.where(mask & better, a, total)
            elif MODE == "average":
                total += a
                counted += counts.to(tl.float32)
            else:
                total += tl.where(a == 0.0, 0.0, tl.exp2(POWER * tl.log2(tl.abs(a))))

    total = _normalize(total, counted, MODE, POWER)
    if indices is not None:
        _store_indices(indices, best_index, image, p, c, rows, SIZE, CHANNELS)
    store_with_epilogue(total, None, None, None, y, p, c, rows, CHANNELS, Y_PITCH, EPILOGUE)


@triton.jit
def _normalize(total, counted, MODE: tl.constexpr, POWER: tl.constexpr):
    """Divide the sums of an average by the counted taps; take the root of those of "lp"."""
    if MODE == "average":
        total = tl.div_rn(total, tl.where(counted > 0.0, counted, 1.0)[:, None])
    elif MODE == "lp":
        total = tl.where(total == 0.0, 0.0, tl.exp2(tl.log2(total) / POWER))
    return total


@triton.jit
def _store_indices(
    indices, index, image, p, c, rows, SIZE: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Store the flat indices of maxima, given without image and channel."""
    image_offset = (image[:, None] * CHANNELS + c[None, :]) * SIZE[0] * SIZE[1] * SIZE[2]
    inside = (p < rows)[:, None] & (c < CHANNELS)[None, :]
    offset = p[:, None] * CHANNELS + c[None, :]
    tl.store(indices + offset, (image_offset + index).to(tl.int64), mask=inside)


@triton.jit
def fill(y, elements, BLOCK: tl.constexpr):
    """y[i] = 0. Grid: (blocks of elements)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.zeros((BLOCK,), y.dtype.element_ty), mask=i < elements)


@triton.jit
def unpool(x, indices, y, elements, size, BLOCK: tl.constexpr):
    """y[indices[i]] = x[i], all row-major; y has `size` elements.

    Indices outside of y are skipped. Grid: (blocks of elements of x).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + i, mask=i < elements, other=0)
    value = tl.load(x + i, mask=i < elements, other=0.0)
    inside = (i < elements) & (index >= 0) & (index < size)
    tl.store(y + index, value.to(y.dtype.element_ty), mask=inside)


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
