"""cost[n, d, y, x] = mean over c of left[n, c, y, x] * right[n, c, y, x - d], in Triton."""
# ruff: noqa: ANN001, ANN201, N803, PLR0917

import triton
import triton.language as tl


@triton.jit
def cost_volume(
    left,
    right,
    cost,
    height,
    width,
    DISPARITIES: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block makes COLUMNS pixels of a row for all d: what it reads of `left` stays in cache."""
    x = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    y = tl.program_id(1)
    n = tl.program_id(2)
    inside = x < width
    row = (n * CHANNELS * height + y) * width + x
    for d in range(DISPARITIES):
        total = tl.zeros((COLUMNS,), tl.float32)
        for c in range(CHANNELS):
            at = row + c * height * width
            a = tl.load(left + at, inside, 0.0).to(tl.float32)
            b = tl.load(right + at - d, inside & (x >= d), 0.0).to(tl.float32)
            total += a * b
        to = ((n * DISPARITIES + d) * height + y) * width + x
        tl.store(cost + to, (total / CHANNELS).to(cost.dtype.element_ty), inside)
