"""Packed int8x4 results: an INT32 holds four neighbouring columns.

    packed[m, j] = bytes y[m, 4 j], y[m, 4 j + 1], y[m, 4 j + 2], y[m, 4 j + 3]

The MMA layout pairs an accumulator with that of the row 8 below. Bytes packed in that order need a
shuffle when they are stored, and when a residual is loaded. Packed int8x4 need none: each thread
has the four columns of a row in four blocks of their own.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate_operand, load_columns
from toolkit.gpu.kernels.int8 import INTERPRETED, near_int8

INT8X4_PER_BLOCK = tl.constexpr(16)  # 64 columns


@triton.jit
def _offsets(row, n, rows, COLUMNS: tl.constexpr, PITCH: tl.constexpr):
    """Return the offsets of a packed block from column n on, and the mask of those in bounds."""
    j = tl.arange(0, INT8X4_PER_BLOCK)
    inside = (row < rows)[:, None]
    if COLUMNS is not None:
        inside = inside & (n + 4 * j < COLUMNS)[None, :]
    # n is divided first: the compiler does not know that row PITCH + n + 4 j is a multiple of four.
    return row[:, None] * (PITCH // 4) + (n // 4 + j)[None, :], inside


@triton.jit
def load_int8x4(residual, row, n, rows, COLUMNS: tl.constexpr, R_PITCH: tl.constexpr):
    """Load 64 columns of a residual from column n on, packed [rows, 16]; None if there is none."""
    if residual is not None:
        offset, inside = _offsets(row, n, rows, COLUMNS, R_PITCH)
        pointer = residual.to(tl.pointer_type(tl.int32))
        residual = tl.load(pointer + offset, mask=inside, other=0)
    return residual


@triton.jit
def store_int8x4(y, packed, row, n, rows, COLUMNS: tl.constexpr, Y_PITCH: tl.constexpr):
    """Store 64 columns from column n on; COLUMNS, pitches and offsets are multiples of four."""
    offset, inside = _offsets(row, n, rows, COLUMNS, Y_PITCH)
    tl.store(y.to(tl.pointer_type(tl.int32)) + offset, packed, mask=inside)


@triton.jit
def apply_epilogue_int8x4(
    total, scale, residual, n, COLUMNS: tl.constexpr, EPILOGUE: tl.constexpr, scalars,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return EPILOGUE(total scale[n], residual), packed int8x4 [BLOCK_M, 16].

    `total` [BLOCK_M, 64] includes the bias; `residual` comes from `load_int8x4`. The last operation
    is "relu_int8_by" or "round_int8_by".
    """
    column = n + tl.arange(0, 64)
    scaled = total.to(tl.float32) * load_columns(scale, column, COLUMNS)[None, :]
    low, high = scaled.reshape(BLOCK_M, INT8X4_PER_BLOCK, 2, 2).split()
    t0, t2 = low.split()
    t1, t3 = high.split()
    if residual is None:
        t0 = evaluate_operand((t0,), EPILOGUE, scalars)
        t1 = evaluate_operand((t1,), EPILOGUE, scalars)
        t2 = evaluate_operand((t2,), EPILOGUE, scalars)
        t3 = evaluate_operand((t3,), EPILOGUE, scalars)
    else:
        if EPILOGUE[0][0] == "rectified_by":
            r0, r1, r2, r3 = _unpack_rectified(residual)
        else:
            r0, r1, r2, r3 = _unpack_float32(residual)
        t0 = evaluate_operand((t0, r0), EPILOGUE, scalars)
        t1 = evaluate_operand((t1, r1), EPILOGUE, scalars)
        t2 = evaluate_operand((t2, r2), EPILOGUE, scalars)
        t3 = evaluate_operand((t3, r3), EPILOGUE, scalars)
    LAST: tl.constexpr = EPILOGUE[len(EPILOGUE) - 1]
    factor = scalars[LAST[2]]
    if LAST[0] == "relu_int8_by":
        t0, t1, t2, t3 = (
            _relu(t0, factor),
            _relu(t1, factor),
            _relu(t2, factor),
            _relu(t3, factor),
        )
    else:
        tl.static_assert(LAST[0] == "round_int8_by")
        t0, t1, t2, t3 = t0 * factor, t1 * factor, t2 * factor, t3 * factor
    return _pack_rounded(t0, t1, t2, t3)


@triton.jit
def _unpack_float32(packed):
    """Unpack int8x4 to four float32 tensors, as `as_float` does."""
    if INTERPRETED:
        r0 = ((packed << 24) >> 24).to(tl.float32)
        r1 = ((packed << 16) >> 24).to(tl.float32)
        r2 = ((packed << 8) >> 24).to(tl.float32)
        r3 = (packed >> 24).to(tl.float32)
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
            "=f,=f,=f,=f,r", [packed], (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
        r0, r1, r2, r3 = r0 - 8388736.0, r1 - 8388736.0, r2 - 8388736.0, r3 - 8388736.0
    return r0, r1, r2, r3


@triton.jit
def _unpack_rectified(packed):
    """Unpack int8x4 of 0 to 127 to four float32 tensors plus 128, for `scaled_rectified`.

    The bytes are appended to the upper bits of 128.0, which takes one PRMT each.
    """
    if INTERPRETED:
        r0, r1, r2, r3 = _unpack_float32(packed)
        r0, r1, r2, r3 = r0 + 128.0, r1 + 128.0, r2 + 128.0, r3 + 128.0
    else:
        r0, r1, r2, r3 = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $4, 0x43000000, 0x7044;
            prmt.b32 $1, $4, 0x43000000, 0x7144;
            prmt.b32 $2, $4, 0x43000000, 0x7244;
            prmt.b32 $3, $4, 0x43000000, 0x7344;
            }""",
            "=f,=f,=f,=f,r", [packed], (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    return r0, r1, r2, r3


@triton.jit
def _relu(a, FACTOR):
    """Return clip(a FACTOR, 0, 128), as `relu_int8` does."""
    if INTERPRETED:
        a = tl.maximum(a * FACTOR, 0.0)
    else:
        factor = tl.full(a.shape, 0.0078125, tl.float32) * FACTOR
        a = 128.0 * tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [a, factor], tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    return a


@triton.jit
def _pack_rounded(a0, a1, a2, a3):
    """Pack clip(rte(a), -128, 127) of four float32 tensors to int8x4, like `round_int8`."""
    if INTERPRETED:
        low = (near_int8(a0).to(tl.int32) & 255) | ((near_int8(a1).to(tl.int32) & 255) << 8)
        high = (near_int8(a2).to(tl.int32) & 255) | ((near_int8(a3).to(tl.int32) & 255) << 8)
        packed = low | (high << 16)
    else:
        packed = tl.inline_asm_elementwise(
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
    return packed


@triton.jit
def unpack_int8x4(packed, BLOCK_M: tl.constexpr):
    """Unpack int8x4 [BLOCK_M, 16] to int8 [BLOCK_M, 64]; no instruction is needed."""
    low = tl.join(packed.to(tl.int8), (packed >> 16).to(tl.int8))
    high = tl.join((packed >> 8).to(tl.int8), (packed >> 24).to(tl.int8))
    return tl.join(low, high).reshape(BLOCK_M, 64)
