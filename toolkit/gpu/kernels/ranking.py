"""The first COUNT elements of every row by size, of any strides.

    rank[i] = how many j: x[j] goes before x[i], or is equal and j < i
    values[rank[i]] = x[i],  places[rank[i]] = i    for all i with rank[i] < COUNT

Larger numbers go before smaller ones with LARGEST, else after; NaN counts as the largest. Every
element is compared to every other one, so a row needs no memory of its own and no order of steps.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import walk


@triton.jit
def top_k(
    x, values, places,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, OUTER: tl.constexpr,
    X_ROW: tl.constexpr, VALUES_ROW: tl.constexpr, PLACES_ROW: tl.constexpr,
    X_STEP: tl.constexpr, VALUES_STEP: tl.constexpr, PLACES_STEP: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of i, rows)."""
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    row = tl.program_id(1) + tl.zeros((1,), tl.int32)
    x += walk(row, OUTER, X_ROW)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    own = tl.load(x + i * X_STEP, mask=i < COLUMNS, other=0).to(TYPE)[:, None]
    before = tl.zeros((BLOCK_I,), tl.int32)
    for start in range(0, COLUMNS, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        other = tl.load(x + j * X_STEP, mask=j < COLUMNS, other=0).to(TYPE)[None, :]
        greater = other > own
        less = other < own
        if FLOAT:
            greater = greater | ((other != other) & (own == own))
            less = less | ((own != own) & (other == other))
        goes = greater if LARGEST else less
        equal = (greater == 0) & (less == 0)
        goes = goes | (equal & (j[None, :] < i[:, None]))
        before += tl.sum((goes & (j < COLUMNS)[None, :]).to(tl.int32), 1)

    selected = (i < COLUMNS) & (before < COUNT)
    value = tl.load(x + i * X_STEP, mask=selected, other=0)
    place = walk(row, OUTER, VALUES_ROW) + before * VALUES_STEP
    tl.store(values + place, value.to(values.dtype.element_ty), mask=selected)
    place = walk(row, OUTER, PLACES_ROW) + before * PLACES_STEP
    tl.store(places + place, i.to(places.dtype.element_ty), mask=selected)
