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
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, FILTERS: tl.constexpr,
    STRIDES: tl.constexpr, W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixels). STRIDES are those of x along n, c, row, column; DEPTH is
    2**LEVELS, and BLOCK_N at least FILTERS.
    """
    p = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.arange(0, BLOCK_N)
    k = tl.arange(0, DEPTH)
    pixels = batch * OUT[0] * OUT[1]
    top = p // OUT[1] % OUT[0] * STRIDE[0] - PAD[0]
    left = p % OUT[1] * STRIDE[1] - PAD[1]
    x += p // (OUT[0] * OUT[1]) * STRIDES[0] + top * STRIDES[2] + left * STRIDES[3]

    elements = ()
    for i in tl.static_range(DEPTH):
        if i < TAPS[0] * TAPS[1] * CHANNELS:
            row = i // (TAPS[1] * CHANNELS) * DILATION[0]
            column = i // CHANNELS % TAPS[1] * DILATION[1]
            inside = (top + row >= 0) & (top + row < SIZE[0]) & (p < pixels)
            inside = inside & (left + column >= 0) & (left + column < SIZE[1])
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
