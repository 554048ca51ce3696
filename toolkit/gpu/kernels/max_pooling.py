"""Largest numbers of small windows, on channels-last tensors.

    y[i, r, j, c] = STEPS(max_tr max_tj x[i, S r + tr - TOP, T j + tj - LEFT, c])

A block makes ROWS rows above each other. It takes the maxima along each row of the picture once,
for all windows that the row lies in, and then those of rows: a window of 5x5 takes 9 loads a
result where ROWS is 5, and not 25. Numbers stay as they are stored until the end.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.int8 import INTERPRETED


@triton.jit
def larger(a, b, PACKED: tl.constexpr):
    """Return max(a, b); NaN stays, as in ONNX. PACKED: two or four numbers at once (sm_90).

    Of bytes, 16 bits are compared at once: the upper byte of the larger is the larger upper byte.
    """
    if a.dtype == tl.int8 and PACKED and not INTERPRETED:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, other;
            shl.b32 low, $1, 8;
            shl.b32 other, $2, 8;
            max.s16x2 high, $1, $2;
            max.s16x2 low, low, other;
            prmt.b32 $0, low, high, 0x7351;
            }""",
            "=r,r,r", [a, b], tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    elif a.dtype == tl.float16 and PACKED and not INTERPRETED:
        result = tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2
        )
    elif a.dtype == tl.int8:
        result = tl.where(a > b, a, b)
    else:
        result = tl.where((a > b) | (a != a), a, b)
    return result


@triton.jit
def max_pool(
    x, y, batch,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, X_PITCH: tl.constexpr,
    OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAP_ROWS: tl.constexpr, TAP_COLUMNS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of strips, blocks of channels). A strip is ROWS pixels above each other; with
    ROWS over 1, DILATION_H is 1.
    """
    STRIPS: tl.constexpr = (OUT_HEIGHT + ROWS - 1) // ROWS
    LEAST: tl.constexpr = -128 if x.dtype.element_ty == tl.int8 else float("-inf")
    strip = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = strip // (STRIPS * OUT_WIDTH)
    first = strip // OUT_WIDTH % STRIPS * ROWS
    column = strip % OUT_WIDTH
    top = first * STRIDE_H - PAD_TOP
    left = column * STRIDE_W - PAD_LEFT
    there = (image < batch)[:, None] & (c < CHANNELS)[None, :]

    maxima = ()  # of each row of the picture
    for at in tl.static_range((ROWS - 1) * STRIDE_H + TAP_ROWS):
        h = top + at * DILATION_H
        best = tl.full((BLOCK_M, BLOCK_N), LEAST, x.dtype.element_ty)
        for tap in tl.static_range(TAP_COLUMNS):
            w = left + tap * DILATION_W
            inside = there & ((h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH))[:, None]
            place = ((image * HEIGHT + h) * WIDTH + w) * X_PITCH
            a = tl.load(x + place[:, None] + c[None, :], mask=inside, other=LEAST)
            if tap == 0:
                best = a
            else:
                best = larger(best, a, PACKED)
        maxima = maxima + (best,)

    for row in tl.static_range(ROWS):
        best = maxima[row * STRIDE_H]
        for tap in tl.static_range(1, TAP_ROWS):
            best = larger(best, maxima[row * STRIDE_H + tap], PACKED)
        if len(EPILOGUE) > 0:
            best = evaluate((best if best.dtype == tl.int8 else best.to(tl.float32),), EPILOGUE)
        r = first + row
        place = ((image * OUT_HEIGHT + r) * OUT_WIDTH + column) * Y_PITCH
        inside = there & (r < OUT_HEIGHT)[:, None]
        tl.store(y + place[:, None] + c[None, :], best.to(y.dtype.element_ty), mask=inside)
