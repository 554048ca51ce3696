"""Products of INT8 with little depth, for the tensor cores of sm_90: strips of rows.

    y[m, n] = STEPS((sum_k a[m, k] b[n, k] + bias[n]) scale[n], residual[m, n])

A program reads a block of rows once, with all their depth, and multiplies it with RUN blocks of
columns, one after the other. Copies to shared memory bring weights and residual of the next blocks
while the sums of one are scaled and rounded: a product of so few steps has no other time for it.
BLOCK_K is DEPTH or more. `numbers` holds NUMBERS of them. WORDS: results are made as
`kernels.words` says, of blocks of 64 columns.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import first_sums, load_numbers
from toolkit.gpu.kernels.int8x4 import end_words, load_words, store_words
from toolkit.gpu.kernels.mma_layout import (
    in_memory_order,
    load_lanes,
    store_lanes,
    sum_columns,
    sum_rows,
)


@triton.jit
def strips(
    a, b, bias, scale, numbers, residual, y, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    A_ROW: tl.constexpr, B_COLUMN: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    STEPS: tl.constexpr, NUMBERS: tl.constexpr, WORDS: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x runs of columns)."""
    RUNS: tl.constexpr = (COLUMNS + RUN * BLOCK_N - 1) // (RUN * BLOCK_N)
    m = tl.program_id(0) // RUNS * BLOCK_M
    first = tl.program_id(0) % RUNS * (RUN * BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = m + sum_rows(BLOCK_M, WARPS)
    present = (row < rows)[:, None] & (k < DEPTH)[None, :]
    left = tl.load(a + row[:, None] * A_ROW + k[None, :], mask=present, other=0)
    m += tl.arange(0, BLOCK_M)
    WHOLE: tl.constexpr = COLUMNS % (RUN * BLOCK_N) == 0
    LIMIT: tl.constexpr = None if WHOLE else COLUMNS
    numbers = load_numbers(numbers, NUMBERS)
    for block in tl.range(RUN, num_stages=STAGES):
        n = first + block * BLOCK_N
        column = n + sum_columns(BLOCK_N)
        wanted = (k < DEPTH)[:, None]
        if not WHOLE:
            wanted = wanted & (column < COLUMNS)[None, :]
        right = tl.load(b + k[:, None] + column[None, :] * B_COLUMN, mask=wanted, other=0)
        if WORDS:
            before = load_words(residual, m, n, rows, LIMIT, R_PITCH)
        else:
            before = load_lanes(residual, m, n, rows, LIMIT, R_PITCH, BLOCK_N)
        total = first_sums(bias, column, LIMIT, BLOCK_M, BLOCK_N)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        if WORDS:
            total = in_memory_order(total, BLOCK_M, WARPS)
            made = end_words(total, scale, before, n, LIMIT, STEPS, numbers, BLOCK_M)
            store_words(y, made, m, n, rows, LIMIT, Y_PITCH)
        else:
            store_lanes(
                total, scale, before, y, m, n, rows, LIMIT, Y_PITCH, STEPS, numbers,
                BLOCK_M, BLOCK_N, WARPS,
            )  # fmt: skip
