"""The MMA layout of sm_90 accumulators, and operand orders that make it contiguous in memory.

Of each 16 WARPS rows of accumulators, warp w holds rows 16 w to 16 w + 15; its thread l the rows
l // 4 and l // 4 + 8 of those, and in each the columns 8 j + 2 (l % 4) and the next, for all j. A
thread that loads and stores 16 bytes needs 16 adjacent columns. Either accumulators go through
shared memory, or, as here, rows and columns of the operands are permuted, which costs nothing:

    accumulator [r, c] is the result [mma_rows[r], mma_columns[c]]

so that thread l holds the columns 16 (l % 4) to 16 (l % 4) + 15 of each 64, and one access of a
warp is 64 bytes of 8 rows. Of 16 or 32 columns it holds a quarter likewise. Results on other GPUs
are the same.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import load_residual, store_with_epilogue
from toolkit.gpu.kernels.int8 import INTERPRETED


@triton.jit
def mma_rows(BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return for each accumulator row, [BLOCK_M], which row of the block it is."""
    r = tl.arange(0, BLOCK_M)
    of_warps = r // (16 * WARPS) * (16 * WARPS)
    return of_warps + r // 8 % 2 * (8 * WARPS) + r // 16 % WARPS * 8 + r % 8


@triton.jit
def mma_columns(BLOCK_N: tl.constexpr):
    """Return for each accumulator column, [BLOCK_N], which column of the block it is."""
    RUN: tl.constexpr = min(BLOCK_N, 64)
    c = tl.arange(0, BLOCK_N)
    return c // RUN * RUN + c // 2 % 4 * (RUN // 4) + c // 8 % (RUN // 8) * 2 + c % 2


@triton.jit
def row_offsets(row, A_ROW: tl.constexpr, A_IMAGE: tl.constexpr):
    """Return the element offsets of rows of the A operand.

    A_IMAGE None: rows are A_ROW elements apart. Otherwise rows are pixels, A_ROW elements apart,
    and A_IMAGE is (pixels per image row, pixels per image, row stride, image stride).
    """
    if A_IMAGE is None:
        offset = row * A_ROW
    else:
        pixel = row % A_IMAGE[1]
        image_row = pixel // A_IMAGE[0]
        offset = pixel % A_IMAGE[0] * A_ROW + image_row * A_IMAGE[2]
        offset += row // A_IMAGE[1] * A_IMAGE[3]
    return offset


@triton.jit
def in_memory_order(accumulator, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return an accumulator of 64 columns or fewer with its rows and columns in block order."""
    COLUMNS: tl.constexpr = accumulator.shape[1]
    accumulator = accumulator.reshape(BLOCK_M // (16 * WARPS), WARPS, 2, 8, COLUMNS // 8, 4, 2)
    return accumulator.permute(0, 2, 1, 3, 5, 4, 6).reshape(BLOCK_M, COLUMNS)


@triton.jit
def rows_in_mma_order(values, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return values [BLOCK_M, 64] with rows, but not columns, in the MMA order."""
    values = values.reshape(BLOCK_M // (16 * WARPS), 2, WARPS, 8, 64)
    return values.permute(0, 2, 1, 3, 4).reshape(BLOCK_M, 64)


@triton.jit
def operand_columns():
    """Return for each of 64 columns of an A operand which column of the block it is.

    Of each 32 columns a thread holds the bytes 4 (l % 4) to 4 (l % 4) + 3, and those 16 further;
    they are 8 of the 16 neighbours that it holds of a result.
    """
    k = tl.arange(0, 64)
    return k // 4 % 4 * 16 + k // 32 * 8 + k // 16 % 2 * 4 + k % 4


@triton.jit
def in_operand_order(values, BLOCK_M: tl.constexpr, WARPS: tl.constexpr):
    """Return values [BLOCK_M, 64] with rows in the MMA order, columns as `operand_columns` says."""
    values = rows_in_mma_order(values, BLOCK_M, WARPS).reshape(BLOCK_M, 4, 2, 2, 4)
    return values.permute(0, 2, 3, 1, 4).reshape(BLOCK_M, 64)


@triton.jit
def in_registers(a):
    """Return the A operand in registers, so that the MMA does not read it from shared memory."""
    if not INTERPRETED:
        a = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [a], tl.int8, is_pure=True, pack=4
        )  # fmt: skip
    return a


@triton.jit
def load_mma_residual(
    residual, row, n, rows, COLUMNS: tl.constexpr, R_PITCH: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the residual of a block from column n on for `store_mma`; None of None.

    `row` is [BLOCK_M]; each 64 columns are a block of their own.
    """
    residuals = None
    if residual is not None:
        residuals = ()
        RUN: tl.constexpr = min(BLOCK_N, 64)
        for i in tl.static_range(BLOCK_N // RUN):
            column = n + i * RUN + tl.arange(0, RUN)
            residuals = residuals + (load_residual(residual, row, column, rows, COLUMNS, R_PITCH),)
    return residuals


@triton.jit
def store_mma(
    total, scale, residuals, y, row, n, rows, COLUMNS: tl.constexpr, Y_PITCH: tl.constexpr,
    EPILOGUE: tl.constexpr, scalars, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Store what `store_with_epilogue` stores, of accumulators in the MMA order.

    The accumulators include the bias. BLOCK_N is 16, 32, 64 or 128; 64 are stored at a time.
    """
    RUN: tl.constexpr = min(BLOCK_N, 64)
    if BLOCK_N == 128:
        parts = total.reshape(BLOCK_M, 2, 64).permute(0, 2, 1).split()
    else:
        parts = (total,)
    for i in tl.static_range(BLOCK_N // RUN):
        column = n + i * RUN + tl.arange(0, RUN)
        part = in_memory_order(parts[i], BLOCK_M, WARPS)
        residual = None
        if residuals is not None:
            residual = residuals[i]
        store_with_epilogue(
            part, None, scale, residual, y, row, column, rows, COLUMNS, Y_PITCH, EPILOGUE, scalars
        )
