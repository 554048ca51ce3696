"""Depthwise convolution: each channel has its own filter, NHWC.

    y[p, c] = EPILOGUE((sum_t a[p, t, c] w[t, c] + bias[c]) scale[c], residual[p, c])

p is an output pixel, c a channel, t a tap; a[p, t, c] is the input under the tap, 0 outside the
image. This is no GEMM: instructions bound it. So a thread computes VECTOR channels of a patch of
ROWS x COLUMNS pixels, and loads and converts each input of the patch once, row by row.

Weights are [tap row, tap column, channel], float32, with channels up to a multiple of VECTOR.
INT8 products of fewer than 1024 taps are exact sums in FP32.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.int8 import as_float


@triton.jit
def depthwise(
    x, weights, bias, scale, scalars, residual, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK patches of VECTOR channels)."""
    WHOLE: tl.constexpr = CHANNELS % VECTOR == 0
    PITCH: tl.constexpr = (CHANNELS + VECTOR - 1) // VECTOR * VECTOR
    c, image, row, column = patch_position(OUT, CHANNELS, ROWS, COLUMNS, VECTOR, BLOCK)
    # Beyond the last image every row is outside.
    top = tl.where(image < batch, row * STRIDE[0] - PAD[0], -(2**24))
    left = column * STRIDE[1] - PAD[1]
    corner = (image * SIZE[0] + row * STRIDE[0] - PAD[0]) * SIZE[1] + left
    x += (corner * X_PITCH)[:, None] + c
    weights += c

    totals = (tl.zeros((BLOCK, VECTOR), tl.float32),) * (ROWS * COLUMNS)
    if TAPS[0] * TAPS[1] < 50:
        for under in tl.static_range((ROWS - 1) * STRIDE[0] + (TAPS[0] - 1) * DILATION[0] + 1):
            if _is_read(under, ROWS, STRIDE[0], TAPS[0], DILATION[0]):
                row_inside = (top + under >= 0) & (top + under < SIZE[0])
                inputs = ()
                for aside in tl.static_range(
                    (COLUMNS - 1) * STRIDE[1] + (TAPS[1] - 1) * DILATION[1] + 1
                ):
                    inside = row_inside & (left + aside >= 0) & (left + aside < SIZE[1])
                    inside = inside[:, None] if WHOLE else inside[:, None] & (c < CHANNELS)
                    offset = (under * SIZE[1] + aside) * X_PITCH
                    inputs = inputs + (as_float(tl.load(x + offset, mask=inside, other=0)),)
                totals = _add_row(
                    totals, inputs, weights, under, PITCH, TAPS, STRIDE, DILATION, ROWS, COLUMNS
                )
    else:  # unrolling thousands of taps takes minutes to compile
        tl.static_assert(ROWS * COLUMNS == 1, "large windows compute one pixel")
        total = tl.zeros((BLOCK, VECTOR), tl.float32 if scale is None else tl.int32)
        totals = (
            _add_window(
                total, x, weights, c, top, left, SIZE, CHANNELS, X_PITCH, PITCH, TAPS, DILATION
            ),
        )

    shift, factor = 0.0, 1.0
    if bias is not None:
        shift = tl.load(bias + c, mask=c < CHANNELS, other=0)
    if scale is not None:
        factor = tl.load(scale + c, mask=c < CHANNELS, other=0.0)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            total = totals[i * COLUMNS + j]
            if scale is not None:  # INT8: the bias may pass what FP32 counts
                total = (total.to(tl.int32) + shift).to(tl.float32) * factor
            else:
                total = total + shift
            store_pixel(
                total, residual, y, image, row + i, column + j, c, batch, OUT, CHANNELS, Y_PITCH,
                R_PITCH, EPILOGUE, scalars,
            )  # fmt: skip


@triton.jit
def patch_position(
    OUT: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the channels [thread, VECTOR] of a block's patches, their image, row and column."""
    CHANNEL_GROUPS: tl.constexpr = (CHANNELS + VECTOR - 1) // VECTOR
    patch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = (patch % CHANNEL_GROUPS * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    patches = (OUT[1] + COLUMNS - 1) // COLUMNS
    column = patch // CHANNEL_GROUPS % patches * COLUMNS
    line = patch // (CHANNEL_GROUPS * patches)
    lines = (OUT[0] + ROWS - 1) // ROWS
    return c, line // lines, line % lines * ROWS, column


@triton.jit
def store_pixel(
    value, residual, y, image, row, column, c, batch, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr, EPILOGUE: tl.constexpr, scalars,
):  # fmt: skip
    """Store EPILOGUE(value, residual) at a pixel of each patch, if it is in the image."""
    p = (image * OUT[0] + row) * OUT[1] + column
    inside = (image < batch) & (row < OUT[0]) & (column < OUT[1])
    inside = inside[:, None] & (c < CHANNELS)
    values = (value,)
    if residual is not None:
        residual_tile = tl.load(residual + (p * R_PITCH)[:, None] + c, mask=inside, other=0)
        values = values + (as_float(residual_tile),)
    DTYPE: tl.constexpr = y.dtype.element_ty
    result = evaluate(values, EPILOGUE, scalars, DTYPE).to(DTYPE)
    tl.store(y + (p * Y_PITCH)[:, None] + c, result, mask=inside)


@triton.jit
def _add_window(
    total, x, weights, c, top, left, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    X_PITCH: tl.constexpr, PITCH: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr,
):  # fmt: skip
    """Return `total` with the products under all taps, in a loop."""
    for tap in range(TAPS[0] * TAPS[1]):
        under = tap // TAPS[1] * DILATION[0]
        aside = tap % TAPS[1] * DILATION[1]
        inside = (top + under >= 0) & (top + under < SIZE[0])
        inside = inside & (left + aside >= 0) & (left + aside < SIZE[1])
        inside = inside[:, None] & (c < CHANNELS)
        a = tl.load(x + (under * SIZE[1] + aside) * X_PITCH, mask=inside, other=0)
        total += a.to(total.dtype) * tl.load(weights + tap * PITCH).to(total.dtype)
    return total


@triton.jit
def _add_row(
    totals, inputs, weights, under: tl.constexpr, PITCH: tl.constexpr, TAPS: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of an input row, `under` rows below the first, to each output."""
    sums = ()
    for i in tl.static_range(ROWS):
        if _is_tap_row(under - i * STRIDE[0], TAPS[0], DILATION[0]):
            taps = ()
            for tap in tl.static_range(TAPS[1]):
                at = (under - i * STRIDE[0]) // DILATION[0] * TAPS[1] + tap
                taps = taps + (tl.load(weights + at * PITCH),)
            for j in tl.static_range(COLUMNS):
                total = totals[i * COLUMNS + j]
                for tap in tl.static_range(TAPS[1]):
                    total = tl.fma(inputs[j * STRIDE[1] + tap * DILATION[1]], taps[tap], total)
                sums = sums + (total,)
        else:
            for j in tl.static_range(COLUMNS):
                sums = sums + (totals[i * COLUMNS + j],)
    return sums


@triton.constexpr_function
def _is_tap_row(below, taps, dilation):
    """Whether an input row `below` the first is under a tap of the filter."""
    return below >= 0 and below % dilation == 0 and below // dilation < taps


@triton.constexpr_function
def _is_read(under, rows, stride, taps, dilation):
    """Whether any output row of a patch reads an input row."""
    return any(_is_tap_row(under - i * stride, taps, dilation) for i in range(rows))
