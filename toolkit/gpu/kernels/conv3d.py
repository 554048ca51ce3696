"""Convolution over one to three dimensions, and its transposition, on channels-last tensors.

    y[p, f] = STEPS(sum_k a[p, k] w[f, k] + bias[f], residual[p, f])

Row p is an output place (image, depth, row, column), column f a filter. k runs over (tap, channel)
of one group, and a[p, k] is the input under that tap, 0 outside of it. In each dimension the tap t
of output o lies at

    o STRIDE - PAD + t DILATION

A transposed convolution writes each input under all of its taps, so output o reads those inputs i
and taps for which o = i STRIDE - PAD + tap. With o = STRIDE q + phase these are

    i = q + (phase + PAD) // STRIDE - t,    tap = (phase + PAD) % STRIDE + t STRIDE

so each phase is a convolution of its own, with weights of its own: [phase, group, filter, t,
channel]. Other convolutions have one phase. The dilation of a transposed one lies in its weights.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, load_residual, store_with_epilogue


@triton.jit
def conv3d(
    x, weights, bias, residual, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr, FILTERS: tl.constexpr,
    X_STRIDES: tl.constexpr,
    W_PHASE: tl.constexpr, W_GROUP: tl.constexpr, W_PITCH: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of places x blocks of filters, groups, phases).

    Tuples are of (depth, row, column); X_STRIDES are those of images and of these three.
    """
    FILTER_BLOCKS: tl.constexpr = (FILTERS + BLOCK_N - 1) // BLOCK_N
    LENGTH: tl.constexpr = TAPS[0] * TAPS[1] * TAPS[2] * CHANNELS
    tile = tl.program_id(0)  # neighbours share the places: the input stays in the cache
    group = tl.program_id(1)
    phase = tl.program_id(2)
    p = tile // FILTER_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile % FILTER_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)

    q, w, out_w = _along(p, phase, 2, OUT, STRIDE, PAD, TRANSPOSED)
    phase = phase // STRIDE[2]
    q, h, out_h = _along(q, phase, 1, OUT, STRIDE, PAD, TRANSPOSED)
    phase = phase // STRIDE[1]
    image, d, out_d = _along(q, phase, 0, OUT, STRIDE, PAD, TRANSPOSED)
    written = (image < batch) & (out_d < OUT[0]) & (out_h < OUT[1]) & (out_w < OUT[2])

    x += group * CHANNELS
    weights += tl.program_id(2) * W_PHASE + group * W_GROUP
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, LENGTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tap = k // CHANNELS
        at_d = d[:, None] + (tap // (TAPS[1] * TAPS[2]) * DILATION[0])[None, :]
        at_h = h[:, None] + (tap // TAPS[2] % TAPS[1] * DILATION[1])[None, :]
        at_w = w[:, None] + (tap % TAPS[2] * DILATION[2])[None, :]
        inside = (at_d >= 0) & (at_d < SIZE[0]) & (at_h >= 0) & (at_h < SIZE[1])
        inside = inside & (at_w >= 0) & (at_w < SIZE[2])
        inside = inside & written[:, None] & (k < LENGTH)[None, :]
        place = image[:, None] * X_STRIDES[0] + at_d * X_STRIDES[1] + at_h * X_STRIDES[2]
        place += at_w * X_STRIDES[3] + (k % CHANNELS)[None, :]
        a = tl.load(x + place, mask=inside, other=0)
        present = (k < LENGTH)[:, None] & (f < FILTERS)[None, :]
        b = tl.load(weights + f[None, :] * W_PITCH + k[:, None], mask=present, other=0)
        total = add_product(total, a, b, PRECISION)

    if bias is not None:
        bias += group * FILTERS
    if residual is not None:
        residual += group * FILTERS
    y += group * FILTERS
    rows = batch * OUT[0] * OUT[1] * OUT[2]
    row = ((image * OUT[0] + out_d) * OUT[1] + out_h) * OUT[2] + out_w
    row = tl.where(written, row, rows)  # past the last one: not stored
    residual = load_residual(residual, row, f, rows, FILTERS, R_PITCH)
    store_with_epilogue(total, bias, None, residual, y, row, f, rows, FILTERS, Y_PITCH, EPILOGUE)


@triton.jit
def _along(
    p, phase, AT: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return what is left of p, where its first tap lies, and which output it is."""
    if TRANSPOSED:
        own = phase % STRIDE[AT]
        count = (OUT[AT] + STRIDE[AT] - 1) // STRIDE[AT]
        q = p % count
        first = q + (own + PAD[AT]) // STRIDE[AT]
        out = q * STRIDE[AT] + own
    else:
        count = OUT[AT]
        out = p % count
        first = out * STRIDE[AT] - PAD[AT]
    return p // count, first, out
