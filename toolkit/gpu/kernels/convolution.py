"""Convolution as an implicit matrix product, on channels-last tensors.

    y[p, f] = STEPS((sum_k a[p, k] w[f, k] + bias[f]) scale[f], residual[p, f])

Row p is an output pixel (image, row, column), column f a filter. k runs over (tap row, tap column,
channel) of one group, and a[p, k] is the input under that tap, 0 outside the picture. The matrix a
is never stored: each block of it is gathered while the product runs. INT8 operands are summed in
INT32, and scaled; others have no scale.

Weights are [group, filter, tap row, tap column, channel]: k is the fastest, as the tensor cores of
sm_90 read INT8. A filter takes W_PITCH numbers, at least as many as there are k.

With LANES, the number of warps, pixels and filters are multiplied in the order of `kernels.lanes`,
so that INT8 results need not go through shared memory; BLOCK_N is 64 or 128 then.

With PARTS over 1 each part sums a share of k, and y holds the sums of all parts,
[part, pixel, group, filter] in FP32 or INT32; `add_parts` ends the work.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import (
    add_product,
    first_sums,
    load_residual,
    store_with_epilogue,
)
from toolkit.gpu.kernels.mma_layout import load_mma_residual, mma_columns, mma_rows, store_mma


@triton.jit
def convolution(
    x, weights, bias, scale, scalars, residual, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, FILTERS: tl.constexpr,
    W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MMA_WARPS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels x blocks of filters, groups, PARTS).

    CHANNELS and FILTERS are those of one group.
    """
    TAPS: tl.constexpr = TAP_ROWS * TAP_COLUMNS
    DEPTH: tl.constexpr = TAPS * CHANNELS
    ONE_TAP: tl.constexpr = CHANNELS % BLOCK_K == 0  # a block of k lies under one tap
    INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    # Half a line of INT8 is read with its other half under the next tap: it stays in the L1 cache.
    CACHE: tl.constexpr = ".ca" if INTEGERS and ONE_TAP and TAPS > 1 and BLOCK_K <= 64 else ""
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N - 1) // BLOCK_N
    BLOCKS_OF_PART: tl.constexpr = ((DEPTH + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    tile = tl.program_id(0)  # neighbours share the pixels: the input stays in the cache
    group = tl.program_id(1)
    part = tl.program_id(2)
    pixel = tile // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    first_filter = tile % FILTER_BLOCKS * BLOCK_N
    channel = first_filter + tl.arange(0, BLOCK_N)
    p = pixel
    f = channel
    if MMA_WARPS:
        p = tile // FILTER_BLOCKS * BLOCK_M + mma_rows(BLOCK_M, MMA_WARPS)
        f = first_filter + mma_columns(BLOCK_N)
    LIMIT: tl.constexpr = None if MMA_WARPS and FILTERS % BLOCK_N == 0 else FILTERS
    k = tl.arange(0, BLOCK_K)
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    image = p // (OUT_HEIGHT * OUT_WIDTH)
    top = p // OUT_WIDTH % OUT_HEIGHT * STRIDE_H - PAD_TOP
    left = p % OUT_WIDTH * STRIDE_W - PAD_LEFT

    # All that does not change with k is computed once: the loop adds one offset to each address.
    corner = ((image * HEIGHT + top) * WIDTH + left) * X_PITCH
    a = x + group * CHANNELS + corner[:, None] + (k[None, :] if ONE_TAP else 0)
    b = weights + (group * FILTERS + f)[None, :] * W_PITCH + k[:, None]
    top = tl.where(p < pixels, top, -(2**24))  # rows past the last pixel read nothing
    seen = tl.zeros((BLOCK_M,), tl.int32)  # a bit for each tap that lies in the picture
    if TAPS < 32:
        for i in tl.static_range(TAPS):
            h = top + i // TAP_COLUMNS * DILATION_H
            w = left + i % TAP_COLUMNS * DILATION_W
            seen |= ((h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)).to(tl.int32) << i

    if residual is not None:
        residual += group * FILTERS
    if bias is not None:
        bias += group * FILTERS
    if scale is not None:
        scale += group * FILTERS
    if MMA_WARPS:
        before = load_mma_residual(residual, pixel, first_filter, pixels, LIMIT, R_PITCH, BLOCK_N)
        total = first_sums(bias, f, LIMIT, BLOCK_M, BLOCK_N)
    else:
        before = load_residual(residual, pixel, channel, pixels, FILTERS, R_PITCH)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGERS else tl.float32)
    first = part * BLOCKS_OF_PART * BLOCK_K if SPLIT_K > 1 else 0
    last = tl.minimum(first + BLOCKS_OF_PART * BLOCK_K, DEPTH) if SPLIT_K > 1 else DEPTH
    for start in range(first, last, BLOCK_K):
        if ONE_TAP:
            at = start
        else:
            at = (start + k)[None, :]
        tap = at // CHANNELS
        if DEPTH % BLOCK_K != 0:
            tap = tl.minimum(tap, TAPS)  # the last block goes on behind all taps
        row = tap // TAP_COLUMNS * DILATION_H
        column = tap % TAP_COLUMNS * DILATION_W
        if TAPS < 32:
            inside = (seen[:, None] & (1 << tap)) != 0
        else:
            h = top[:, None] + row
            w = left[:, None] + column
            inside = (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
            if not ONE_TAP:
                inside = inside & (tap < TAPS)
        offset = (row * WIDTH + column) * X_PITCH + at % CHANNELS
        if DEPTH % BLOCK_K != 0:
            present = (f < FILTERS)[None, :] & (start + k < DEPTH)[:, None]
            right_block = tl.load(b + start, mask=present, other=0)
        elif FILTERS % BLOCK_N != 0:
            right_block = tl.load(b + start, mask=(f < FILTERS)[None, :], other=0)
        else:
            right_block = tl.load(b + start)
        left_block = tl.load(a + offset, mask=inside, other=0, cache_modifier=CACHE)
        total = add_product(total, left_block, right_block, PRECISION)

    y += group * FILTERS
    if SPLIT_K > 1:
        y += part * pixels * Y_PITCH
    if MMA_WARPS:
        store_mma(
            total, scale, before, y, pixel, first_filter, pixels, LIMIT, Y_PITCH, EPILOGUE, scalars,
            BLOCK_M, BLOCK_N, MMA_WARPS,
        )  # fmt: skip
    else:
        store_with_epilogue(
            total,
            bias,
            scale,
            before,
            y,
            pixel,
            channel,
            pixels,
            FILTERS,
            Y_PITCH,
            EPILOGUE,
            scalars,
        )


@triton.jit
def split_k_reduce(
    x, bias, scale, scalars, residual, y, pixels,
    FILTERS: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """End a convolution whose sums x are in parts; FILTERS are those of all groups.

    Grid: (blocks of pixels x blocks of filters).
    """
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N - 1) // BLOCK_N
    p = tl.program_id(0) // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.program_id(0) % FILTER_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (p < pixels)[:, None] & (f < FILTERS)[None, :]
    x += p[:, None] * FILTERS + f[None, :]
    residual = load_residual(residual, p, f, pixels, FILTERS, R_PITCH)
    total = tl.load(x, mask=inside, other=0)
    for part in tl.static_range(1, SPLIT_K):
        total += tl.load(x + part * pixels * FILTERS, mask=inside, other=0)
    store_with_epilogue(
        total, bias, scale, residual, y, p, f, pixels, FILTERS, Y_PITCH, EPILOGUE, scalars
    )
