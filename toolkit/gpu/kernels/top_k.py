"""The COUNT largest or smallest elements of every row, of any strides, in order.

    rank[i] = number of j where x[j] precedes x[i], or equals it and j < i             top_k
    values[rank[i]] = x[i],  indices[rank[i]] = i    for all i with rank[i] < COUNT

Larger numbers precede smaller ones with LARGEST, else follow them; NaN counts as the largest. Every
element is compared with every other, so the blocks of a row need neither workspace nor an order.
Where `select_top` chose the elements of x before, sources[i] takes the place of i in the indices.

    T = the COUNT-th largest key of a chunk of a row                                   select_top
    selected: all keys > T, then of those that equal T the first ones, COUNT in all

Keys are integers in the order of the elements: the bits of an FP32 number, inverted below 0, or the
integer itself; bitwise complements where the smallest are selected. T is found bit by bit, from the
highest: each step counts the keys that are at least as large. -0 equals 0, NaN is the largest. What
is selected stays in the order of its places.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def top_k(
    x, sources, values, indices,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, OUTER: tl.constexpr,
    X_ROW_STRIDES: tl.constexpr, VALUES_ROW_STRIDES: tl.constexpr,
    INDICES_ROW_STRIDES: tl.constexpr,
    X_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, INDICES_STRIDE: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of i, rows)."""
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    row = tl.program_id(1) + tl.zeros((1,), tl.int32)
    x += offsets(row, OUTER, X_ROW_STRIDES)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    element = tl.load(x + i * X_STRIDE, mask=i < COLUMNS, other=0).to(TYPE)[:, None]
    rank = tl.zeros((BLOCK_I,), tl.int32)
    for start in range(0, COLUMNS, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        peer = tl.load(x + j * X_STRIDE, mask=j < COLUMNS, other=0).to(TYPE)[None, :]
        greater = peer > element
        less = peer < element
        if FLOAT:
            greater = greater | ((peer != peer) & (element == element))
            less = less | ((element != element) & (peer == peer))
        precedes = greater if LARGEST else less
        equal = (greater == 0) & (less == 0)
        precedes = precedes | (equal & (j[None, :] < i[:, None]))
        rank += tl.sum((precedes & (j < COLUMNS)[None, :]).to(tl.int32), 1)

    selected = (i < COLUMNS) & (rank < COUNT)
    value = tl.load(x + i * X_STRIDE, mask=selected, other=0)
    offset = offsets(row, OUTER, VALUES_ROW_STRIDES) + rank * VALUES_STRIDE
    tl.store(values + offset, value.to(values.dtype.element_ty), mask=selected)
    offset = offsets(row, OUTER, INDICES_ROW_STRIDES) + rank * INDICES_STRIDE
    index = i
    if sources is not None:
        index = tl.load(sources + tl.program_id(1) * COLUMNS + i, mask=selected, other=0)
    tl.store(indices + offset, index.to(indices.dtype.element_ty), mask=selected)


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
