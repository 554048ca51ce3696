"""Elements taken from where indices say, and elements stored there.

    gather    y[i] = x[walk(i) + sum_k j_k[i] STEPS[k]]
    scatter   y[walk(i) + sum_k j_k[i] STEPS[k]] = x[i]      (or +=, max=, min=)

i runs over the output of a gather, and over the updates of a scatter. Each tensor has its own
strides, 0 in the dimensions that it does not have. An index counts from the end where it is
negative; one outside 0..SIZES[k]-1 is taken as the nearest inside, so no address leaves the tensor.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import walk


@triton.jit
def _step(j, i, mask, SHAPE: tl.constexpr, STRIDES: tl.constexpr, SIZE: tl.constexpr,
          STEP: tl.constexpr):  # fmt: skip
    index = tl.load(j + walk(i, SHAPE, STRIDES), mask=mask, other=0)
    index = tl.where(index < 0, index + SIZE, index)
    index = tl.where(index < 0, 0, tl.where(index >= SIZE, SIZE - 1, index))
    return index.to(tl.int32) * STEP


@triton.jit
def _steps(
    j0, j1, j2, j3, i, mask,
    SHAPE: tl.constexpr, STRIDES: tl.constexpr, SIZES: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Return what the indices add to the place of an element."""
    offset = _step(j0, i, mask, SHAPE, STRIDES[0], SIZES[0], EPILOGUE[0])
    if j1 is not None:
        offset += _step(j1, i, mask, SHAPE, STRIDES[1], SIZES[1], EPILOGUE[1])
    if j2 is not None:
        offset += _step(j2, i, mask, SHAPE, STRIDES[2], SIZES[2], EPILOGUE[2])
    if j3 is not None:
        offset += _step(j3, i, mask, SHAPE, STRIDES[3], SIZES[3], EPILOGUE[3])
    return offset


@triton.jit
def gather(
    x, j0, j1, j2, j3, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, J_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SIZES: tl.constexpr, EPILOGUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). Indices that are not there are None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    offset = _steps(j0, j1, j2, j3, i, mask, SHAPE, J_STRIDES, SIZES, EPILOGUE)
    value = tl.load(x + walk(i, SHAPE, X_STRIDES) + offset, mask=mask, other=0)
    tl.store(y + walk(i, SHAPE, Y_STRIDES), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def scatter(
    x, j0, j1, j2, j3, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, J_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SIZES: tl.constexpr, EPILOGUE: tl.constexpr, JOIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of updates). JOIN: "none", "add", "max" or "min" with what lies there."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    offset = _steps(j0, j1, j2, j3, i, mask, SHAPE, J_STRIDES, SIZES, EPILOGUE)
    value = tl.load(x + walk(i, SHAPE, X_STRIDES), mask=mask, other=0).to(y.dtype.element_ty)
    target = y + walk(i, SHAPE, Y_STRIDES) + offset
    if JOIN == "add":
        tl.atomic_add(target, value, mask=mask)
    elif JOIN == "max":
        tl.atomic_max(target, value, mask=mask)
    elif JOIN == "min":
        tl.atomic_min(target, value, mask=mask)
    else:
        tl.store(target, value, mask=mask)
