"""Max pooling over small windows, NHWC.

    y[i, r, j, c] = EPILOGUE(max_tr max_tj x[i, S r + tr - TOP, T j + tj - LEFT, c])

A block computes ROWS output rows. It reduces each input row once, for all windows that contain the
row, and then reduces over rows: a 5x5 window takes 9 loads an output with ROWS 5, and not 25.
Values keep their stored type until the epilogue.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.int8 import FIRST_SM_WITH_NAN_MAX, INTERPRETED, compiled_for
from toolkit.gpu.kernels.primitives import maximum


@triton.jit
def larger(a, b):
    """Return max(a, b); NaN stays. Those of 8 and 16 bits are compared in pairs from sm_80 on.

    A byte of INT8, made unsigned, has the order of the half that it is the lower byte of.
    """
    if INTERPRETED or not compiled_for(FIRST_SM_WITH_NAN_MAX):
        result = tl.where((a > b) | (a != a), a, b)
    elif a.dtype == tl.float32:
        result = maximum(a, b)
    elif a.dtype == tl.int8:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, other;
            lop3.b32 low, $1, 0x80808080, 0x00FF00FF, 0x28;
            lop3.b32 other, $2, 0x80808080, 0x00FF00FF, 0x28;
            max.f16x2 low, low, other;
            shr.b32 high, $1, 8;
            shr.b32 other, $2, 8;
            lop3.b32 high, high, 0x80808080, 0x00FF00FF, 0x28;
            lop3.b32 other, other, 0x80808080, 0x00FF00FF, 0x28;
            max.f16x2 high, high, other;
            prmt.b32 low, low, high, 0x6240;
            xor.b32 $0, low, 0x80808080;
            }""",
            "=r,r,r", [a, b], tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        kind: tl.constexpr = "bf16x2" if a.dtype == tl.bfloat16 else "f16x2"
        result = tl.inline_asm_elementwise(
            "max.NaN." + kind + " $0, $1, $2;", "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2
        )
    return result


@triton.jit
def max_pool(
    x, y, batch,
    SIZE: tl.constexpr, OUT: tl.constexpr, CHANNELS: tl.constexpr,
    X_PITCH: tl.constexpr, Y_PITCH: tl.constexpr,
    TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of pixel columns, blocks of channels).

    A pixel column is ROWS output pixels above each other. With ROWS over 1, DILATION[0] is 1.
    """
    ROW_BLOCKS: tl.constexpr = (OUT[0] + ROWS - 1) // ROWS
    LOWEST: tl.constexpr = -128 if x.dtype.element_ty == tl.int8 else float("-inf")
    pixel_column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = pixel_column // (ROW_BLOCKS * OUT[1])
    first = pixel_column // OUT[1] % ROW_BLOCKS * ROWS
    column = pixel_column % OUT[1]
    top = first * STRIDE[0] - PAD[0]
    left = column * STRIDE[1] - PAD[1]
    inside = (image < batch)[:, None] & (c < CHANNELS)[None, :]

    maxima = ()  # of each input row
    for at in tl.static_range((ROWS - 1) * STRIDE[0] + TAPS[0]):
        h = top + at * DILATION[0]
        best = tl.full((BLOCK_M, BLOCK_N), LOWEST, x.dtype.element_ty)
        for tap in tl.static_range(TAPS[1]):
            w = left + tap * DILATION[1]
            mask = inside & ((h >= 0) & (h < SIZE[0]) & (w >= 0) & (w < SIZE[1]))[:, None]
            offset = ((image * SIZE[0] + h) * SIZE[1] + w) * X_PITCH
            a = tl.load(x + offset[:, None] + c[None, :], mask=mask, other=LOWEST)
            if tap == 0:
                best = a
            else:
                best = larger(best, a)
        maxima = maxima + (best,)

    for row in tl.static_range(ROWS):
        best = maxima[row * STRIDE[0]]
        for tap in tl.static_range(1, TAPS[0]):
            best = larger(best, maxima[row * STRIDE[0] + tap])
        if len(EPILOGUE) > 0:
            best = evaluate((best if best.dtype == tl.int8 else best.to(tl.float32),), EPILOGUE)
        r = first + row
        offset = ((image * OUT[0] + r) * OUT[1] + column) * Y_PITCH
        mask = inside & (r < OUT[0])[:, None]
        tl.store(y + offset[:, None] + c[None, :], best.to(y.dtype.element_ty), mask=mask)
