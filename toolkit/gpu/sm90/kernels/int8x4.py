"""Results of INT8 four at a time: a word holds those of four neighbouring columns.

    word[m, j] = bytes y[m, 4 j], y[m, 4 j + 1], y[m, 4 j + 2], y[m, 4 j + 3]

Sums lie two and two with those of the row 8 below, so bytes that are put together in that order are
moved once more when they are stored, and once when a residual is loaded. Words are not: each
thread holds the four columns of a row, in four blocks of their own.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate_operand, load_columns
from toolkit.gpu.kernels.int8 import INTERPRETED, near_int8

INT8X4_PER_BLOCK = tl.constexpr(16)  # 64 columns


@triton.jit
def _places(row, n, rows, COLUMNS: tl.constexpr, PITCH: tl.constexpr):
    """Return the places of a block of words from column n on, and which of them there are."""
    j = tl.arange(0, INT8X4_PER_BLOCK)
    inside = (row < rows)[:, None]
    if COLUMNS is not None:
        inside = inside & (n + 4 * j < COLUMNS)[None, :]
    # That n is a multiple of four the compiler does not know of row PITCH + n + 4 j.
    return row[:, None] * (PITCH // 4) + (n // 4 + j)[None, :], inside


@triton.jit
def load_int8x4(residual, row, n, rows, COLUMNS: tl.constexpr, R_PITCH: tl.constexpr):
    """Return 64 columns of a residual from column n on, [rows, 16] int32; None of None."""
    if residual is not None:
        place, inside = _places(row, n, rows, COLUMNS, R_PITCH)
        words = residual.to(tl.pointer_type(tl.int32))
        residual = tl.load(words + place, mask=inside, other=0)
    return residual


@triton.jit
def store_int8x4(y, words, row, n, rows, COLUMNS: tl.constexpr, Y_PITCH: tl.constexpr):
    """Store 64 columns from column n on; COLUMNS, pitches and places are multiples of four."""
    place, inside = _places(row, n, rows, COLUMNS, Y_PITCH)
    tl.store(y.to(tl.pointer_type(tl.int32)) + place, words, mask=inside)


@triton.jit
def apply_epilogue_int8x4(
    total, scale, residual, n, COLUMNS: tl.constexpr, EPILOGUE: tl.constexpr, scalars,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return STEPS(total scale[n], residual) as words, [BLOCK_M, 16]; it ends in INT8.

    `total` [BLOCK_M, 64] holds the bias; `residual` is what `load_words` gave. The last step is
    "relu_int8_by" or "round_int8_by".
    """
    column = n + tl.arange(0, 64)
    real = total.to(tl.float32) * load_columns(scale, column, COLUMNS)[None, :]
    low, high = real.reshape(BLOCK_M, INT8X4_PER_BLOCK, 2, 2).split()
    t0, t2 = low.split()
    t1, t3 = high.split()
    if residual is None:
        t0 = evaluate_operand((t0,), EPILOGUE, scalars)
        t1 = evaluate_operand((t1,), EPILOGUE, scalars)
        t2 = evaluate_operand((t2,), EPILOGUE, scalars)
        t3 = evaluate_operand((t3,), EPILOGUE, scalars)
    else:
        if EPILOGUE[0][0] == "rectified_by":
            r0, r1, r2, r3 = _rectified(residual)
        else:
            r0, r1, r2, r3 = _floats(residual)
        t0 = evaluate_operand((t0, r0), EPILOGUE, scalars)
        t1 = evaluate_operand((t1, r1), EPILOGUE, scalars)
        t2 = evaluate_operand((t2, r2), EPILOGUE, scalars)
        t3 = evaluate_operand((t3, r3), EPILOGUE, scalars)
    LAST: tl.constexpr = EPILOGUE[len(EPILOGUE) - 1]
    factor = scalars[LAST[2]]
    if LAST[0] == "relu_int8_by":
        t0, t1, t2, t3 = (
            _above(t0, factor),
            _above(t1, factor),
            _above(t2, factor),
            _above(t3, factor),
        )
    else:
        tl.static_assert(LAST[0] == "round_int8_by")
        t0, t1, t2, t3 = t0 * factor, t1 * factor, t2 * factor, t3 * factor
    return _rounded(t0, t1, t2, t3)


@triton.jit
def _floats(words):
    """Return the four bytes of words as float32, as `as_float` does."""
    if INTERPRETED:
        r0 = ((words << 24) >> 24).to(tl.float32)
        r1 = ((words << 16) >> 24).to(tl.float32)
        r2 = ((words << 8) >> 24).to(tl.float32)
        r3 = (words >> 24).to(tl.float32)
    else:
        r0, r1, r2, r3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7440;
            prmt.b32 $1, bytes, 0x4B000000, 0x7441;
            prmt.b32 $2, bytes, 0x4B000000, 0x7442;
            prmt.b32 $3, bytes, 0x4B000000, 0x7443;
            }""",
            "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
        r0, r1, r2, r3 = r0 - 8388736.0, r1 - 8388736.0, r2 - 8388736.0, r3 - 8388736.0
    return r0, r1, r2, r3


@triton.jit
def _rectified(words):
    """Return 128 plus the four bytes of words, 0 to 127 each, as float32, for `scaled_rectified`.

    The bytes are the upper digits of 128, so one PRMT makes each.
    """
    if INTERPRETED:
        r0, r1, r2, r3 = _floats(words)
        r0, r1, r2, r3 = r0 + 128.0, r1 + 128.0, r2 + 128.0, r3 + 128.0
    else:
        r0, r1, r2, r3 = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, 0x43000000, 0x7044;
            prmt.b32 $1, $4, 0x43000000, 0x7144;
            prmt.b32 $2, $4, 0x43000000, 0x7244;
            prmt.b32 $3, $4, 0x43000000, 0x7344;
            }""",
            "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    return r0, r1, r2, r3


@triton.jit
def _above(a, FACTOR):
    """Return a FACTOR of 0 or more, cut at 128, as `relu_int8` does."""
    if INTERPRETED:
        a = tl.maximum(a * FACTOR, 0.0)
    else:
        factor = tl.full(a.shape, 0.0078125, tl.float32) * FACTOR
        a = 128.0 * tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [a, factor], tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return a


@triton.jit
def _rounded(a0, a1, a2, a3):
    """Return clip(rte(a), -128, 127) of four numbers as the bytes of a word, as `round_int8`."""
    if INTERPRETED:
        low = (near_int8(a0).to(tl.int32) & 255) | ((near_int8(a1).to(tl.int32) & 255) << 8)
        high = (near_int8(a2).to(tl.int32) & 255) | ((near_int8(a3).to(tl.int32) & 255) << 8)
        words = low | (high << 16)
    else:
        words = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, third, fourth;
            cvt.rni.s32.f32 first, $1;
            cvt.rni.s32.f32 second, $2;
            cvt.rni.s32.f32 third, $3;
            cvt.rni.s32.f32 fourth, $4;
            cvt.pack.sat.s8.s32.b32 third, fourth, third, 0;
            cvt.pack.sat.s8.s32.b32 $0, second, first, third;
            }""",
            "=r,f,f,f,f", [a0, a1, a2, a3], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def unpack_int8x4(words, BLOCK_M: tl.constexpr):
    """Return [BLOCK_M, 64] int8 of [BLOCK_M, 16] words; where both lie in registers it is free."""
    low = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    high = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(low, high).reshape(BLOCK_M, 64)
