"""Running sums and products along one dimension.

    y[r, c] = x[r, 0] + ... + x[r, c]        (or the product)

EXCLUSIVE leaves x[r, c] out; REVERSE runs from the last column to the first.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import walk


@triton.jit
def scan(
    x, y, rows,
    COLUMNS: tl.constexpr, SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    X_STEP: tl.constexpr, Y_STEP: tl.constexpr, PRODUCT: tl.constexpr,
    EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). A row is walked BLOCK columns at a time."""
    NOTHING: tl.constexpr = 1 if PRODUCT else 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    source, target = x + walk(row, SHAPE, X_STRIDES), y + walk(row, SHAPE, Y_STRIDES)
    if x.dtype.element_ty.is_floating():
        before = tl.full((ROWS, 1), NOTHING, tl.float32)
    else:
        before = tl.full((ROWS, 1), NOTHING, x.dtype.element_ty)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        read = column - 1 if EXCLUSIVE else column
        mask = (row < rows) & (read >= 0) & (read < COLUMNS)
        read = COLUMNS - 1 - read if REVERSE else read
        value = tl.load(source + read * X_STEP, mask=mask, other=NOTHING).to(before.dtype)
        found = tl.cumprod(value, 1) * before if PRODUCT else tl.cumsum(value, 1) + before
        last = tl.where(column == start + BLOCK - 1, found, 0)
        before = tl.sum(last, 1, keep_dims=True).to(before.dtype)
        written = COLUMNS - 1 - column if REVERSE else column
        mask = (row < rows) & (column < COLUMNS)
        tl.store(target + written * Y_STEP, found.to(y.dtype.element_ty), mask=mask)
