"""Offsets of the elements of strided tensors, and loads and stores of their rows.

    offset(i) = sum_d index_d STRIDES[d]

index is the i-th of all indices of SHAPE, the last dimension fastest. SHAPE[0] is not used.
"""

import triton
import triton.language as tl


@triton.jit
def offsets(i, SHAPE: tl.constexpr, STRIDES: tl.constexpr):
    """Return the offsets of elements number `i`, a block of integers."""
    offset = tl.zeros_like(i)
    for back in tl.static_range(1, len(SHAPE)):
        if STRIDES[len(SHAPE) - back] != 0:
            offset += i % SHAPE[len(SHAPE) - back] * STRIDES[len(SHAPE) - back]
        i = i // SHAPE[len(SHAPE) - back]
    return offset + i * STRIDES[0]


@triton.jit
def index_along(i, SHAPE: tl.constexpr, DIM: tl.constexpr):
    """Return the indices of elements number `i` in dimension DIM."""
    for back in tl.static_range(1, len(SHAPE) - DIM):
        i = i // SHAPE[len(SHAPE) - back]
    if DIM > 0:
        i = i % SHAPE[DIM]
    return i


@triton.jit
def inner_index(c, SIZE: tl.constexpr, MODE: tl.constexpr, EDGE: tl.constexpr):
    """Map indices to 0..SIZE-1 by MODE; they may stay outside with any other mode.

    "edge", "border": the nearest; "wrap": modulo SIZE; "reflect", "reflection": mirrored, with EDGE
    1 at the first and the last element, which are not repeated, with 0 beyond them.
    """
    if MODE == "edge" or MODE == "border":
        c = tl.where(c < 0, 0, tl.where(c >= SIZE, SIZE - 1, c))
    elif MODE == "wrap":
        c = (c % SIZE + SIZE) % SIZE
    elif MODE == "reflect" or MODE == "reflection":
        period = 2 * (SIZE - EDGE) + (SIZE == EDGE)
        c = (c % period + period) % period
        c = tl.where(c >= SIZE, period - 1 + EDGE - c, c)
    return c


@triton.jit
def in_bounds(row, rows, column, COLUMNS: tl.constexpr):
    """Return the mask of the elements of a block that exist; COLUMNS None: all columns do."""
    inside = (row < rows)[:, None]
    if COLUMNS is not None:
        inside = inside & (column < COLUMNS)[None, :]
    return inside


@triton.jit
def load_strided(
    x, row, rows, column, COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    STRIDES: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Load the block x[row, column] as FP32; OTHER outside. COLUMNS None: all columns are inside.

    Rows are counted over the shape OUTER, columns over INNER; STRIDES are those of the two.
    """
    offset = offsets(row, OUTER, STRIDES[0])[:, None] + offsets(column, INNER, STRIDES[1])[None, :]
    inside = in_bounds(row, rows, column, COLUMNS)
    return tl.load(x + offset, mask=inside, other=OTHER).to(tl.float32)


@triton.jit
def store_strided(
    value, y, row, rows, column, COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    STRIDES: tl.constexpr,
):  # fmt: skip
    """Store y[row, column] = value in the type of y; COLUMNS None: all columns are inside."""
    offset = offsets(row, OUTER, STRIDES[0])[:, None] + offsets(column, INNER, STRIDES[1])[None, :]
    inside = in_bounds(row, rows, column, COLUMNS)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=inside)
