"""Elementary functions of FP32, from exp, log, sqrt, sin and cos of numbers near 0.

Docstrings give the formulas; those that lose digits near 0 are series there. The relative error
stays under 1e-5, that of a power under 1e-7 times the size of its logarithm. Functions named
"..._half" are for results stored as FP16 or INT8, from sm_75 on: a hyperbolic tangent is one
instruction there, with a relative error of 2^-11 (PTX ISA, tanh.approx), that of FP16.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.int8 import INTERPRETED


@triton.jit
def expm1(x):
    """exp(x) - 1; near 0 its Taylor series."""
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x); near 0 it is 2 artanh(s), s = x / (2 + x), by its Taylor series."""
    s = x / (2.0 + x)
    q = s * s
    near = 2.0 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9)))))
    return tl.where(tl.abs(x) < 0.5, near, tl.log(1.0 + x))


@triton.jit
def sinh(x):
    """(exp(x) - exp(-x)) / 2; near 0 its Taylor series."""
    q = x * x
    near = x * (1 + q / 6 * (1 + q / 20 * (1 + q / 42 * (1 + q / 72))))
    return tl.where(tl.abs(x) < 1.0, near, 0.5 * (tl.exp(x) - tl.exp(-x)))


@triton.jit
def cosh(x):
    """(exp(x) + exp(-x)) / 2."""
    return 0.5 * (tl.exp(x) + tl.exp(-x))


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e), e = exp(-2 |x|), with the sign of x; near 0 its Taylor series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    q = x * x
    near = x * (1 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315 - q * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def tanh_half(x):
    """tanh(x)."""
    if INTERPRETED:
        result = tanh(x)
    else:
        result = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2(e))).

    Neither power nor quotient need the instructions that keep numbers under 2^-126: 1 is added to
    the one, and the other is 0 to FP32's digits of 1 where it would be one.
    """
    if INTERPRETED:
        result = 1.0 / (1.0 + tl.exp(-x))
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.rn.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.rn.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f", [x], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return result


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def silu_half(x):
    """x sigmoid(x) = h + h tanh(h), h = x / 2."""
    if INTERPRETED:
        result = silu(x)
    else:
        h = 0.5 * x
        result = tl.fma(h, tanh_half(h), h)
    return result


@triton.jit
def asinh(x):
    """log(a + sqrt(a^2 + 1)), a = |x|, with the sign of x."""
    a = tl.abs(x)
    result = log1p(a + a * a / (1.0 + tl.sqrt(a * a + 1.0)))
    return tl.where(x < 0, -result, result)


@triton.jit
def acosh(x):
    """log(x + sqrt(x^2 - 1)) = log1p(t + sqrt(2 t + t^2)), t = x - 1."""
    t = x - 1.0
    return log1p(t + tl.sqrt(2.0 * t + t * t))


@triton.jit
def atanh(x):
    """log((1 + x) / (1 - x)) / 2."""
    return 0.5 * log1p(2.0 * x / (1.0 - x))


@triton.jit
def reduce_angle(x):
    """x minus the nearest multiple of 2 pi, which is taken in three parts of fewer bits each.

    The parts are 2 pi cut to 8, 11 and 24 bits, so that the first two products are exact for up to
    2^13 turns.
    """
    turns = x * 0.15915494309189535
    turns = tl.where(tl.abs(turns) < 4194304.0, (turns + 12582912.0) - 12582912.0, turns)
    return ((x - turns * 6.28125) - turns * 0.0019350051879882812) - turns * 3.019916e-07


@triton.jit
def sin(x):
    """sin(x)."""
    return tl.sin(reduce_angle(x))


@triton.jit
def cos(x):
    """cos(x)."""
    return tl.cos(reduce_angle(x))


@triton.jit
def tan(x):
    """sin(x) / cos(x)."""
    x = reduce_angle(x)
    return tl.sin(x) / tl.cos(x)


@triton.jit
def atan(x):
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 4.4.49, for 0 <= x <= 1.

    Beyond 1 it is pi / 2 - atan(1 / x).
    """
    a = tl.abs(x)
    z = tl.where(a > 1.0, 1.0 / a, a)
    q = z * z
    s = -0.0161657367 + q * 0.0028662257
    s = 0.0429096138 + q * s
    s = -0.0752896400 + q * s
    s = 0.1065626393 + q * s
    s = -0.1420889944 + q * s
    s = 0.1999355085 + q * s
    s = -0.3333314528 + q * s
    result = z * (1.0 + q * s)
    result = tl.where(a > 1.0, 1.5707963267948966 - result, result)
    return tl.where(x < 0, -result, result)


@triton.jit
def asin(x):
    """atan(x / sqrt((1 - x) (1 + x)))."""
    return atan(x / tl.sqrt((1.0 - x) * (1.0 + x)))


@triton.jit
def acos(x):
    """2 atan(sqrt((1 - x) / (1 + x)))."""
    return 2.0 * atan(tl.sqrt((1.0 - x) / (1.0 + x)))


@triton.jit
def round_half_even(x):
    """x rounded to the nearest whole number, halves to even; beyond 2^22 a number is left as it is.

    1.5 * 2^23 has no bits for fractions, nor has its sum with a number under 2^22.
    """
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def power(x, y):
    """|x|^y = 2^(y log2 |x|), negative where x is and y is odd, NaN where y is not whole."""
    result = tl.exp2(y * tl.log2(tl.abs(x)))
    half = 0.5 * y
    odd = (tl.floor(y) == y) & (tl.floor(half) != half)
    signed = tl.where(odd, -result, tl.where(tl.floor(y) == y, result, float("nan")))
    result = tl.where(x < 0, signed, result)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, result)


@triton.jit
def integer_power(x, n):
    """x^n for integers n >= 0 by squares; beyond 63 only whether n is odd counts, for 0, 1 and -1.

    A negative n gives 1 / x^-n without its fraction.
    """
    count = tl.abs(n)
    count = tl.where(count > 63, 62 + (count & 1), count)
    zero = tl.zeros_like(x)
    one = zero + 1
    result = one
    square = x
    for bit in tl.static_range(6):
        result = tl.where(((count >> bit) & 1) != 0, result * square, result)
        square = square * square
    unit = (result == one) | (result == zero - one)
    return tl.where((n < 0) & (unit == 0), zero, result)


@triton.jit
def mixed_power(x, y):
    """An integer x to a real y; exact while it fits 24 bits, where y is whole."""
    result = power(x.to(tl.float32), y)
    return tl.where(tl.floor(y) == y, round_half_even(result), result)


@triton.jit
def remainder(a, b):
    """a - b trunc(a / b): the remainder of C, with the sign of a."""
    x, y = tl.abs(a), tl.abs(b)
    r = x - tl.floor(x / y) * y
    r = tl.where(r < 0, r + y, r)  # where the quotient was rounded up to the next whole number
    r = tl.where(r >= y, r - y, r)
    r = tl.where((y == float("inf")) & (x < y), x, r)
    return tl.where(a < 0, -r, r)


@triton.jit
def modulo(a, b):
    """The remainder of integers or floats with the sign of b."""
    if a.dtype.is_floating():
        r = remainder(a, b)
    else:
        r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def gelu(x):
    """x Phi(x) = max(x, 0) - a Phi(-a), a = |x|, and Phi(-a) = exp(-a^2 / 2) p(a).

    p, half of the scaled complementary error function of a / sqrt(2), is the polynomial of degree
    11 with the least relative error on 0 <= a <= 5.5, 4.2e-6 (Lawson's iteration). Beyond it the
    result is 0 or x to 2e-7. Unlike erf it has one piece, and two thirds of the instructions.
    """
    a = tl.minimum(tl.abs(x), 5.5)
    p = tl.fma(a, -3.584708e-08, 1.2937361e-06)
    p = tl.fma(a, p, -2.0950072e-05)
    p = tl.fma(a, p, 0.00020208086)
    p = tl.fma(a, p, -0.0013039034)
    p = tl.fma(a, p, 0.0060212915)
    p = tl.fma(a, p, -0.020948123)
    p = tl.fma(a, p, 0.057551738)
    p = tl.fma(a, p, -0.13027611)
    p = tl.fma(a, p, 0.2491986)
    p = tl.fma(a, p, -0.39884469)
    p = tl.fma(a, p, 0.49999791)
    above = tl.fma(tl.abs(x), 0.5, 0.5 * x)
    return tl.fma(a * p, -tl.exp2(-0.7213475204444817 * (a * a)), above)  # log2(e) / 2


@triton.jit
def _gelu_tanh_factor(x):
    """t with which x Phi(x) = h + h t, h = x / 2: tanh(x P(x^2)).

    P is the polynomial of degree 2 with which x Phi(x) is nearest on |x| <= 6, 2.5e-5 off; t is 1
    or -1 beyond to all digits, where P stays what it is at 6. It is written in u = x / 6 here, so
    that a square that saturates to 0..1 costs nothing more.
    """
    u = x * 0.16666666666666666
    if INTERPRETED:
        q = tl.minimum(u * u, 1.0)
    else:
        q = tl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $1;", "=f,f", [u], tl.float32, is_pure=True, pack=1
        )
    p = tl.fma(q, -2.7333959, 7.9932198)
    return tanh_half(u * tl.fma(q, p, 4.7850473))


@triton.jit
def gelu_half(x):
    """x Phi(x)."""
    h = 0.5 * x
    return tl.fma(h, _gelu_tanh_factor(x), h)


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))


@triton.jit
def gelu_tanh_half(x):
    """h + h tanh(sqrt(2 / pi) (x + 0.044715 x^3)), h = x / 2."""
    inner = x * tl.fma(0.035677408136300125 * x, x, 0.7978845608028654)
    return tl.fma(0.5 * x, tanh_half(inner), 0.5 * x)


@triton.jit
def mish(x):
    """x tanh(log(1 + e)) = x n / (n + 2), e = exp(x), n = e (e + 2)."""
    e = tl.exp(tl.where(x > 20.0, 20.0, x))  # beyond, the quotient is 1
    n = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * (n / (n + 2.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))."""
    return tl.where(x < 0, 0.0, x) + log1p(tl.exp(-tl.abs(x)))
