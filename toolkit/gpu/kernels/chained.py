"""Two products of INT8, the second of what the first made, for the tensor cores of sm_90.

    y[m, n] = STEPS((sum_k a[m, k] b[n, k] + bias[n]) scale[n], residual[m, n])
    z[m, p] = Z_STEPS((sum_n y[m, n] z_b[p, n] + z_bias[p]) z_scale[p])

A program makes a block of rows of y as `strips` does, but all their columns, and stores them. Each
64 columns are multiplied with their part of z_b at once, so that no memory is asked for y again.
BLOCK_K is DEPTH or more, BLOCK_Z is 64 or 128 and Z_COLUMNS or more. `numbers` holds NUMBERS.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import end_rows, first_sums, load_numbers, load_residual
from toolkit.gpu.kernels.lanes import (
    in_memory_order,
    rows_in_sum_order,
    store_lanes,
    sum_columns,
    sum_rows,
)


@triton.jit
def chained(
    a, b, bias, scale, numbers, residual, y, z_b, z_bias, z_scale, z_numbers, z, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, Z_COLUMNS: tl.constexpr,
    A_ROW: tl.constexpr, B_COLUMN: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    Z_B_COLUMN: tl.constexpr, Z_PITCH: tl.constexpr,
    STEPS: tl.constexpr, NUMBERS: tl.constexpr, Z_STEPS: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). BLOCK_N is 64."""
    first = tl.program_id(0) * BLOCK_M
    k = tl.arange(0, BLOCK_K)
    row = first + sum_rows(BLOCK_M, WARPS)
    present = (row < rows)[:, None] & (k < DEPTH)[None, :]
    left = tl.load(a + row[:, None] * A_ROW + k[None, :], mask=present, other=0)
    m = first + tl.arange(0, BLOCK_M)
    WHOLE: tl.constexpr = COLUMNS % BLOCK_N == 0
    LIMIT: tl.constexpr = None if WHOLE else COLUMNS
    Z_LIMIT: tl.constexpr = None if Z_COLUMNS == BLOCK_Z else Z_COLUMNS
    z_column = sum_columns(BLOCK_Z)
    numbers = load_numbers(numbers, NUMBERS)
    z_total = first_sums(z_bias, z_column, Z_LIMIT, BLOCK_M, BLOCK_Z)
    for n in tl.range(0, COLUMNS, BLOCK_N, num_stages=STAGES):
        column = n + sum_columns(BLOCK_N)
        wanted = (k < DEPTH)[:, None]
        if not WHOLE:
            wanted = wanted & (column < COLUMNS)[None, :]
        right = tl.load(b + k[:, None] + column[None, :] * B_COLUMN, mask=wanted, other=0)
        before = load_residual(residual, m, n + tl.arange(0, BLOCK_N), rows, LIMIT, R_PITCH)
        total = first_sums(bias, column, LIMIT, BLOCK_M, BLOCK_N)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        total = in_memory_order(total, BLOCK_M, WARPS)
        column = n + tl.arange(0, BLOCK_N)
        made = end_rows(total, None, scale, before, column, LIMIT, STEPS, numbers).to(tl.int8)
        inside = (m < rows)[:, None]
        if not WHOLE:
            inside = inside & (column < COLUMNS)[None, :]
        tl.store(y + m[:, None] * Y_PITCH + column[None, :], made, mask=inside)
        wanted = (z_column < Z_COLUMNS)[None, :] & (column < COLUMNS)[:, None]
        place = z_column[None, :] * Z_B_COLUMN + column[:, None]
        z_right = tl.load(z_b + place, mask=wanted, other=0)
        made = rows_in_sum_order(made, BLOCK_M, WARPS)
        z_total = tl.dot(made, z_right, z_total, out_dtype=tl.int32)
    store_lanes(
        z_total, z_scale, None, z, m, 0, rows, Z_LIMIT, Z_PITCH, Z_STEPS, z_numbers,
        BLOCK_M, BLOCK_Z, WARPS,
    )  # fmt: skip
