"""INT8 GEMM of small depth for the tensor cores of sm_90: a program computes a row panel.

    y[m, n] = EPILOGUE((sum_k a[m, k] b[n, k] + bias[n]) scale[n], residual[m, n])

A program loads a block of rows once, with its whole depth, and multiplies it by RUN blocks of
columns in turn. Copies to shared memory bring weights and residual of the next blocks while the
epilogue of one runs: a main loop of so few steps hides no loads. BLOCK_K is DEPTH or more,
`scalars` holds SCALARS numbers. With INT8X4 the epilogue stores packed int8x4, as
`kernels.int8x4` says, and BLOCK_N is 64.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import first_sums, load_scalars
from toolkit.gpu.sm90.kernels.int8x4 import apply_epilogue_int8x4, load_int8x4, store_int8x4
from toolkit.gpu.sm90.kernels.mma_layout import (
    in_memory_order,
    load_mma_residual,
    mma_columns,
    mma_rows,
    store_mma,
)


@triton.jit
def row_panel_gemm(
    a, b, bias, scale, scalars, residual, y, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
    A_ROW: tl.constexpr, B_COLUMN: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, SCALARS: tl.constexpr, INT8X4: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows x runs of columns)."""
    RUNS: tl.constexpr = (COLUMNS + RUN * BLOCK_N - 1) // (RUN * BLOCK_N)
    m = tl.program_id(0) // RUNS * BLOCK_M
    first = tl.program_id(0) % RUNS * (RUN * BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = m + mma_rows(BLOCK_M, WARPS)
    present = (row < rows)[:, None] & (k < DEPTH)[None, :]
    a_tile = tl.load(a + row[:, None] * A_ROW + k[None, :], mask=present, other=0)
    m += tl.arange(0, BLOCK_M)
    WHOLE: tl.constexpr = COLUMNS % (RUN * BLOCK_N) == 0
    LIMIT: tl.constexpr = None if WHOLE else COLUMNS
    scalars = load_scalars(scalars, SCALARS)
    for block in tl.range(RUN, num_stages=STAGES):
        n = first + block * BLOCK_N
        column = n + mma_columns(BLOCK_N)
        in_bounds = (k < DEPTH)[:, None]
        if not WHOLE:
            in_bounds = in_bounds & (column < COLUMNS)[None, :]
        b_tile = tl.load(b + k[:, None] + column[None, :] * B_COLUMN, mask=in_bounds, other=0)
        if INT8X4:
            residuals = load_int8x4(residual, m, n, rows, LIMIT, R_PITCH)
        else:
            residuals = load_mma_residual(residual, m, n, rows, LIMIT, R_PITCH, BLOCK_N)
        total = first_sums(bias, column, LIMIT, BLOCK_M, BLOCK_N)
        total = tl.dot(a_tile, b_tile, total, out_dtype=tl.int32)
        if INT8X4:
            total = in_memory_order(total, BLOCK_M, WARPS)
            packed = apply_epilogue_int8x4(
                total, scale, residuals, n, LIMIT, EPILOGUE, scalars, BLOCK_M
            )
            store_int8x4(y, packed, m, n, rows, LIMIT, Y_PITCH)
        else:
            store_mma(
                total, scale, residuals, y, m, n, rows, LIMIT, Y_PITCH, EPILOGUE, scalars,
                BLOCK_M, BLOCK_N, WARPS,
            )  # fmt: skip
