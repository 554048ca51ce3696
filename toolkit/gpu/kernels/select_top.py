"""The COUNT largest or smallest elements of every chunk of a row, in the order of their places.

    T = the COUNT-th largest key of the chunk
    selected: all keys > T, then of those that equal T the first ones, COUNT in all

Keys are integers in the order of the elements: the bits of an FP32 number, inverted below 0, or the
integer itself; bitwise complements where the smallest are selected. T is found bit by bit, from the
highest: each step counts the keys that are at least as large. -0 equals 0, NaN is the largest.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def _keys(value, LARGEST: tl.constexpr):
    """Return integers in the order of the elements, the selected ones being the largest."""
    if value.dtype.is_floating():
        value = value.to(tl.float32)
        bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
        key = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    else:
        key = value.to(tl.int64)
    return key if LARGEST else ~key


@triton.jit
def _threshold(key, valid, COUNT: tl.constexpr):
    """Return the COUNT-th largest of the valid keys; there are at least COUNT."""
    BITS: tl.constexpr = key.dtype.primitive_bitwidth
    ONE = tl.full((), 1, key.dtype)
    lowest = ONE << (BITS - 1)
    enough = tl.sum((valid & (key >= 0)).to(tl.int32), 0) >= COUNT
    threshold = tl.where(enough, ONE - 1, lowest)
    for step in range(1, BITS):
        candidate = threshold + (ONE << (BITS - 1 - step))
        enough = tl.sum((valid & (key >= candidate)).to(tl.int32), 0) >= COUNT
        threshold = tl.where(enough, candidate, threshold)
    return threshold


@triton.jit
def select_top(
    x, sources, values, indices,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, SELECTED: tl.constexpr, OUTER: tl.constexpr,
    X_ROW_STRIDES: tl.constexpr, X_STRIDE: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks of BLOCK columns, rows). `values` and `indices` are (rows, SELECTED), dense.

    A chunk of fewer than COUNT columns is selected whole. `sources`: the place of each element of x
    in the row that is selected from, None where x is that row.
    """
    row = tl.program_id(1)
    chunk = tl.program_id(0)
    x += offsets(row + tl.zeros((1,), tl.int32), OUTER, X_ROW_STRIDES)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    valid = column < COLUMNS
    value = tl.load(x + column * X_STRIDE, mask=valid, other=0)
    key = _keys(value, LARGEST)
    threshold = _threshold(key, valid, COUNT)
    greater = valid & (key > threshold)
    equal = (valid & (key == threshold)).to(tl.int32)
    needed = COUNT - tl.sum(greater.to(tl.int32), 0)
    selected = greater | ((equal != 0) & (tl.cumsum(equal, 0) <= needed))
    place = tl.cumsum(selected.to(tl.int32), 0) - 1
    target = row * SELECTED + chunk * COUNT + place
    tl.store(values + target, value, mask=selected)
    if sources is None:
        index = column
    else:
        index = tl.load(sources + row * COLUMNS + column, mask=valid, other=0)
    tl.store(indices + target, index, mask=selected)
