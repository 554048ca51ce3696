"""GEMM and implicit GEMM: one main loop and epilogue, with a loader for each layout of operands.

    y[i, m, n] = EPILOGUE((sum_k a[i, m, k] b[i, k, n] + bias[i, n]) scale[i, n], residual[i, m, n])

i is a product of a batch or a group of a convolution. INT8 operands are summed in INT32 and scaled;
others have no scale. LOADER:

"strided": a and b have any strides, so a transposed operand costs no copy. Product i is number
    i % INNER of group i // INNER, with a stride for each of the two; a stride of 0 gives several
    products the same operand. A 1x1 convolution is such a product whose rows are pixels.

"im2col": a convolution of NHWC tensors. Row m is an output pixel (image, row, column), column n a
    filter; k runs over (tap row, tap column, channel). a[m, k] is the input under that tap, 0
    outside the image: a tile of it is gathered in the main loop, and a is never stored.
    With DIAGONAL, all of its input channels, the filters of a block read its own CHANNELS of them:
    several narrow groups with zeros in the weights between them, fewer in the last block.

"im2col_3d": a convolution over (depth, row, column). Along each axis tap t of output o lies at

        o STRIDE - PAD + t DILATION

"transposed": output o reads those inputs p and taps for which o = p STRIDE - PAD + tap. With
    o = STRIDE q + phase these are

        p = q + (phase + PAD) // STRIDE - t,    tap = (phase + PAD) % STRIDE + t STRIDE

    so each phase is a convolution of its own. DILATION is -1: the operator's lies in the weights.

Weights are [phase, group, filter, tap, channel], so k is contiguous, as the tensor cores of sm_90
read INT8, and as all are the fastest.

With TAIL_N a block has BLOCK_N + TAIL_N columns: 80 are 64 and 16, for tiles are powers of two.

With SPLIT_K over 1 each of as many blocks sums a share of k, and y holds the partial sums,
[part, row, group, column] in FP32 or INT32; `split_k_reduce` adds them.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import (
    add_product,
    apply_epilogue,
    load_residual,
    store_with_epilogue,
)


@triton.jit
def gemm(
    a, b, bias, scale, scalars, residual, y, rows, batch,
    LOADER: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    A_STRIDES: tl.constexpr, B_STRIDES: tl.constexpr,
    Y_STRIDES: tl.constexpr, Y_COLUMN: tl.constexpr, R_STRIDES: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
    SPLIT_K: tl.constexpr, DIAGONAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x blocks of columns, products or groups, SPLIT_K or phases).

    "strided" takes `rows`. The others take `batch`, tuples along (row, column) or (depth, row,
    column), and CHANNELS and COLUMNS of one group. WHOLE_BLOCKS: BLOCK_K divides DEPTH. Strides:

        a   strided: (group, product, row, k); im2col: (pixel); else (image, depth, row, column)
        b   strided: (group, product, k, column); else (phase, group, k, filter)
        y   (group, product, row), and residual; Y_COLUMN of columns, None if they are contiguous
    """
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N + TAIL_N - 1) // (BLOCK_N + TAIL_N)
    ACCUMULATOR: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    BLOCKS: tl.constexpr = ((DEPTH + BLOCK_K - 1) // BLOCK_K + SPLIT_K - 1) // SPLIT_K
    tile = tl.program_id(0)  # neighbours share the rows: they stay in the cache
    group = tl.program_id(1) // INNER
    inner = tl.program_id(1) % INNER
    part = tl.program_id(2)
    first = tile % COLUMN_BLOCKS * (BLOCK_N + TAIL_N)
    m = tile // COLUMN_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    if LOADER == "strided":
        a = _strided(a, group, inner, m[:, None], k[None, :], A_STRIDES)
        if TAIL_N:
            tail_n = first + BLOCK_N + tl.arange(0, TAIL_N)
            tail_b = _strided(b, group, inner, k[:, None], tail_n[None, :], B_STRIDES)
        b = _strided(b, group, inner, k[:, None], n[None, :], B_STRIDES)
    elif LOADER == "im2col":
        rows = batch * OUT[0] * OUT[1]
        a, b, window = _im2col(
            a, b, m, n, k, rows, group, A_STRIDES[0], B_STRIDES[3], COLUMNS, SIZE, OUT,
            CHANNELS, TAPS, STRIDE, DILATION, PAD, BLOCK_K,
        )  # fmt: skip
        if DIAGONAL is not None:
            a += tile % COLUMN_BLOCKS * CHANNELS
            k_channels = DIAGONAL - tile % COLUMN_BLOCKS * CHANNELS
        else:
            k_channels = CHANNELS
    else:
        rows = batch * OUT[0] * OUT[1] * OUT[2]
        window = _im2col_3d(m, part, batch, OUT, STRIDE, PAD, LOADER == "transposed")
        a += group * CHANNELS
        b += part * B_STRIDES[0] + group * B_STRIDES[1]

    if residual is not None:
        residual += group * R_STRIDES[0] + inner * R_STRIDES[1]
    if LOADER != "strided":
        if bias is not None:
            bias += group * COLUMNS
        if scale is not None:
            scale += group * COLUMNS
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    if TAIL_N:
        tail = tl.zeros((BLOCK_M, TAIL_N), ACCUMULATOR)

    begin = part * BLOCKS * BLOCK_K if SPLIT_K > 1 else 0
    end = tl.minimum(begin + BLOCKS * BLOCK_K, DEPTH) if SPLIT_K > 1 else DEPTH
    for start in range(begin, end, BLOCK_K):
        if LOADER == "strided":
            a_tile = _load_a(a, m, k, start, rows, DEPTH, A_STRIDES[3], WHOLE_BLOCKS)
            b_tile = _load_b(b, n, k, start, DEPTH, COLUMNS, B_STRIDES[2], WHOLE_BLOCKS)
        elif LOADER == "im2col":
            a_tile, b_tile = _load_im2col(
                a, b, window, n, k, start, k_channels, A_STRIDES[0], DEPTH, COLUMNS, SIZE,
                CHANNELS, TAPS, DILATION, BLOCK_K, WHOLE_BLOCKS, COLUMNS % BLOCK_N == 0,
                DIAGONAL is not None and DIAGONAL % CHANNELS != 0,
            )  # fmt: skip
        else:
            a_tile, b_tile = _load_im2col_3d(
                a, b, window, n, start + k, A_STRIDES, B_STRIDES[3], DEPTH, COLUMNS, SIZE,
                CHANNELS, TAPS, DILATION,
            )  # fmt: skip
        total = add_product(total, a_tile, b_tile, PRECISION)
        if TAIL_N:
            b_tile = _load_b(tail_b, tail_n, k, start, DEPTH, COLUMNS, B_STRIDES[2], WHOLE_BLOCKS)
            tail = add_product(tail, a_tile, b_tile, PRECISION)

    y += group * Y_STRIDES[0] + inner * Y_STRIDES[1]
    if SPLIT_K > 1:
        y += part * rows * Y_STRIDES[2]
    if LOADER == "im2col_3d" or LOADER == "transposed":
        m = _output_row(window, rows, OUT)
    # Not before the products: wide tiles have no registers for it.
    residual = load_residual(residual, m, n, rows, COLUMNS, R_STRIDES[2])
    if Y_COLUMN is None:
        store_with_epilogue(
            total, bias, scale, residual, y, m, n, rows, COLUMNS, Y_STRIDES[2], EPILOGUE, scalars
        )
    else:
        y += m[:, None] * Y_STRIDES[2]
        _store_strided(total, bias, scale, y, m, n, rows, COLUMNS, Y_COLUMN, EPILOGUE, scalars)
        if TAIL_N:
            _store_strided(
                tail, bias, scale, y, m, tail_n, rows, COLUMNS, Y_COLUMN, EPILOGUE, scalars
            )


@triton.jit
def resident_gemm(
    a, b, bias, scale, scalars, residual, y, rows, batch,
    LOADER: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    A_STRIDES: tl.constexpr, B_STRIDES: tl.constexpr,
    Y_STRIDES: tl.constexpr, Y_COLUMN: tl.constexpr, R_STRIDES: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
    SPLIT_K: tl.constexpr, DIAGONAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for one "strided" product of little depth: b stays on the SM.

    Grid: (programs x blocks of columns). A program loads the whole depth of its columns once, and
    goes over its blocks of rows; the next one is loaded meanwhile.
    """
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    b_tiles = ()
    b_first = _strided(b, 0, 0, k[:, None], n[None, :], B_STRIDES)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        b_tile = _load_b(b_first, n, k, start, DEPTH, COLUMNS, B_STRIDES[2], WHOLE_BLOCKS)
        b_tiles = b_tiles + (b_tile,)

    first = tl.program_id(0) // COLUMN_BLOCKS
    last, step = (rows + BLOCK_M - 1) // BLOCK_M, tl.num_programs(0) // COLUMN_BLOCKS
    # The next residual is on its way, too, where that leaves room for as many programs.
    STAGES: tl.constexpr = 2 if DEPTH <= BLOCK_K else None
    for block in tl.range(first, last, step, num_stages=STAGES):
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        residual_tile = load_residual(residual, m, n, rows, COLUMNS, R_STRIDES[2])
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if PRECISION == "int8" else tl.float32)
        a_first = _strided(a, 0, 0, m[:, None], k[None, :], A_STRIDES)
        for i in tl.static_range((DEPTH + BLOCK_K - 1) // BLOCK_K):
            a_tile = _load_a(a_first, m, k, i * BLOCK_K, rows, DEPTH, A_STRIDES[3], WHOLE_BLOCKS)
            total = add_product(total, a_tile, b_tiles[i], PRECISION)
        store_with_epilogue(
            total, bias, scale, residual_tile, y, m, n, rows, COLUMNS, Y_STRIDES[2], EPILOGUE,
            scalars,
        )  # fmt: skip


@triton.jit
def matrix_vector(
    a, b, bias, scale, scalars, residual, y,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, B_PITCH: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of one row: threads multiply, and b is read once; both have k contiguous.

    Grid: (blocks of columns). B_PITCH: elements from column to column of b.
    """
    row = tl.arange(0, 1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    residual = load_residual(residual, row, n, 1, COLUMNS, COLUMNS)
    WIDE: tl.constexpr = tl.int32 if b.dtype.element_ty == tl.int8 else tl.float32
    products = tl.zeros((BLOCK_N, BLOCK_K), WIDE)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        inside = start + k < DEPTH
        a_row = tl.load(a + start + k, mask=inside, other=0)
        b_tile = tl.load(
            b + n[:, None] * B_PITCH + (start + k)[None, :],
            mask=(n < COLUMNS)[:, None] & inside[None, :], other=0,
        )  # fmt: skip
        products += a_row.to(WIDE)[None, :] * b_tile.to(WIDE)
    total = tl.sum(products, 1)[None, :]
    store_with_epilogue(
        total, bias, scale, residual, y, row, n, 1, COLUMNS, COLUMNS, EPILOGUE, scalars
    )


@triton.jit
def _strided(x, group, inner, row, column, STRIDES: tl.constexpr):
    """Return the addresses of the first tile of an operand."""
    offset = group * STRIDES[0] + inner * STRIDES[1] + row * STRIDES[2] + column * STRIDES[3]
    return x + offset


@triton.jit
def _load_a(
    a, row, k, start, rows, DEPTH: tl.constexpr, STRIDE: tl.constexpr, WHOLE_BLOCKS: tl.constexpr
):  # fmt: skip
    """Return a[row, start + k], 0 out of bounds."""
    in_bounds = (row < rows)[:, None]
    if not WHOLE_BLOCKS:
        in_bounds = in_bounds & (k < DEPTH - start)[None, :]
    return tl.load(a + start * STRIDE, mask=in_bounds, other=0.0)


@triton.jit
def _load_b(
    b, column, k, start, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return b[start + k, column], 0 out of bounds."""
    in_bounds = (column < COLUMNS)[None, :]
    if not WHOLE_BLOCKS:
        in_bounds = in_bounds & (k < DEPTH - start)[:, None]
    return tl.load(b + start * STRIDE, mask=in_bounds, other=0.0)


@triton.jit
def _im2col(
    x, weights, p, f, k, pixels, group, X_PITCH: tl.constexpr, W_PITCH: tl.constexpr,
    FILTERS: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the first tiles and the window: (top, left, bits of taps inside).

    What does not change with k is computed here: the main loop adds one offset to each address.
    """
    ONE_TAP: tl.constexpr = CHANNELS % BLOCK_K == 0  # a block of k lies under one tap
    image = p // (OUT[0] * OUT[1])
    top = p // OUT[1] % OUT[0] * STRIDE[0] - PAD[0]
    left = p % OUT[1] * STRIDE[1] - PAD[1]
    corner = ((image * SIZE[0] + top) * SIZE[1] + left) * X_PITCH
    a = x + group * CHANNELS + corner[:, None] + (k[None, :] if ONE_TAP else 0)
    b = weights + (group * FILTERS + f)[None, :] * W_PITCH + k[:, None]
    top = tl.where(p < pixels, top, -(2**24))  # rows past the last pixel read nothing
    taps_inside = tl.zeros_like(p)
    if TAPS[0] * TAPS[1] < 32:
        for i in tl.static_range(TAPS[0] * TAPS[1]):
            h = top + i // TAPS[1] * DILATION[0]
            w = left + i % TAPS[1] * DILATION[1]
            inside = (h >= 0) & (h < SIZE[0]) & (w >= 0) & (w < SIZE[1])
            taps_inside |= inside.to(tl.int32) << i
    return a, b, (top, left, taps_inside)


@triton.jit
def _load_im2col(
    a, b, window, f, k, start, k_channels, X_PITCH: tl.constexpr, DEPTH: tl.constexpr,
    FILTERS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr, FEWER_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return a[:, start + k], 0 outside the image, and b[start + k, f].

    FEWER_CHANNELS: `k_channels` of the CHANNELS exist.
    """
    top, left, taps_inside = window
    COUNT: tl.constexpr = TAPS[0] * TAPS[1]
    ONE_TAP: tl.constexpr = CHANNELS % BLOCK_K == 0
    # Half a line of INT8 is read with its other half under the next tap: it stays in the L1 cache.
    INT8: tl.constexpr = a.dtype.element_ty == tl.int8
    CACHE: tl.constexpr = ".ca" if INT8 and ONE_TAP and COUNT > 1 and BLOCK_K <= 64 else ""
    if ONE_TAP:
        at = start
    else:
        at = (start + k)[None, :]
    tap = at // CHANNELS
    if not WHOLE_BLOCKS:
        tap = tl.minimum(tap, COUNT)  # the last block goes on behind all taps
    row = tap // TAPS[1] * DILATION[0]
    column = tap % TAPS[1] * DILATION[1]
    if COUNT < 32:
        inside = (taps_inside[:, None] & (1 << tap)) != 0
    else:
        h = top[:, None] + row
        w = left[:, None] + column
        inside = (h >= 0) & (h < SIZE[0]) & (w >= 0) & (w < SIZE[1])
        if not ONE_TAP:
            inside = inside & (tap < COUNT)
    if FEWER_CHANNELS:
        inside = inside & ((start + k) % CHANNELS < k_channels)[None, :]
    offset = (row * SIZE[1] + column) * X_PITCH + at % CHANNELS
    if not WHOLE_BLOCKS:
        in_bounds = (f < FILTERS)[None, :] & (start + k < DEPTH)[:, None]
        b_tile = tl.load(b + start, mask=in_bounds, other=0.0)
    elif not WHOLE_COLUMNS:
        b_tile = tl.load(b + start, mask=(f < FILTERS)[None, :], other=0.0)
    else:
        b_tile = tl.load(b + start)
    a_tile = tl.load(a + offset, mask=inside, other=0.0, cache_modifier=CACHE)
    return a_tile, b_tile


@triton.jit
def _im2col_3d(
    p, phase, batch, OUT: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return the window: (image, first tap, output, whether that output exists)."""
    q, w, out_w = _along(p, phase, 2, OUT, STRIDE, PAD, TRANSPOSED)
    phase = phase // STRIDE[2]
    q, h, out_h = _along(q, phase, 1, OUT, STRIDE, PAD, TRANSPOSED)
    phase = phase // STRIDE[1]
    image, d, out_d = _along(q, phase, 0, OUT, STRIDE, PAD, TRANSPOSED)
    exists = (image < batch) & (out_d < OUT[0]) & (out_h < OUT[1]) & (out_w < OUT[2])
    return image, (d, h, w), (out_d, out_h, out_w), exists


@triton.jit
def _along(
    p, phase, AXIS: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return the index p without this axis, and along it where the first tap and output lie."""
    if TRANSPOSED:
        axis_phase = phase % STRIDE[AXIS]
        count = (OUT[AXIS] + STRIDE[AXIS] - 1) // STRIDE[AXIS]
        q = p % count
        tap = q + (axis_phase + PAD[AXIS]) // STRIDE[AXIS]
        out = q * STRIDE[AXIS] + axis_phase
    else:
        count = OUT[AXIS]
        out = p % count
        tap = out * STRIDE[AXIS] - PAD[AXIS]
    return p // count, tap, out


@triton.jit
def _load_im2col_3d(
    x, weights, window, f, k, X_STRIDES: tl.constexpr, W_PITCH: tl.constexpr, DEPTH: tl.constexpr,
    FILTERS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr,
):  # fmt: skip
    """Return a[:, k], 0 outside the input, and b[k, f]."""
    image, first, _, exists = window
    tap = k // CHANNELS
    d = first[0][:, None] + (tap // (TAPS[1] * TAPS[2]) * DILATION[0])[None, :]
    h = first[1][:, None] + (tap // TAPS[2] % TAPS[1] * DILATION[1])[None, :]
    w = first[2][:, None] + (tap % TAPS[2] * DILATION[2])[None, :]
    inside = (d >= 0) & (d < SIZE[0]) & (h >= 0) & (h < SIZE[1])
    inside = inside & (w >= 0) & (w < SIZE[2])
    inside = inside & exists[:, None] & (k < DEPTH)[None, :]
    offset = image[:, None] * X_STRIDES[0] + d * X_STRIDES[1] + h * X_STRIDES[2]
    offset += w * X_STRIDES[3] + (k % CHANNELS)[None, :]
    a_tile = tl.load(x + offset, mask=inside, other=0)
    in_bounds = (k < DEPTH)[:, None] & (f < FILTERS)[None, :]
    b_tile = tl.load(weights + f[None, :] * W_PITCH + k[:, None], mask=in_bounds, other=0)
    return a_tile, b_tile


@triton.jit
def _output_row(window, rows, OUT: tl.constexpr):
    """Return the row of y of each output; `rows`, which is not stored, where there is none."""
    image, _, out, exists = window
    row = ((image * OUT[0] + out[0]) * OUT[1] + out[1]) * OUT[2] + out[2]
    return tl.where(exists, row, rows)


@triton.jit
def _store_strided(
    total, bias, scale, y, row, column, rows, COLUMNS: tl.constexpr, Y_COLUMN: tl.constexpr,
    EPILOGUE: tl.constexpr, scalars,
):  # fmt: skip
    """Store what `store_with_epilogue` stores, with columns Y_COLUMN apart; y is [row, 1]."""
    in_bounds = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    total = apply_epilogue(total, bias, scale, None, column, COLUMNS, EPILOGUE, scalars)
    # Addresses of a row are its own and multiples of Y_COLUMN, which stores hold as constants.
    tl.store(y + column[None, :] * Y_COLUMN, total.to(y.dtype.element_ty), mask=in_bounds)


@triton.jit
def split_k_reduce(
    x, bias, scale, scalars, residual, y, rows,
    COLUMNS: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the partial sums x of split-K and apply the epilogue; COLUMNS are those of all groups.

    Grid: (blocks of rows x blocks of columns).
    """
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    m = tl.program_id(0) // COLUMN_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    in_bounds = (m < rows)[:, None] & (n < COLUMNS)[None, :]
    x += m[:, None] * COLUMNS + n[None, :]
    residual = load_residual(residual, m, n, rows, COLUMNS, R_PITCH)
    total = tl.load(x, mask=in_bounds, other=0)
    for part in tl.static_range(1, SPLIT_K):
        total += tl.load(x + part * rows * COLUMNS, mask=in_bounds, other=0)
    store_with_epilogue(
        total, bias, scale, residual, y, m, n, rows, COLUMNS, Y_PITCH, EPILOGUE, scalars
    )
