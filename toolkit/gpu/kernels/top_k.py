"""The COUNT largest or smallest elements of every row, of any strides, in order.

    rank[i] = number of j where x[j] precedes x[i], or equals it and j < i
    values[rank[i]] = x[i],  indices[rank[i]] = i    for all i with rank[i] < COUNT

Larger numbers precede smaller ones with LARGEST, else follow them; NaN counts as the largest. Every
element is compared with every other, so the blocks of a row need neither workspace nor an order.
Where `select_top` chose the elements of x before, sources[i] takes the place of i in the indices.
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
    own = tl.load(x + i * X_STRIDE, mask=i < COLUMNS, other=0).to(TYPE)[:, None]
    rank = tl.zeros((BLOCK_I,), tl.int32)
    for start in range(0, COLUMNS, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        peer = tl.load(x + j * X_STRIDE, mask=j < COLUMNS, other=0).to(TYPE)[None, :]
        greater = peer > own
        less = peer < own
        if FLOAT:
            greater = greater | ((peer != peer) & (own == own))
            less = less | ((own != own) & (peer == peer))
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
