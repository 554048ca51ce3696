"""Gather and scatter with up to four index tensors.

    gather    y[i] = x[o(i) + sum_k j_k[i] INDEXED_STRIDES[k]]
    scatter   y[o(i) + sum_k j_k[i] INDEXED_STRIDES[k]] = x[i]      (or +=, max=, min=)

i runs over the output of a gather, and over the updates of a scatter; o(i) is the offset of element
i. Each tensor has its own strides, 0 in the dimensions that it does not have. A negative index
counts from the end. Indices are clamped to 0..SIZES[k]-1, so no address leaves the tensor.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def _index_offset(j, i, mask, SHAPE: tl.constexpr, STRIDES: tl.constexpr, SIZE: tl.constexpr,
                  STRIDE: tl.constexpr):  # fmt: skip
    index = tl.load(j + offsets(i, SHAPE, STRIDES), mask=mask, other=0)
    index = tl.where(index < 0, index + SIZE, index)
    index = tl.where(index < 0, 0, tl.where(index >= SIZE, SIZE - 1, index))
    return index.to(tl.int32) * STRIDE


@triton.jit
def _index_offsets(
    j0, j1, j2, j3, i, mask,
    SHAPE: tl.constexpr, STRIDES: tl.constexpr, SIZES: tl.constexpr,
    INDEXED_STRIDES: tl.constexpr,
):  # fmt: skip
    """Return the offset of elements `i` due to their indices."""
    offset = _index_offset(j0, i, mask, SHAPE, STRIDES[0], SIZES[0], INDEXED_STRIDES[0])
    if j1 is not None:
        offset += _index_offset(j1, i, mask, SHAPE, STRIDES[1], SIZES[1], INDEXED_STRIDES[1])
    if j2 is not None:
        offset += _index_offset(j2, i, mask, SHAPE, STRIDES[2], SIZES[2], INDEXED_STRIDES[2])
    if j3 is not None:
        offset += _index_offset(j3, i, mask, SHAPE, STRIDES[3], SIZES[3], INDEXED_STRIDES[3])
    return offset


@triton.jit
def gather(
    x, j0, j1, j2, j3, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, J_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SIZES: tl.constexpr, INDEXED_STRIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). Absent index tensors are None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    offset = _index_offsets(j0, j1, j2, j3, i, mask, SHAPE, J_STRIDES, SIZES, INDEXED_STRIDES)
    value = tl.load(x + offsets(i, SHAPE, X_STRIDES) + offset, mask=mask, other=0)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def scatter(
    x, j0, j1, j2, j3, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, J_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SIZES: tl.constexpr, INDEXED_STRIDES: tl.constexpr, REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of updates). REDUCTION of updates and y: "none", "add", "max" or "min"."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    offset = _index_offsets(j0, j1, j2, j3, i, mask, SHAPE, J_STRIDES, SIZES, INDEXED_STRIDES)
    value = tl.load(x + offsets(i, SHAPE, X_STRIDES), mask=mask, other=0).to(y.dtype.element_ty)
    target = y + offsets(i, SHAPE, Y_STRIDES) + offset
    if REDUCTION == "add":
        tl.atomic_add(target, value, mask=mask)
    elif REDUCTION == "max":
        tl.atomic_max(target, value, mask=mask)
    elif REDUCTION == "min":
        tl.atomic_min(target, value, mask=mask)
    else:
        tl.store(target, value, mask=mask)
