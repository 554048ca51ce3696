"""Persistent weight-stationary INT8 GEMM for sm_90, optionally a back-to-back GEMM.

    y[m, n] = EPILOGUE((sum_k a[m, k] b[n, k] + bias[n]) scale[n], residual[m, n])
    z[m, p] = Z_EPILOGUE((sum_n y[m, n] z_b[p, n] + z_bias[p]) z_scale[p])

z is optional. A program copies the weights of RUN blocks of columns to shared memory once. Then it
computes these columns of its blocks of rows; their distance is the number of programs with the same
columns. Copies bring rows and residual of the next block meanwhile. Rows of a are multiplied from
registers, and so is y: with n in the order of `operand_columns`, the accumulator layout of a thread
is its layout of the A operand. With z, RUN covers all columns. BLOCK_N is 64, BLOCK_K is DEPTH or
more, BLOCK_Z is 64 or 128 and Z_COLUMNS or more. `scalars` holds SCALARS numbers.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import first_sums, load_scalars
from toolkit.gpu.sm90.kernels.int8x4 import (
    apply_epilogue_int8x4,
    load_int8x4,
    store_int8x4,
    unpack_int8x4,
)
from toolkit.gpu.sm90.kernels.mma_layout import (
    in_memory_order,
    in_operand_order,
    in_registers,
    mma_columns,
    mma_rows,
    operand_columns,
    row_offsets,
    store_mma,
)


@triton.jit
def persistent_gemm(
    a, b, bias, scale, scalars, residual, y, z_b, z_bias, z_scale, z_scalars, z, rows,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, Z_COLUMNS: tl.constexpr,
    A_ROW: tl.constexpr, A_IMAGE: tl.constexpr, B_COLUMN: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    Z_B_COLUMN: tl.constexpr, Z_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, SCALARS: tl.constexpr, Z_EPILOGUE: tl.constexpr,
    WARPS: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Grid: (programs); each computes blocks of rows."""
    k = tl.arange(0, BLOCK_K)
    RUNS: tl.constexpr = (COLUMNS + RUN * BLOCK_N - 1) // (RUN * BLOCK_N)
    LIMIT: tl.constexpr = None if COLUMNS % (RUN * BLOCK_N) == 0 else COLUMNS
    first = tl.program_id(0) % RUNS * (RUN * BLOCK_N)
    Z_LIMIT: tl.constexpr = None if Z_COLUMNS == BLOCK_Z else Z_COLUMNS
    z_column = mma_columns(BLOCK_Z)
    scalars = load_scalars(scalars, SCALARS)
    weights = ()
    z_weights = ()
    for i in tl.static_range(RUN):
        column = first + i * BLOCK_N + mma_columns(BLOCK_N)
        in_bounds = (k < DEPTH)[:, None] & (column < COLUMNS)[None, :]
        offset = k[:, None] + column[None, :] * B_COLUMN
        weights = weights + (tl.load(b + offset, mask=in_bounds, other=0),)
        if z_b is not None:
            column = i * BLOCK_N + operand_columns()
            in_bounds = (z_column < Z_COLUMNS)[None, :] & (column < COLUMNS)[:, None]
            offset = z_column[None, :] * Z_B_COLUMN + column[:, None]
            z_weights = z_weights + (tl.load(z_b + offset, mask=in_bounds, other=0),)
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0) // RUNS
    for block in tl.range(program, blocks, tl.num_programs(0) // RUNS, num_stages=STAGES):
        row = block * BLOCK_M + mma_rows(BLOCK_M, WARPS)
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        row_start = row_offsets(row, A_ROW, A_IMAGE)
        present = (row < rows)[:, None] & (k < DEPTH)[None, :]
        a_tile = in_registers(tl.load(a + row_start[:, None] + k[None, :], mask=present, other=0))
        if residual is not None:
            residuals = ()
            for i in tl.static_range(RUN):
                residuals = residuals + (
                    load_int8x4(residual, m, first + i * BLOCK_N, rows, LIMIT, R_PITCH),
                )
        if z_b is not None:
            z_total = first_sums(z_bias, z_column, Z_LIMIT, BLOCK_M, BLOCK_Z)
        for i in tl.static_range(RUN):
            n = first + i * BLOCK_N
            total = first_sums(bias, n + mma_columns(BLOCK_N), LIMIT, BLOCK_M, BLOCK_N)
            total = tl.dot(a_tile, weights[i], total, out_dtype=tl.int32)
            total = in_memory_order(total, BLOCK_M, WARPS)
            residual_tile = None
            if residual is not None:
                residual_tile = residuals[i]
            packed = apply_epilogue_int8x4(
                total, scale, residual_tile, n, LIMIT, EPILOGUE, scalars, BLOCK_M
            )
            store_int8x4(y, packed, m, n, rows, LIMIT, Y_PITCH)
            if z_b is not None:
                y_tile = in_operand_order(unpack_int8x4(packed, BLOCK_M), BLOCK_M, WARPS)
                z_total = tl.dot(y_tile, z_weights[i], z_total, out_dtype=tl.int32)
        if z_b is not None:
            store_mma(
                z_total, z_scale, None, z, m, 0, rows, Z_LIMIT, Z_PITCH, Z_EPILOGUE, z_scalars,
                BLOCK_M, BLOCK_Z, WARPS,
            )  # fmt: skip
