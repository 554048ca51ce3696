"""Images, or volumes, sampled at the points of a grid (ONNX, operator GridSample).

    y[p] = sum over taps t of  w(c - t) x[f(t)],   c = (g[p] + 1) (SIZE - 1) / 2       ALIGN
                                                   c = ((g[p] + 1) SIZE - 1) / 2       else

in each dimension: the taps are the integers next to c, w is 1 for the nearest, 1 - |d|, or the
cubic of R. Keys (1981) with a = -0.75. Outside, f reflects, clamps, or skips the tap (PADDING).
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.functions import round_half_even
from toolkit.gpu.kernels.strided_rows import inner_index, offsets


@triton.jit
def _coordinate(g, SIZE: tl.constexpr, ALIGN: tl.constexpr, MODE: tl.constexpr):
    if ALIGN:
        c = 0.5 * (g + 1.0) * (SIZE - 1)
    else:
        c = 0.5 * ((g + 1.0) * SIZE - 1.0)
    c = tl.where(tl.abs(c) < 1e6, c, -1e6)  # a number that has an integer; NaN has none
    if MODE == "nearest":
        c = round_half_even(c)
    return c


@triton.jit
def _weight(d, MODE: tl.constexpr):
    d = tl.abs(d)
    if MODE == "nearest":
        w = tl.zeros_like(d) + 1.0
    elif MODE == "linear":
        w = 1.0 - d
    else:
        near = (1.25 * d - 2.25) * d * d + 1.0
        far = -0.75 * (((d - 5.0) * d + 8.0) * d - 4.0)
        w = tl.where(d <= 1.0, near, far)
    return w


@triton.jit
def grid_sample(
    x, points, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, POINT_STRIDES: tl.constexpr,
    Y_STRIDES: tl.constexpr,
    SIZES: tl.constexpr, SPATIAL_STRIDES: tl.constexpr, COORDINATE_STRIDE: tl.constexpr,
    MODE: tl.constexpr, PADDING: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results).

    SIZES and SPATIAL_STRIDES are of the spatial dimensions of x. The coordinates of a point are
    COORDINATE_STRIDE apart, that of the last dimension first.
    """
    DIMS: tl.constexpr = len(SIZES)
    TAPS: tl.constexpr = 1 if MODE == "nearest" else 2 if MODE == "linear" else 4
    FIRST: tl.constexpr = -1 if MODE == "cubic" else 0
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    source = x + offsets(i, SHAPE, X_STRIDES)
    point = points + offsets(i, SHAPE, POINT_STRIDES)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in range(TAPS**DIMS):
        weight = tl.zeros((BLOCK,), tl.float32) + 1.0
        offset = tl.zeros((BLOCK,), tl.int32)
        inside = mask
        remaining = tap
        for back in tl.static_range(DIMS):
            g = tl.load(point + back * COORDINATE_STRIDE, mask=mask, other=0.0).to(tl.float32)
            c = _coordinate(g, SIZES[DIMS - 1 - back], ALIGN, MODE)
            t = tl.floor(c).to(tl.int32) + remaining % TAPS + FIRST
            weight *= _weight(c - t.to(tl.float32), MODE)
            t = inner_index(t, SIZES[DIMS - 1 - back], PADDING, 1 if ALIGN else 0)
            inside = inside & (t >= 0) & (t < SIZES[DIMS - 1 - back])
            offset += t * SPATIAL_STRIDES[DIMS - 1 - back]
            remaining = remaining // TAPS
        total += weight * tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), total.to(y.dtype.element_ty), mask=mask)
