"""Tensors with a border around them.

    y[i] = x[f(i - BEFORE)]       in each dimension that has a border

f keeps what is inside 0..SIZE-1. Outside it gives VALUE, or the index
    edge      0 or SIZE-1
    reflect   mirrored at the first and the last element, which are not repeated
    wrap      modulo SIZE
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.walk import index, walk


@triton.jit
def _mapped(c, SIZE: tl.constexpr, MODE: tl.constexpr):
    if MODE == "edge":
        c = tl.where(c < 0, 0, tl.where(c >= SIZE, SIZE - 1, c))
    elif MODE == "wrap":
        c = (c % SIZE + SIZE) % SIZE
    elif MODE == "reflect":
        period = 2 * SIZE - 2 + (SIZE == 1)
        c = (c % period + period) % period
        c = tl.where(c >= SIZE, period - c, c)
    return c


@triton.jit
def pad(
    x, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    DIMS: tl.constexpr, BEFORE: tl.constexpr, SIZES: tl.constexpr, STEPS: tl.constexpr,
    MODE: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results). DIMS have borders: BEFORE, sizes and strides of x; X_STRIDES is 0
    there.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    inside = mask
    source = walk(i, SHAPE, X_STRIDES)
    for d in tl.static_range(len(DIMS)):
        c = _mapped(index(i, SHAPE, DIMS[d]) - BEFORE[d], SIZES[d], MODE)
        inside = inside & (c >= 0) & (c < SIZES[d])
        source += c * STEPS[d]
    value = tl.load(x + source, mask=inside, other=VALUE)
    tl.store(y + walk(i, SHAPE, Y_STRIDES), value.to(y.dtype.element_ty), mask=mask)
