"""Direct convolution fused with max pooling, on channels-last tensors without a border.

    y[p, f] = EPILOGUE((max_t s[2 p + t - PAD, f] + bias[f]) scale[f])     t: the 3 x 3 of a window
    s[q, f] = sum_r sum_k x[q + r, k] w[f, r, k]                        q: a pixel of s

r is a row of taps and k what lies under it side by side, (tap column, channel). The stride of the
convolution is 1, that of the pooling 2; PAD is 0 or 1.

A block streams its rows of x and multiplies each once, by all rows of taps, into the accumulators
of TAPS rows of s. The oldest accumulator is complete then. The pooled row i needs the rows
2 i - PAD to 2 i - PAD + 2, the first of which is known from the pooled row before.

A block has SEGMENTS segments of 7 pooled pixels. Each needs 15 columns of s and computes 16:

    columns of s        0 1 2 3 4 5 6 7 8 9 a b c d e f
    pooled pixels       0 0 0 1 1 2 2 3 3 4 4 5 5 6 6       and 2 also 1, 4 also 2, ...

Columns outside s are the nearest inside, which is in the same window: the maximum is the same.

Products are (filter, pixel). A thread of the tensor cores has whole segments in its registers then,
if the pixels of a block are counted by (high bits of the segment, pair of columns, low two bits of
the segment, column of the pair): maxima move nothing between threads.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import add_product, store_with_epilogue

TAPS: tl.constexpr = tl.constexpr(4)  # rows of taps; absent rows have zero weights


@triton.jit
def conv_max_pool(
    x, weights, bias, scale, scalars, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    CONV_HEIGHT: tl.constexpr, CONV_WIDTH: tl.constexpr, FILTERS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, W_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of segments, blocks of ROWS pooled rows, blocks of filters)."""
    RUN: tl.constexpr = TAP_COLUMNS * CHANNELS
    ROW_SEGMENTS: tl.constexpr = (OUT_WIDTH + 6) // 7  # segments
    ROW: tl.constexpr = WIDTH * CHANNELS
    LOWEST: tl.constexpr = -2147483648 if scale is not None else float("-inf")
    ACCUMULATOR: tl.constexpr = tl.int32 if scale is not None else tl.float32
    OVERHANG: tl.constexpr = (
        2 * OUT_HEIGHT - PAD_TOP >= CONV_HEIGHT
    )  # the last window crosses the edge

    n = tl.arange(0, 16 * SEGMENTS)
    segments = batch * ROW_SEGMENTS
    segment = tl.minimum(tl.program_id(0) * SEGMENTS + n // 64 * 4 + n // 2 % 4, segments - 1)
    column = segment % ROW_SEGMENTS * 14 - PAD_LEFT + n % 64 // 8 * 2 + n % 2
    column = tl.minimum(tl.maximum(column, 0), CONV_WIDTH - 1)
    k = tl.arange(0, BLOCK_K)
    in_bounds = (k < RUN)[None, :]
    a = x + ((segment // ROW_SEGMENTS * HEIGHT * WIDTH + column) * CHANNELS)[:, None] + k[None, :]

    tap = tl.arange(0, TAPS * BLOCK_F) // BLOCK_F
    owner = tl.program_id(2) * BLOCK_F + tl.arange(0, TAPS * BLOCK_F) % BLOCK_F
    present = ((tap < TAP_ROWS) & (owner < FILTERS))[:, None] & in_bounds
    b = weights + (owner * W_PITCH + tap * RUN)[:, None] + k[None, :]
    w = tl.load(b, mask=present, other=0)

    m = tl.arange(0, 8 * SEGMENTS)  # pooled pixels of the segments, and one more in each
    segment = tl.program_id(0) * SEGMENTS + m // 8
    column = segment % ROW_SEGMENTS * 7 + m % 8
    pixels = batch * OUT_HEIGHT * OUT_WIDTH
    in_bounds_y = (segment < segments) & (column < OUT_WIDTH) & (m % 8 < 7)
    p = tl.where(in_bounds_y, segment // ROW_SEGMENTS * (OUT_HEIGHT * OUT_WIDTH) + column, pixels)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)

    first = tl.program_id(1) * ROWS
    top = 2 * first - PAD_TOP
    none = tl.zeros((BLOCK_F, 16 * SEGMENTS), ACCUMULATOR)
    s1 = none
    s2 = none
    s3 = none
    last = none
    for i in tl.static_range(TAPS):
        taps = _load_taps(a, in_bounds, top + i, HEIGHT, ROW, RUN == BLOCK_K)
        s1, s2, s3, last = _accumulate_row(none, s1, s2, s3, w, taps, PRECISION)
    if top < 0:
        last = tl.full((BLOCK_F, 16 * SEGMENTS), LOWEST, ACCUMULATOR)
    for row in tl.range(first, tl.minimum(first + ROWS, OUT_HEIGHT), num_stages=STAGES):
        top = 2 * row - PAD_TOP
        taps = _load_taps(a, in_bounds, top + TAPS, HEIGHT, ROW, RUN == BLOCK_K)
        s1, s2, s3, middle = _accumulate_row(none, s1, s2, s3, w, taps, PRECISION)
        taps = _load_taps(a, in_bounds, top + TAPS + 1, HEIGHT, ROW, RUN == BLOCK_K)
        if OVERHANG:
            middle = tl.where(top + 1 < CONV_HEIGHT, middle, last)
        maxima = _nan_max(last, middle)
        s1, s2, s3, last = _accumulate_row(none, s1, s2, s3, w, taps, PRECISION)
        if OVERHANG:
            maxima = _nan_max(maxima, tl.where(top + 2 < CONV_HEIGHT, last, maxima))
        else:
            maxima = _nan_max(maxima, last)
        maxima = tl.trans(_largest_of_segments(maxima, SEGMENTS))
        q = p + row * OUT_WIDTH
        store_with_epilogue(
            maxima, bias, scale, None, y, q, f, pixels, FILTERS, Y_PITCH, EPILOGUE, scalars
        )  # fmt: skip


@triton.jit
def _load_taps(
    a, in_bounds, row, HEIGHT: tl.constexpr, ROW: tl.constexpr, FULL_BLOCK: tl.constexpr
):  # fmt: skip
    """Load the inputs under a row of taps, (k, pixel); rows outside x are clamped."""
    row_start = a + tl.minimum(tl.maximum(row, 0), HEIGHT - 1) * ROW
    if FULL_BLOCK:
        taps = tl.load(row_start)
    else:
        taps = tl.load(row_start, mask=in_bounds, other=0)
    return tl.trans(taps)


@triton.jit
def _accumulate_row(none, s1, s2, s3, w, taps, PRECISION: tl.constexpr):
    """Add the products of all rows of taps to the accumulators of the last four rows of s.

    s1, s2, s3 already contain one, two and three rows of taps. One MMA computes all products.
    """
    F: tl.constexpr = s1.shape[0]
    N: tl.constexpr = s1.shape[1]
    sums = tl.permute(tl.join(tl.join(none, s2), tl.join(s1, s3)), (2, 3, 0, 1))
    sums = add_product(tl.reshape(sums, (4 * F, N)), w, taps, PRECISION)
    even, odd = tl.split(tl.permute(tl.reshape(sums, (2, 2, F, N)), (2, 3, 0, 1)))
    s1, s3 = tl.split(even)
    s2, s4 = tl.split(odd)
    return s1, s2, s3, s4


@triton.jit
def _nan_max(a, b):
    """Return the element-wise maximum; NaN propagates, as in ONNX."""
    if a.dtype.is_int():
        result = tl.maximum(a, b)
    else:
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def _largest_of_segments(s, SEGMENTS: tl.constexpr):
    """Return (filter, 8 SEGMENTS) maxima of columns 2 i, 2 i + 1, 2 i + 2; the eighth is none.

    Splits and joins name registers.
    """
    even, odd = tl.split(tl.reshape(s, (s.shape[0], 8 * SEGMENTS, 2)))
    pair = _nan_max(even, odd)
    _, e1, e2, e3, e4, e5, e6, e7 = _columns(even, SEGMENTS)
    p0, p1, p2, p3, p4, p5, p6, p7 = _columns(pair, SEGMENTS)
    low = tl.join(
        tl.join(_nan_max(p0, e1), _nan_max(p2, e3)), tl.join(_nan_max(p1, e2), _nan_max(p3, e4))
    )
    high = tl.join(tl.join(_nan_max(p4, e5), _nan_max(p6, e7)), tl.join(_nan_max(p5, e6), p7))
    joined = tl.permute(tl.join(low, high), (0, 1, 2, 5, 3, 4))
    return tl.reshape(joined, (s.shape[0], 8 * SEGMENTS))


@triton.jit
def _columns(s, SEGMENTS: tl.constexpr):
    """Return (filter, 8 SEGMENTS), counted as the pixels of a block, by pair of columns."""
    s = tl.reshape(s, (s.shape[0], SEGMENTS // 4, 2, 2, 2, 4))
    low, high = tl.split(tl.permute(s, (0, 1, 5, 3, 4, 2)))
    low_even, low_odd = tl.split(low)
    high_even, high_odd = tl.split(high)
    c0, c2 = tl.split(low_even)
    c1, c3 = tl.split(low_odd)
    c4, c6 = tl.split(high_even)
    c5, c7 = tl.split(high_odd)
    return c0, c1, c2, c3, c4, c5, c6, c7
