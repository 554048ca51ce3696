"""1x1 convolution of the concatenation of an upsampled image and a larger one.

    y[p, f] = EPILOGUE((sum_k x[q(p), k] w[f, k] + sum_k z[p, k] w[f, X_CHANNELS + k] + bias[f])
                       scale[f])

Row p is a pixel of z and of the result, q(p) the pixel of x at its row / ROW_FACTOR and its
column / COLUMN_FACTOR. Neither the upsampled image nor the concatenation is stored. INT8 operands
have INT32 accumulators and a scale; others have no scale. BLOCK_K divides X_CHANNELS and
Z_CHANNELS.

With MMA_WARPS, the number of warps, pixels and filters are in the order of `kernels.mma_layout`,
and BLOCK_N is 64 or 128.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, first_sums, store_with_epilogue
from toolkit.gpu.sm90.kernels.mma_layout import mma_columns, mma_rows, store_mma


@triton.jit
def conv_upsample_concat(
    x, z, weights, bias, scale, scalars, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    X_CHANNELS: tl.constexpr, Z_CHANNELS: tl.constexpr, FILTERS: tl.constexpr,
    X_PITCH: tl.constexpr, Z_PITCH: tl.constexpr, W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MMA_WARPS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels x blocks of filters)."""
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N - 1) // BLOCK_N
    LIMIT: tl.constexpr = None if MMA_WARPS and FILTERS % BLOCK_N == 0 else FILTERS
    tile = tl.program_id(0)  # neighbours share the pixels: they stay in the cache
    first = tile % FILTER_BLOCKS * BLOCK_N
    pixel = tile // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = first + tl.arange(0, BLOCK_N)
    p = pixel
    f = channel
    if MMA_WARPS:
        p = tile // FILTER_BLOCKS * BLOCK_M + mma_rows(BLOCK_M, MMA_WARPS)
        f = first + mma_columns(BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pixels = batch * HEIGHT * WIDTH
    in_bounds = (p < pixels)[:, None]
    row = p // WIDTH // ROW_FACTOR  # of all images of x: ROW_FACTOR divides HEIGHT
    q = row * (WIDTH // COLUMN_FACTOR) + p % WIDTH // COLUMN_FACTOR
    a = x + q[:, None] * X_PITCH + k[None, :]
    b = weights + f[None, :] * W_PITCH + k[:, None]

    if MMA_WARPS:
        total = first_sums(bias, f, LIMIT, BLOCK_M, BLOCK_N)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if scale is None else tl.int32)
    for start in range(0, X_CHANNELS, BLOCK_K):
        a_tile = tl.load(a + start, mask=in_bounds, other=0)
        b_tile = tl.load(b + start, mask=(f < FILTERS)[None, :], other=0)
        total = add_product(total, a_tile, b_tile, PRECISION)
    a = z + p[:, None] * Z_PITCH + k[None, :]
    for start in range(0, Z_CHANNELS, BLOCK_K):
        a_tile = tl.load(a + start, mask=in_bounds, other=0)
        b_tile = tl.load(b + X_CHANNELS + start, mask=(f < FILTERS)[None, :], other=0)
        total = add_product(total, a_tile, b_tile, PRECISION)

    if MMA_WARPS:
        store_mma(
            total, scale, None, y, pixel, first, pixels, LIMIT, Y_PITCH, EPILOGUE, scalars,
            BLOCK_M, BLOCK_N, MMA_WARPS,
        )  # fmt: skip
    else:
        store_with_epilogue(
            total, bias, scale, None, y, pixel, channel, pixels, FILTERS, Y_PITCH, EPILOGUE, scalars
        )
