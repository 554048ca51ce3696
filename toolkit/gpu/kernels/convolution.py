"""Convolution as an implicit matrix product, on channels-last tensors.

    y[p, f] = STEPS((sum_k a[p, k] w[k, f] + bias[f]) scale[f], residual[p, f])

Row p is an output pixel (image, row, column), column f a filter. k runs over (tap row, tap column,
channel) of one group, and a[p, k] is the input under that tap, 0 outside the picture. The matrix a
is never stored: each block of it is gathered while the product runs. INT8 operands are summed in
INT32, and scaled; others have no scale.

Weights are [group, tap row, tap column, channel, filter], row-major.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, store_rows


@triton.jit
def convolution(
    x, weights, bias, scale, residual, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, FILTERS: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels x blocks of filters, groups).

    CHANNELS and FILTERS are those of one group.
    """
    DEPTH: tl.constexpr = TAP_ROWS * TAP_COLUMNS * CHANNELS
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)  # neighbours share the pixels: the input stays in the cache
    group = tl.program_id(1)
    p = tile // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile % FILTER_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    image = p // (OUT_HEIGHT * OUT_WIDTH)
    top = p // OUT_WIDTH % OUT_HEIGHT * STRIDE_H - PAD_TOP
    left = p % OUT_WIDTH * STRIDE_W - PAD_LEFT
    x += group * CHANNELS
    weights += group * DEPTH * FILTERS

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if scale is None else tl.int32)
    for start in range(0, DEPTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if CHANNELS % BLOCK_K == 0:  # the whole block lies under one tap
            tap = start // CHANNELS
            channel = start % CHANNELS + tl.arange(0, BLOCK_K)[None, :]
        else:
            tap = (k // CHANNELS)[None, :]
            channel = (k % CHANNELS)[None, :]
        h = top[:, None] + tap // TAP_COLUMNS * DILATION_H
        w = left[:, None] + tap % TAP_COLUMNS * DILATION_W
        inside = (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
        inside = inside & (p < pixels)[:, None] & (k < DEPTH)[None, :]
        place = ((image[:, None] * HEIGHT + h) * WIDTH + w) * X_PITCH + channel
        a = tl.load(x + place, mask=inside, other=0)
        inside = (k < DEPTH)[:, None] & (f < FILTERS)[None, :]
        b = tl.load(weights + k[:, None] * FILTERS + f[None, :], mask=inside, other=0)
        total = add_product(total, a, b, PRECISION)

    if bias is not None:
        bias += group * FILTERS
    if scale is not None:
        scale += group * FILTERS
    if residual is not None:
        residual += group * FILTERS
    y += group * FILTERS
    store_rows(total, bias, scale, residual, y, p, f, pixels, FILTERS, Y_PITCH, R_PITCH, STEPS)
