"""Depthwise INT8 convolution, four products in one instruction (dp4a).

    y[p, c] = EPILOGUE((sum_t a[p, t, c] w[t, c] + bias[c]) scale[c], residual[p, c])

p is an output pixel, c a channel, t a tap; a[p, t, c] is the input under the tap, 0 outside the
image. `dp4a` adds the products of four INT8 pairs, packed into two INT32, to a sum. An input int8x4
is one channel of four adjacent pixels, from a column e that is a multiple of SPACING:

    input(e)[b] = a[e + b]

Activations are stored channel by channel: six PRMT pack four channels of two more pixels. A weight
int8x4 is four taps of a row. Where the first tap of an output is o columns after such an e:

    W[row, o, k][b] = w[row, 4 k + b - o], 0 where there is no such tap

A thread computes four channels of a patch of ROWS x COLUMNS pixels from inputs in registers.

Weights are [tap row, o, k, channel], INT32.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.depthwise import patch_position, store_pixel
from toolkit.gpu.kernels.int8 import FIRST_SM_WITH_DP4A, INTERPRETED, compiled_for


@triton.jit
def depthwise_int8(
    x, weights, bias, scale, scalars, residual, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPACING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK patches of four channels). CHANNELS is a multiple of 4."""
    PATCH_COLUMNS: tl.constexpr = (COLUMNS - 1) * STRIDE[1] + TAPS[1]  # input columns of a patch
    PATCH_ROWS: tl.constexpr = (ROWS - 1) * STRIDE[0] + TAPS[0]
    c, image, row, column = patch_position(OUT, CHANNELS, ROWS, COLUMNS, 4, BLOCK)
    # Beyond the last image every row is outside.
    top = tl.where(image < batch, row * STRIDE[0] - PAD[0], -(2**24))
    left = column * STRIDE[1] - PAD[1]
    corner = (image * SIZE[0] + row * STRIDE[0] - PAD[0]) * SIZE[1] + left
    x += (corner * X_PITCH)[:, None] + c

    inputs = ()
    for under in tl.static_range(PATCH_ROWS):
        inside = (top + under >= 0) & (top + under < SIZE[0])
        inputs = inputs + _pack_row(
            x + under * SIZE[1] * X_PITCH, inside, left, SIZE[1], X_PITCH, PATCH_COLUMNS,
            _last_start(COLUMNS, STRIDE[1], TAPS[1], SPACING), SPACING,
        )  # fmt: skip

    total = tl.zeros((BLOCK, 4), tl.int32)
    if bias is not None:
        total += tl.load(bias + c)
    totals = (total,) * (ROWS * COLUMNS)
    ROW_WEIGHTS: tl.constexpr = SPACING * _int8x4_count(SPACING - 1, TAPS[1]) * CHANNELS
    for tap_row in tl.static_range(TAPS[0]):
        totals = _add_taps(
            totals, inputs, weights + tap_row * ROW_WEIGHTS + c, tap_row, CHANNELS, TAPS[1],
            STRIDE[0], STRIDE[1], ROWS, COLUMNS, SPACING,
        )  # fmt: skip

    factor = tl.load(scale + c)
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            store_pixel(
                totals[i * COLUMNS + j].to(tl.float32) * factor, residual, y, image, row + i,
                column + j, c, batch, OUT, CHANNELS, Y_PITCH, R_PITCH, EPILOGUE, scalars,
            )  # fmt: skip


@triton.jit
def _pack_row(
    x, inside, left, WIDTH, X_PITCH: tl.constexpr, PATCH_COLUMNS: tl.constexpr,
    LAST_START: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    """Load and pack an input row: the int8x4 at columns 0, SPACING, .. LAST_START."""
    pairs = ()
    for at in tl.static_range(0, PATCH_COLUMNS, 2):
        first = _load_pixel(x, inside, left, at, WIDTH, X_PITCH)
        if at + 1 < PATCH_COLUMNS:
            second = _load_pixel(x, inside, left, at + 1, WIDTH, X_PITCH)
            pairs = pairs + (_pack_pair(first, second),)
        else:  # the second pixel meets a weight of 0
            pairs = pairs + (_pack_pair(first, first),)
    packed = ()
    for at in tl.static_range(0, LAST_START + 1, SPACING):
        if at + 2 < PATCH_COLUMNS:
            packed = packed + (_pack_int8x4(pairs[at // 2], pairs[at // 2 + 1]),)
        else:
            packed = packed + (_pack_int8x4(pairs[at // 2], pairs[at // 2]),)
    return packed


@triton.jit
def _load_pixel(x, inside, left, at: tl.constexpr, WIDTH, X_PITCH: tl.constexpr):
    inside = inside & (left + at >= 0) & (left + at < WIDTH)
    return tl.load(x + at * X_PITCH, mask=inside[:, None], other=0)


@triton.jit
def _add_taps(
    totals, inputs, weights, tap_row: tl.constexpr, CHANNELS: tl.constexpr,
    TAP_COLUMNS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPACING: tl.constexpr,
):  # fmt: skip
    """Add the products of a row of taps to each output of the patch."""
    MAX_COUNT: tl.constexpr = _int8x4_count(SPACING - 1, TAP_COLUMNS)
    PER_ROW: tl.constexpr = _last_start(COLUMNS, STRIDE_W, TAP_COLUMNS, SPACING) // SPACING + 1
    taps = ()
    for o in tl.static_range(0, SPACING, STRIDE_W):
        for k in tl.static_range(_int8x4_count(o, TAP_COLUMNS)):
            taps = taps + (tl.load(weights + (o * MAX_COUNT + k) * CHANNELS),)
    accumulators = ()
    for i in tl.static_range(ROWS):
        for j in tl.static_range(COLUMNS):
            total = totals[i * COLUMNS + j]
            for k in tl.static_range(_int8x4_count(j * STRIDE_W % SPACING, TAP_COLUMNS)):
                packed = inputs[
                    (i * STRIDE_H + tap_row) * PER_ROW + j * STRIDE_W // SPACING + 4 // SPACING * k
                ]
                tap = taps[_tap_index(j * STRIDE_W % SPACING, k, STRIDE_W, TAP_COLUMNS)]
                total = _dot_int8x4(packed, tap, total)
            accumulators = accumulators + (total,)
    return accumulators


@triton.constexpr_function
def _int8x4_count(offset, taps):
    """Number of int8x4 that the taps of a row take, the first tap `offset` bytes in."""
    return (offset + taps + 3) // 4


@triton.constexpr_function
def _last_start(columns, stride, taps, spacing):
    """Column of the last int8x4 that a patch of `columns` outputs needs."""
    starts = [j * stride for j in range(columns)]
    return max(s // spacing * spacing + (s % spacing + taps - 1) // 4 * 4 for s in starts)


@triton.constexpr_function
def _tap_index(offset, k, stride, taps):
    """Index of the k-th int8x4 of an offset among the loaded weights."""
    return sum((o + taps + 3) // 4 for o in range(0, offset, stride)) + k


@triton.jit
def _pack_pair(a, b):
    """Pack the bytes a and b into 16 bits, a the lower."""
    if INTERPRETED:
        result = (a.to(tl.int16) & 255) | (b.to(tl.int16) << 8)
    else:
        result = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5140; prmt.b32 $1, $2, $3, 0x7362;",
            "=r,=r,r,r", [a, b], tl.int16, is_pure=True, pack=4,
        )  # fmt: skip
    return result


@triton.jit
def _pack_int8x4(a, b):
    """Pack the 16-bit pairs a and b into 32 bits, a the lower."""
    if INTERPRETED:
        result = (a.to(tl.int32) & 65535) | (b.to(tl.int32) << 16)
    else:
        result = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;
            prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;
            """,
            "=r,=r,=r,=r,r,r,r,r", [a, b], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    return result


@triton.jit
def _dot_int8x4(a, b, total):
    """Return total + the dot product of the int8x4 a and b."""
    if INTERPRETED or not compiled_for(FIRST_SM_WITH_DP4A):
        for byte in tl.static_range(4):
            total += (a << (24 - 8 * byte) >> 24) * (b << (24 - 8 * byte) >> 24)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return total
