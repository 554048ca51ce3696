"""1x1 convolutions of channels-last pictures whose result is stored in other strides.

    y[i, f, p] = STEPS((sum_k x[i, p, k] w[f, k] + bias[f]) scale[f])

i is an image, f a filter, p a pixel. Outputs of networks want all pixels of a filter side by side:
a block of sums turns around on its way out, and no tensor is written twice. INT8 operands are
summed in INT32, and scaled; others have no scale. WHOLE_BLOCKS says that BLOCK_K divides DEPTH.

A block has BLOCK_N filters and REST more: 80 are 64 and 16, for blocks are powers of two.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, apply_epilogue


@triton.jit
def conv1x1_nchw(
    x, weights, bias, scale, scalars, y,
    DEPTH: tl.constexpr, FILTERS: tl.constexpr, PIXELS: tl.constexpr,
    X_IMAGE: tl.constexpr, X_PITCH: tl.constexpr, W_PITCH: tl.constexpr,
    Y_IMAGE: tl.constexpr, Y_FILTER: tl.constexpr, Y_PIXEL: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels x blocks of filters, images)."""
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N + REST - 1) // (BLOCK_N + REST)
    tile = tl.program_id(0)  # neighbours share the pixels: they stay in the cache
    image = tl.program_id(1)
    p = tile // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile % FILTER_BLOCKS * (BLOCK_N + REST) + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = x + image * X_IMAGE + p[:, None] * X_PITCH + k[None, :]
    b = weights + f[None, :] * W_PITCH + k[:, None]

    y += image * Y_IMAGE + p[:, None] * Y_PIXEL

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if scale is None else tl.int32)
    if REST:
        g = tile % FILTER_BLOCKS * (BLOCK_N + REST) + BLOCK_N + tl.arange(0, REST)
        c = weights + g[None, :] * W_PITCH + k[:, None]
        rest = tl.zeros((BLOCK_M, REST), tl.float32 if scale is None else tl.int32)
    for start in range(0, DEPTH, BLOCK_K):
        present = (p < PIXELS)[:, None]
        if not WHOLE_BLOCKS:
            present = present & (k < DEPTH - start)[None, :]
        left = tl.load(a + start, mask=present, other=0)
        right = _load_weights(b + start, f, k, DEPTH - start, FILTERS, WHOLE_BLOCKS)
        total = add_product(total, left, right, PRECISION)
        if REST:
            right = _load_weights(c + start, g, k, DEPTH - start, FILTERS, WHOLE_BLOCKS)
            rest = add_product(rest, left, right, PRECISION)

    inside = (p < PIXELS)[:, None]
    result = apply_epilogue(total, bias, scale, None, f, FILTERS, EPILOGUE, scalars)
    place = y + f[None, :] * Y_FILTER
    tl.store(place, result.to(y.dtype.element_ty), mask=inside & (f < FILTERS)[None, :])
    if REST:
        result = apply_epilogue(rest, bias, scale, None, g, FILTERS, EPILOGUE, scalars)
        place = y + g[None, :] * Y_FILTER
        tl.store(place, result.to(y.dtype.element_ty), mask=inside & (g < FILTERS)[None, :])


@triton.jit
def _load_weights(place, f, k, depth, FILTERS: tl.constexpr, WHOLE_BLOCKS: tl.constexpr):
    wanted = (f < FILTERS)[None, :]
    if not WHOLE_BLOCKS:
        wanted = wanted & (k < depth)[:, None]
    return tl.load(place, mask=wanted, other=0)
