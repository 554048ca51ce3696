"""Numbers of INT8 in registers: bytes to floats, and floats to bytes.

    as_float(a)       = a, float32
    near_int8(a)      = clip(rte(a), -128, 127), float32
    round_int8(a)     = clip(rte(a), -128, 127), int32
    relu_int8(a, f)   = clip(rte(fl(a f)), 0, 127), int8       rte: halves to even; fl: to float32

GPUs convert between integers and floats slowly, and compare, select and move bytes at half the
speed of sums. So what rounds is the sum with a number so large that it has no fraction:
1.5 * 2**23 + q keeps a whole q in its last bits.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # inline PTX is for compilers only


@triton.jit
def as_float(a):
    """Return the numbers as float32.

    Four bytes are shifted to 0..255 at once; each becomes the last bits of 2**23 in one PRMT.
    """
    if a.dtype == tl.int8 and not INTERPRETED:
        a = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 $0, bytes, 0x4B000000, 0x7440;
            prmt.b32 $1, bytes, 0x4B000000, 0x7441;
            prmt.b32 $2, bytes, 0x4B000000, 0x7442;
            prmt.b32 $3, bytes, 0x4B000000, 0x7443;
            }""",
            "=r,=r,=r,=r,r", [a], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
        result = a.to(tl.float32, bitcast=True) - 8388736.0
    else:
        result = a.to(tl.float32)
    return result


@triton.jit
def near_int8(a):
    """Return the nearest whole number in -128..127, halves to even, as float32."""
    return (tl.minimum(tl.maximum(a, -128.0), 127.0) + 12582912.0) - 12582912.0


@triton.jit
def round_int8(a):
    """Return the nearest whole number in -128..127, halves to even, as int32.

    The last bytes of four sums are put together by PRMT. A plain cast to int8 becomes the store of
    a byte of a sum, which ptxas before CUDA 13.4 takes for a conversion from float: it stores 255.
    """
    a = tl.minimum(tl.maximum(a, -128.0), 127.0) + 12582912.0
    if INTERPRETED:
        result = a.to(tl.int32, bitcast=True) - 0x4B400000
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 $0, low, high, 0x5410;
            }""",
            "=r,r,r,r,r", [a.to(tl.int32, bitcast=True)], tl.int8, is_pure=True, pack=4,
        ).to(tl.int32)  # fmt: skip
    return result


@triton.jit
def relu_int8(a, FACTOR):
    """Return a * FACTOR, rectified and rounded to 0..127, halves to even, as int8.

    A product that saturates to 0..1 costs nothing more, so a * (FACTOR / 128) is made, which has
    the same digits. 1.5 * 2**16 rounds it to whole 128ths, 0 to 128; of 128, the only one with its
    highest bit set, that bit is taken off in four bytes at once.
    """
    if INTERPRETED:
        result = round_int8(tl.maximum(a * FACTOR, 0.0)).to(tl.int8)
    else:
        factor = tl.full(a.shape, 0.0078125, tl.float32) * FACTOR
        a = tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [a.to(tl.float32), factor], tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            prmt.b32 low, $1, $2, 0x0040;
            prmt.b32 high, $3, $4, 0x0040;
            prmt.b32 low, low, high, 0x5410;
            and.b32 high, low, 0x80808080;
            shr.u32 high, high, 7;
            sub.u32 $0, low, high;
            }""",
            "=r,r,r,r,r", [(a + 98304.0).to(tl.int32, bitcast=True)], tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return result
