"""A camera's frame as the input of a network: resized, padded, normalised and laid out at once.

    y[c, i, j] = FACTORS[c] p[CHANNELS[c], i - pad_y, j - pad_x] - SHIFTS[c]    within the picture
    y[c, i, j] = BORDER[c]                                                      around it

p: the frame resized to inner_height x inner_width. The pixel i of the result lies at
s = (i + 1/2) size / inner - 1/2 of the frame, between its pixels floor(s) and floor(s) + 1. All of
that is arithmetic of integers, with weights of 11 bits as OpenCV has them (INTER_LINEAR on bytes),
so that every processor gives the same bits.

PIXELS "bgr": rows of B, G, R. "nv12": rows of luma, then rows of chroma pairs U, V of 2 x 2 pixels,
by ITU-R BT.601 with OpenCV's factors of 20 bits.
"""

import triton
import triton.language as tl


@triton.jit
def _between(i, size, inner):
    """Return the two pixels of the frame at a place of the result, and the weight of the second."""
    place = (2 * i + 1) * size - inner
    place = tl.where(place < 0, 0, place)
    first = place // (2 * inner)
    weight = ((place - first * 2 * inner) * 1024 + inner // 2) // inner
    weight = tl.where(first >= size - 1, 0, weight)
    first = tl.where(first >= size - 1, size - 1, first)
    second = tl.where(first >= size - 1, first, first + 1)
    return first, second, weight


@triton.jit
def _byte(value):
    return tl.where(value < 0, 0, tl.where(value > 255, 255, value))


@triton.jit
def _pixel(frame, row, column, stride, chroma, mask, PIXELS: tl.constexpr):
    """Return blue, green and red of a pixel, int32; `chroma`: bytes before its plane."""
    if PIXELS == "bgr":
        at = frame + row * stride + column * 3
        blue = tl.load(at, mask=mask, other=0).to(tl.int32)
        green = tl.load(at + 1, mask=mask, other=0).to(tl.int32)
        red = tl.load(at + 2, mask=mask, other=0).to(tl.int32)
    else:
        luma = tl.load(frame + row * stride + column, mask=mask, other=0).to(tl.int32)
        at = frame + chroma + row // 2 * stride + column // 2 * 2
        u = tl.load(at, mask=mask, other=0).to(tl.int32) - 128
        v = tl.load(at + 1, mask=mask, other=0).to(tl.int32) - 128
        luma = tl.where(luma < 16, 0, luma - 16) * 1220542 + 524288
        blue = _byte((luma + 2116026 * u) >> 20)
        green = _byte((luma - 852492 * v - 409993 * u) >> 20)
        red = _byte((luma + 1673527 * v) >> 20)
    return blue, green, red


@triton.jit
def _mixed(a, b, c, d, across, down):
    """Return the byte between four, as OpenCV rounds it; weights of the second of two, 0 to 2048.

    a b   above
    c d   below
    """
    above = a * (2048 - across) + b * across
    below = c * (2048 - across) + d * across
    return (((above >> 4) * (2048 - down) >> 16) + ((below >> 4) * down >> 16) + 2) >> 2


@triton.jit
def frame_to_input(
    frame, y, width, height, stride, chroma, inner_width, inner_height, pad_x, pad_y,
    PIXELS: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    Y_STRIDES: tl.constexpr, CHANNELS: tl.constexpr,
    FACTORS: tl.constexpr, SHIFTS: tl.constexpr, BORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels of the result).

    `stride`: bytes of a row of the frame. Y_STRIDES: of y along channel, row and column. CHANNELS:
    0 blue, 1 green, 2 red, 3 grey.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < OUT_WIDTH * OUT_HEIGHT
    row = i // OUT_WIDTH - pad_y
    column = i % OUT_WIDTH - pad_x
    inside = (row >= 0) & (row < inner_height) & (column >= 0) & (column < inner_width) & mask
    row_a, row_b, down = _between(tl.where(inside, row, 0), height, inner_height)
    column_a, column_b, across = _between(tl.where(inside, column, 0), width, inner_width)
    b0, g0, r0 = _pixel(frame, row_a, column_a, stride, chroma, inside, PIXELS)
    b1, g1, r1 = _pixel(frame, row_a, column_b, stride, chroma, inside, PIXELS)
    b2, g2, r2 = _pixel(frame, row_b, column_a, stride, chroma, inside, PIXELS)
    b3, g3, r3 = _pixel(frame, row_b, column_b, stride, chroma, inside, PIXELS)
    blue = _mixed(b0, b1, b2, b3, across, down)
    green = _mixed(g0, g1, g2, g3, across, down)
    red = _mixed(r0, r1, r2, r3, across, down)
    out = y + i // OUT_WIDTH * Y_STRIDES[1] + i % OUT_WIDTH * Y_STRIDES[2]
    for c in tl.static_range(len(CHANNELS)):
        if CHANNELS[c] == 0:
            value = blue
        elif CHANNELS[c] == 1:
            value = green
        elif CHANNELS[c] == 2:
            value = red
        else:
            value = (3735 * blue + 19235 * green + 9798 * red + 16384) >> 15
        number = value.to(tl.float32) * FACTORS[c] - SHIFTS[c]
        number = tl.where(inside, number, BORDER[c])
        tl.store(out + c * Y_STRIDES[0], number.to(y.dtype.element_ty), mask=mask)
