"""Numbers of INT8 in registers: bytes to floats, and floats to bytes.

    as_float(a)       = a, float32
    add_bytes(t, a)   = t + a, of t's type
    near_int8(a)      = clip(rte(a), -128, 127), float32
    round_int8(a)     = clip(rte(a), -128, 127), int8
    relu_int8(a, f)   = clip(rte(fl(a f)), 0, 127), int8       rte: halves to even; fl: to float32

GPUs compare, select and move bytes at half the speed of sums, so numbers are converted in as few
instructions as there are. What rounds and stays a float is the sum with a number so large that it
has no fraction: 1.5 * 2**23.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # inline PTX is for compilers only
# PTX ISA, dp4a, cvt.pack and max
FIRST_SM_WITH_DP4A = tl.constexpr(61)
FIRST_SM_WITH_CVT_PACK = tl.constexpr(72)
FIRST_SM_WITH_NAN_MAX = tl.constexpr(80)


@tl.core.builtin
def compiled_for(sm, _semantic=None):
    """Return whether the kernel is compiled for this SM version or a newer one."""
    arch = _semantic.builder.options.arch  # "sm87", "sm90a"
    return tl.constexpr(int("".join(filter(str.isdigit, arch))) >= tl.core._unwrap_if_constexpr(sm))


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
def add_bytes(total, a):
    """Return total + a; of bytes, the sum of four products with 1, 0, 0 and 0 takes one of them."""
    if a.dtype == tl.int8 and not INTERPRETED and compiled_for(FIRST_SM_WITH_DP4A):
        total = tl.inline_asm_elementwise(
            """{
            dp4a.s32.s32 $0, $8, 0x00000001, $4;
            dp4a.s32.s32 $1, $8, 0x00000100, $5;
            dp4a.s32.s32 $2, $8, 0x00010000, $6;
            dp4a.s32.s32 $3, $8, 0x01000000, $7;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [total, a], tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        total += a.to(total.dtype)
    return total


@triton.jit
def near_int8(a):
    """Return the nearest whole number in -128..127, halves to even, as float32."""
    return (tl.minimum(tl.maximum(a, -128.0), 127.0) + 12582912.0) - 12582912.0


@triton.jit
def round_int8(a):
    """Return the nearest whole number in -128..127, halves to even, as int8.

    The assembler makes one instruction of two conversions and what cuts them to bytes.
    """
    if INTERPRETED or not compiled_for(FIRST_SM_WITH_CVT_PACK):
        result = near_int8(a).to(tl.int8)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, third, fourth;
            cvt.rni.s32.f32 first, $1;
            cvt.rni.s32.f32 second, $2;
            cvt.rni.s32.f32 third, $3;
            cvt.rni.s32.f32 fourth, $4;
            cvt.pack.sat.s8.s32.b32 third, fourth, third, 0;
            cvt.pack.sat.s8.s32.b32 $0, second, first, third;
            }""",
            "=r,f,f,f,f", [a.to(tl.float32)], tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    return result


@triton.jit
def relu_int8(a, FACTOR):
    """Return a * FACTOR, rectified and rounded to 0..127, halves to even, as int8.

    A product that saturates to 0..1 costs nothing more, so a * (FACTOR / 128) is made, which has
    the same digits, and then 128 times that.
    """
    if INTERPRETED:
        result = round_int8(tl.maximum(a * FACTOR, 0.0))
    else:
        factor = tl.full(a.shape, 0.0078125, tl.float32) * FACTOR
        a = tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [a.to(tl.float32), factor], tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
        result = round_int8(a * 128.0)
    return result
