"""Pooling over one to three dimensions, channels-last, and max unpooling.

    y[p, c] = EPILOGUE(max_t a[p, t, c])                          MODE "max"
    y[p, c] = EPILOGUE(sum_t a[p, t, c] / counted taps)           MODE "average"
    y[p, c] = EPILOGUE((sum_t |a[p, t, c]|^POWER)^(1 / POWER))    MODE "lp"

Row p is an output element (image, depth, row, column), c a channel, t a tap inside x. An average
counts the taps inside, with COUNT_PADDING those in the padding too. `indices` receives the flat
index in x of the first maximum, as ONNX counts it.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import store_with_epilogue


@triton.jit
def pool3d(
    x, y, indices, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    X_STRIDES: tl.constexpr, INDEX_STRIDES: tl.constexpr, Y_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    PAD: tl.constexpr, PAD_AFTER: tl.constexpr,
    MODE: tl.constexpr, COUNT_PADDING: tl.constexpr, POWER: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of output elements, blocks of channels).

    Tuples are (depth, row, column). X_STRIDES: of images and these three; INDEX_STRIDES: of these
    three in ONNX's flat index.
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
    for tap in range(TAPS[0] * TAPS[1] * TAPS[2]):
        d = first_d + tap // (TAPS[1] * TAPS[2]) * DILATION[0]
        h = first_h + tap // TAPS[2] % TAPS[1] * DILATION[1]
        w = first_w + tap % TAPS[2] * DILATION[2]
        inside = (d >= 0) & (d < SIZE[0]) & (h >= 0) & (h < SIZE[1]) & (w >= 0) & (w < SIZE[2])
        counts = inside
        if COUNT_PADDING:
            counts = (d < SIZE[0] + PAD_AFTER[0]) & (h < SIZE[1] + PAD_AFTER[1])
            counts = counts & (w < SIZE[2] + PAD_AFTER[2])
        mask = (inside & (p < rows))[:, None] & (c < CHANNELS)[None, :]
        offset = image * X_STRIDES[0] + d * X_STRIDES[1] + h * X_STRIDES[2] + w * X_STRIDES[3]
        a = tl.load(x + offset[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if MODE == "max":
            index = d * INDEX_STRIDES[0] + h * INDEX_STRIDES[1] + w * INDEX_STRIDES[2]
            better = mask & ((a > total) | (a != a) | (best_index < 0))  # NaN stays, as in ONNX
            total = tl.where(better, a, total)
            best_index = tl.where(better, index[:, None], best_index)
        elif MODE == "average":
            total += a
            counted += counts.to(tl.float32)
        else:
            total += tl.where(a == 0.0, 0.0, tl.exp2(POWER * tl.log2(tl.abs(a))))

    if MODE == "average":
        total = total / tl.where(counted > 0.0, counted, 1.0)[:, None]
    elif MODE == "lp":
        total = tl.where(total == 0.0, 0.0, tl.exp2(tl.log2(total) / POWER))
    if indices is not None:
        image_offset = (image[:, None] * CHANNELS + c[None, :]) * SIZE[0] * SIZE[1] * SIZE[2]
        inside = (p < rows)[:, None] & (c < CHANNELS)[None, :]
        offset = p[:, None] * CHANNELS + c[None, :]
        tl.store(indices + offset, (image_offset + best_index).to(tl.int64), mask=inside)
    store_with_epilogue(total, None, None, None, y, p, c, rows, CHANNELS, Y_PITCH, EPILOGUE)


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
