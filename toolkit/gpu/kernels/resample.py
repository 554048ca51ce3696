"""Resampling along one or two dimensions, by tables of indices and weights.

    y[a, b] = sum_s sum_t weight_a[a, s] weight_b[b, t] x[index_a[a, s], index_b[b, t]]

The tables hold, for each index of the result, the indices of x under its taps and their weights:
one tap without weights is the nearest element. Where an index is -1 the result is EXTRAPOLATION.
Tables of a dynamic size hold the indices of the largest; they are clamped to the end of x.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.strided_rows import index_along, offsets


@triton.jit
def _load_index(index, mask, SIZE: tl.constexpr):
    """Return the index of x under a tap."""
    tap_index = tl.load(index, mask=mask, other=0)
    if SIZE is not None:
        tap_index = tl.where(tap_index < SIZE, tap_index, SIZE - 1)
    return tap_index


@triton.jit
def resample(
    x, index_a, weight_a, index_b, weight_b, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    DIM_A: tl.constexpr, STRIDE_A: tl.constexpr, TAPS_A: tl.constexpr, SIZE_A: tl.constexpr,
    DIM_B: tl.constexpr, STRIDE_B: tl.constexpr, TAPS_B: tl.constexpr, SIZE_B: tl.constexpr,
    EXTRAPOLATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). Without a second dimension index_b and weight_b are None.

    X_STRIDES is 0 in the dimensions A and B; STRIDE_A and STRIDE_B are the strides of x there,
    SIZE_A and SIZE_B its sizes where they are dynamic, else None.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    source = x + offsets(i, SHAPE, X_STRIDES)
    a = index_along(i, SHAPE, DIM_A) * TAPS_A
    outside = tl.load(index_a + a, mask=mask, other=0) < 0
    if index_b is not None:
        b = index_along(i, SHAPE, DIM_B) * TAPS_B
        outside = outside | (tl.load(index_b + b, mask=mask, other=0) < 0)
    inside = mask & (outside == 0)
    if weight_a is None:
        source += _load_index(index_a + a, inside, SIZE_A) * STRIDE_A
        if index_b is not None:
            source += _load_index(index_b + b, inside, SIZE_B) * STRIDE_B
        total = tl.load(source, mask=inside, other=0)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in range(TAPS_A * TAPS_B):
            at = a + tap // TAPS_B
            weight = tl.load(weight_a + at, mask=inside, other=0.0)
            tap_source = source + _load_index(index_a + at, inside, SIZE_A) * STRIDE_A
            if index_b is not None:
                at = b + tap % TAPS_B
                weight *= tl.load(weight_b + at, mask=inside, other=0.0)
                tap_source += _load_index(index_b + at, inside, SIZE_B) * STRIDE_B
            total += weight * tl.load(tap_source, mask=inside, other=0.0).to(tl.float32)
    if EXTRAPOLATION is not None:
        total = tl.where(outside, EXTRAPOLATION, total)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), total.to(y.dtype.element_ty), mask=mask)
