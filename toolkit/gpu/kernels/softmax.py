"""Softmax along rows that lie in one piece.

y[r, i] = exp(x[r, i] - max_j x[r, j]) / sum_j exp(x[r, j] - max_j x[r, j])
"""

import triton
import triton.language as tl


@triton.jit
def softmax(x, y, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows). BLOCK is a power of two that holds a row."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * COLUMNS + i, mask=i < COLUMNS, other=float("-inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 0))
    result = powers / tl.sum(powers, 0)
    tl.store(y + row * COLUMNS + i, result.to(y.dtype.element_ty), mask=i < COLUMNS)
