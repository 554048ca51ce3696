"""Tensors resampled along one or two dimensions, by tables of places and weights.

    y[a, b] = sum_s sum_t wa[a, s] wb[b, t] x[ja[a, s], jb[b, t]]

The tables hold, for each index of the result, the indices of x under its taps and their weights:
one tap without weights is the nearest element. Where a place is -1 the result is OUTSIDE. Tables
of a dynamic size hold the places of the largest; those beyond the end of x are its last index.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import index, walk


@triton.jit
def _read(j, mask, SIZE: tl.constexpr):
    """Return the index under a tap."""
    found = tl.load(j, mask=mask, other=0)
    if SIZE is not None:
        found = tl.where(found < SIZE, found, SIZE - 1)
    return found


@triton.jit
def resample(
    x, ja, wa, jb, wb, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    DIM_A: tl.constexpr, STEP_A: tl.constexpr, TAPS_A: tl.constexpr, SIZE_A: tl.constexpr,
    DIM_B: tl.constexpr, STEP_B: tl.constexpr, TAPS_B: tl.constexpr, SIZE_B: tl.constexpr,
    OUTSIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). Without a second dimension jb and wb are None.

    X_STRIDES is 0 in the dimensions A and B; STEP_A and STEP_B are the strides of x there, SIZE_A
    and SIZE_B its sizes where they are dynamic, else None.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    source = x + walk(i, SHAPE, X_STRIDES)
    a = index(i, SHAPE, DIM_A) * TAPS_A
    outside = tl.load(ja + a, mask=mask, other=0) < 0
    if jb is not None:
        b = index(i, SHAPE, DIM_B) * TAPS_B
        outside = outside | (tl.load(jb + b, mask=mask, other=0) < 0)
    inside = mask & (outside == 0)
    if wa is None:
        source += _read(ja + a, inside, SIZE_A) * STEP_A
        if jb is not None:
            source += _read(jb + b, inside, SIZE_B) * STEP_B
        total = tl.load(source, mask=inside, other=0)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in range(TAPS_A * TAPS_B):
            at = a + tap // TAPS_B
            weight = tl.load(wa + at, mask=inside, other=0.0)
            tapped = source + _read(ja + at, inside, SIZE_A) * STEP_A
            if jb is not None:
                at = b + tap % TAPS_B
                weight *= tl.load(wb + at, mask=inside, other=0.0)
                tapped += _read(jb + at, inside, SIZE_B) * STEP_B
            total += weight * tl.load(tapped, mask=inside, other=0.0).to(tl.float32)
    if OUTSIDE is not None:
        total = tl.where(outside, OUTSIDE, total)
    tl.store(y + walk(i, SHAPE, Y_STRIDES), total.to(y.dtype.element_ty), mask=mask)
