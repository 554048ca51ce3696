"""Running sums and products along one dimension.

    y[r, c] = x[r, 0] + ... + x[r, c]        (or the product)

EXCLUSIVE leaves x[r, c] out; REVERSE runs from the last column to the first.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def scan(
    x, y, rows,
    COLUMNS: tl.constexpr, SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, PRODUCT: tl.constexpr,
    EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows). A row is scanned BLOCK columns at a time."""
    IDENTITY: tl.constexpr = 1 if PRODUCT else 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    source = x + offsets(row, SHAPE, X_STRIDES)
    target = y + offsets(row, SHAPE, Y_STRIDES)
    if x.dtype.element_ty.is_floating():
        carry = tl.full((ROWS, 1), IDENTITY, tl.float32)
    else:
        carry = tl.full((ROWS, 1), IDENTITY, x.dtype.element_ty)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        read = column - 1 if EXCLUSIVE else column
        mask = (row < rows) & (read >= 0) & (read < COLUMNS)
        read = COLUMNS - 1 - read if REVERSE else read
        value = tl.load(source + read * X_STRIDE, mask=mask, other=IDENTITY).to(carry.dtype)
        running = tl.cumprod(value, 1) * carry if PRODUCT else tl.cumsum(value, 1) + carry
        last = tl.where(column == start + BLOCK - 1, running, 0)
        carry = tl.sum(last, 1, keep_dims=True).to(carry.dtype)
        written = COLUMNS - 1 - column if REVERSE else column
        mask = (row < rows) & (column < COLUMNS)
        tl.store(target + written * Y_STRIDE, running.to(y.dtype.element_ty), mask=mask)
