"""Padding, and the space-to-depth of first convolutions.

    y[i] = x[f(i - BEFORE)]       in each padded dimension                   pad

f is the identity in 0..SIZE-1. Outside, y is VALUE, or f gives by MODE
    edge      0 or SIZE-1
    reflect   the index mirrored at the first and the last element, which are not repeated
    wrap      the index modulo SIZE

    y[n, i, j, dr, dc, c] = EPILOGUE(x[n, c, 2 i + dr - TOP, 2 j + dc - LEFT])     space_to_depth

with dr, dc = 0, 1 and c = 0..3; outside the image and beyond its channels x is 0.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import index_along, inner_index, offsets


@triton.jit
def pad(
    x, y, elements,
    SHAPE: tl.constexpr, X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    DIMS: tl.constexpr, BEFORE: tl.constexpr, SIZES: tl.constexpr, BORDER_STRIDES: tl.constexpr,
    MODE: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of results).

    DIMS: the padded dimensions, BEFORE, SIZES and BORDER_STRIDES: their padding, and sizes and
    strides of x. X_STRIDES is 0 in these dimensions.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    inside = mask
    source = offsets(i, SHAPE, X_STRIDES)
    for d in tl.static_range(len(DIMS)):
        c = inner_index(index_along(i, SHAPE, DIMS[d]) - BEFORE[d], SIZES[d], MODE, 1)
        inside = inside & (c >= 0) & (c < SIZES[d])
        source += c * BORDER_STRIDES[d]
    value = tl.load(x + source, mask=inside, other=VALUE)
    tl.store(y + offsets(i, SHAPE, Y_STRIDES), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def space_to_depth(
    x, y, batch,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDES: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of BLOCK 2x2 pixel blocks). STRIDES: of x along n, c, row, column.

    EPILOGUE maps 0 to 0.
    """
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, 16)  # (dr, dc, c) within a block
    image = block // (OUT_HEIGHT * OUT_WIDTH)
    row = (block // OUT_WIDTH % OUT_HEIGHT * 2 - TOP)[:, None] + (e // 8)[None, :]
    column = (block % OUT_WIDTH * 2 - LEFT)[:, None] + (e // 4 % 2)[None, :]
    channel = (e % 4)[None, :]
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    inside = inside & (channel < CHANNELS) & (image < batch)[:, None]
    offset = image[:, None] * STRIDES[0] + channel * STRIDES[1]
    value = tl.load(x + offset + row * STRIDES[2] + column * STRIDES[3], mask=inside, other=0)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    value = evaluate((value,), EPILOGUE)
    offset = block[:, None] * 16 + e[None, :]
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=(image < batch)[:, None])
