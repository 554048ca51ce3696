"""Element-wise expressions over tensors of any strides; copies and changes of layout too.

    y[i] = STEPS(x0[i], x1[i], x2[i], x3[i])

i runs over the output in the order of SHAPE. Each tensor has its own strides, in elements: 0
repeats it (broadcast, nearest-neighbour upscaling), others permute or slice it. So a change of
layout or type is an expression without steps.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.walk import walk


@triton.jit
def _read(x, i, mask, SHAPE: tl.constexpr, STRIDES: tl.constexpr):
    value = tl.load(x + walk(i, SHAPE, STRIDES), mask=mask, other=0)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    return value


@triton.jit
def elementwise(
    x0, x1, x2, x3, y, elements,
    SHAPE: tl.constexpr, STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of elements). Operands that are not there are None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    v = (_read(x0, i, mask, SHAPE, STRIDES[0]),)
    if x1 is not None:
        v = v + (_read(x1, i, mask, SHAPE, STRIDES[1]),)
    if x2 is not None:
        v = v + (_read(x2, i, mask, SHAPE, STRIDES[2]),)
    if x3 is not None:
        v = v + (_read(x3, i, mask, SHAPE, STRIDES[3]),)
    result = evaluate(v, STEPS)
    tl.store(y + walk(i, SHAPE, Y_STRIDES), result.to(y.dtype.element_ty), mask=mask)
