"""Matrix products, one or a batch of them; a 1x1 convolution is one whose rows are pixels.

    y[i, m, n] = STEPS((sum_k a[i, m, k] b[i, k, n] + bias[n]) scale[n], residual[i, m, n])

a and b are read with any strides, so a transposed operand costs no copy. Product i is number
i % INNER of group i // INNER, with a stride for each of the two; a stride of 0 gives several
products the same operand. INT8 operands are summed in INT32, and scaled; others have no scale.
WHOLE_BLOCKS says that BLOCK_K divides DEPTH. Products are the fastest with k the fastest in both.

With LANES, the number of warps, rows and columns are multiplied in the order of `kernels.lanes`,
so that INT8 results need not go through shared memory; BLOCK_N is 64 or 128 then.
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
def matmul(
    a, b, bias, scale, scalars, residual, y, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    A_OUTER: tl.constexpr, A_BATCH: tl.constexpr, A_ROW: tl.constexpr, A_COLUMN: tl.constexpr,
    B_OUTER: tl.constexpr, B_BATCH: tl.constexpr, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr,
    Y_OUTER: tl.constexpr, Y_BATCH: tl.constexpr, Y_PITCH: tl.constexpr,
    R_OUTER: tl.constexpr, R_BATCH: tl.constexpr, R_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, WHOLE_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MMA_WARPS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x blocks of columns, products)."""
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)  # neighbours share the rows: they stay in the cache
    outer = tl.program_id(1) // INNER
    i = tl.program_id(1) % INNER
    first = tile % COLUMN_BLOCKS * BLOCK_N
    m = tile // COLUMN_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    row = m
    column = n
    if MMA_WARPS:
        row = tile // COLUMN_BLOCKS * BLOCK_M + mma_rows(BLOCK_M, MMA_WARPS)
        column = first + mma_columns(BLOCK_N)
    LIMIT: tl.constexpr = None if MMA_WARPS and COLUMNS % BLOCK_N == 0 else COLUMNS
    k = tl.arange(0, BLOCK_K)
    a += outer * A_OUTER + i * A_BATCH + row[:, None] * A_ROW + k[None, :] * A_COLUMN
    b += outer * B_OUTER + i * B_BATCH + k[:, None] * B_ROW + column[None, :] * B_COLUMN

    if residual is not None:
        residual += outer * R_OUTER + i * R_BATCH
    if MMA_WARPS:
        before = load_mma_residual(residual, m, first, rows, LIMIT, R_PITCH, BLOCK_N)
        total = first_sums(bias, column, LIMIT, BLOCK_M, BLOCK_N)
    else:
        before = load_residual(residual, m, n, rows, COLUMNS, R_PITCH)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if scale is None else tl.int32)
    for start in range(0, DEPTH, BLOCK_K):
        present = (row < rows)[:, None]
        wanted = (column < COLUMNS)[None, :]
        if not WHOLE_BLOCKS:
            present = present & (k < DEPTH - start)[None, :]
            wanted = wanted & (k < DEPTH - start)[:, None]
        left = tl.load(a + start * A_COLUMN, mask=present, other=0)
        right = tl.load(b + start * B_ROW, mask=wanted, other=0)
        total = add_product(total, left, right, PRECISION)

    y += outer * Y_OUTER + i * Y_BATCH
    if MMA_WARPS:
        store_mma(
            total, scale, before, y, m, first, rows, LIMIT, Y_PITCH, EPILOGUE, scalars,
            BLOCK_M, BLOCK_N, MMA_WARPS,
        )  # fmt: skip
    else:
        store_with_epilogue(
            total, bias, scale, before, y, m, n, rows, COLUMNS, Y_PITCH, EPILOGUE, scalars
        )
