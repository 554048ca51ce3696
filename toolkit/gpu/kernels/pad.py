"""Tensors with a border around them.

    y[i] = x[f(i - BEFORE)]       in each dimension that has a border                   pad

f keeps what is inside 0..SIZE-1. Outside it gives VALUE, or the index
    edge      0 or SIZE-1
    reflect   mirrored at the first and the last element, which are not repeated
    wrap      modulo SIZE

    y[n, i, j, dr, dc, c] = STEPS(x[n, c, 2 i + dr - TOP, 2 j + dc - LEFT])     pixel_blocks

with dr, dc = 0, 1 and c = 0..3; outside the picture, and for channels that it lacks, x is 0.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import index, walk


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
    DIMS: tl.constexpr, BEFORE: tl.constexpr, SIZES: tl.constexpr, EPILOGUE: tl.constexpr,
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
        source += c * EPILOGUE[d]
    value = tl.load(x + source, mask=inside, other=VALUE)
    tl.store(y + walk(i, SHAPE, Y_STRIDES), value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def space_to_depth(
    x, y, batch,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDES: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (groups of BLOCK blocks of pixels). STRIDES are those of x along n, c, row, column.

    STEPS make 0 of 0.
    """
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, 16)  # dr, dc, c: what a block holds
    image = block // (OUT_HEIGHT * OUT_WIDTH)
    row = (block // OUT_WIDTH % OUT_HEIGHT * 2 - TOP)[:, None] + (e // 8)[None, :]
    column = (block % OUT_WIDTH * 2 - LEFT)[:, None] + (e // 4 % 2)[None, :]
    channel = (e % 4)[None, :]
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    inside = inside & (channel < CHANNELS) & (image < batch)[:, None]
    place = image[:, None] * STRIDES[0] + channel * STRIDES[1]
    value = tl.load(x + place + row * STRIDES[2] + column * STRIDES[3], mask=inside, other=0)
    if value.dtype.is_floating():
        value = value.to(tl.float32)
    value = evaluate((value,), EPILOGUE)
    place = block[:, None] * 16 + e[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=(image < batch)[:, None])
