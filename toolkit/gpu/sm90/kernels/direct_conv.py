"""Direct convolution of an image with few channels, as a first layer has.

    y[p, f] = EPILOGUE((sum_k PROLOGUE(a[p, k]) w[f, k] + bias[f]) scale[f])

Row p is an output pixel, f a filter; k runs over (tap row, tap column, channel), and a[p, k] is the
image under that tap, 0 outside it, with any strides. A thread loads the elements of its pixels one
by one, neighbouring threads from neighbouring addresses, and joins them to a row of the A operand.
DEPTH is their count rounded up, with zero weights. PROLOGUE maps 0 to 0. INT8 operands have INT32
accumulators and a scale; others have no scale.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, evaluate, store_with_epilogue


@triton.jit
def direct_conv(
    x, weights, bias, scale, scalars, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, STRIDES: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, FILTERS: tl.constexpr,
    W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels). STRIDES are those of x along n, c, row, column; DEPTH is
    2**LEVELS, and BLOCK_N at least FILTERS.
    """
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.arange(0, BLOCK_N)
    k = tl.arange(0, DEPTH)
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    top = p // OUT_WIDTH % OUT_HEIGHT * STRIDE_H - PAD_TOP
    left = p % OUT_WIDTH * STRIDE_W - PAD_LEFT
    x += p // (OUT_HEIGHT * OUT_WIDTH) * STRIDES[0] + top * STRIDES[2] + left * STRIDES[3]

    elements = ()
    for i in tl.static_range(DEPTH):
        if i < TAP_ROWS * TAP_COLUMNS * CHANNELS:
            row = i // (TAP_COLUMNS * CHANNELS) * DILATION_H
            column = i // CHANNELS % TAP_COLUMNS * DILATION_W
            inside = (top + row >= 0) & (top + row < HEIGHT) & (p < pixels)
            inside = inside & (left + column >= 0) & (left + column < WIDTH)
            address = x + (i % CHANNELS * STRIDES[1] + row * STRIDES[2] + column * STRIDES[3])
            elements = elements + (tl.load(address, mask=inside, other=0).to(tl.float32),)
        else:
            elements = elements + (tl.zeros((BLOCK_M,), tl.float32),)
    for level in tl.static_range(LEVELS):  # elements 2**(LEVELS - 1) apart, ..., 1 apart
        pairs = ()
        for i in tl.static_range(DEPTH >> (level + 1)):
            pairs = pairs + (tl.join(elements[i], elements[i + (DEPTH >> (level + 1))]),)
        elements = pairs
    a = evaluate((elements[0].reshape(BLOCK_M, DEPTH),), PROLOGUE).to(weights.dtype.element_ty)
    b = tl.load(weights + f[None, :] * W_PITCH + k[:, None], mask=(f < FILTERS)[None, :], other=0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if scale is None else tl.int32)
    total = add_product(total, a, b, PRECISION)
    store_with_epilogue(
        total, bias, scale, None, y, p, f, pixels, FILTERS, Y_PITCH, EPILOGUE, scalars
    )
