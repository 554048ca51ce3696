"""Element-wise expressions over tensors of any strides; also copies and changes of layout.

    y[i] = EXPRESSION(x0[i], x1[i], x2[i], x3[i])

i runs over the output in the order of SHAPE. Each tensor has its own strides, in elements: 0
repeats it (broadcast, nearest-neighbour upscaling), others permute or slice it. A change of layout
or type is an expression without ops.

`transpose_tiles` is for operands whose fastest dimension is not that of the result: it works in
tiles, so that both loads and stores are coalesced.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def _read(x, i, mask, SHAPE: tl.constexpr, STRIDES: tl.constexpr):
    return _load(x + offsets(i, SHAPE, STRIDES), mask)


@triton.jit
def _load(pointer, mask):
    """Load floats as FP32, and all else in its own type."""
    value = tl.load(pointer, mask=mask, other=0.0)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    return value


@triton.jit
def elementwise(
    x0, x1, x2, x3, y, elements,
    SHAPE: tl.constexpr, STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    EXPRESSION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of elements). Absent operands are None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    v = (_read(x0, i, mask, SHAPE, STRIDES[0]),)
    if x1 is not None:
        v = v + (_read(x1, i, mask, SHAPE, STRIDES[1]),)
    if x2 is not None:
        v = v + (_read(x2, i, mask, SHAPE, STRIDES[2]),)
    if x3 is not None:
        v = v + (_read(x3, i, mask, SHAPE, STRIDES[3]),)
    result = evaluate(v, EXPRESSION)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def transpose_tiles(
    x0, x1, x2, x3, y,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHAPE: tl.constexpr, STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    EXPRESSION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of all matrices).

    SHAPE counts matrices of ROWS x COLUMNS; the first of the strides are those of y.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M * COLUMN_TILES
    tile = tl.program_id(0)
    matrix = tile // TILES + tl.zeros((1, 1), tl.int32)
    row = tile % TILES // COLUMN_TILES * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tile % COLUMN_TILES * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (row < ROWS) & (column < COLUMNS)
    at = (matrix, row, column)
    v = (_load(x0 + _offset(at, SHAPE, STRIDES[1], ROW_STRIDES[1], COLUMN_STRIDES[1]), mask),)
    if x1 is not None:
        offset = _offset(at, SHAPE, STRIDES[2], ROW_STRIDES[2], COLUMN_STRIDES[2])
        v = v + (_load(x1 + offset, mask),)
    if x2 is not None:
        offset = _offset(at, SHAPE, STRIDES[3], ROW_STRIDES[3], COLUMN_STRIDES[3])
        v = v + (_load(x2 + offset, mask),)
    if x3 is not None:
        offset = _offset(at, SHAPE, STRIDES[4], ROW_STRIDES[4], COLUMN_STRIDES[4])
        v = v + (_load(x3 + offset, mask),)
    result = evaluate(v, EXPRESSION)
    offset = _offset(at, SHAPE, STRIDES[0], ROW_STRIDES[0], COLUMN_STRIDES[0])
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _offset(
    at, SHAPE: tl.constexpr, STRIDES: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr
):  # fmt: skip
    return offsets(at[0], SHAPE, STRIDES) + at[1] * ROW + at[2] * COLUMN
