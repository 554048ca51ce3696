"""The table of primitive operators: what one step of an expression computes.

A primitive is a function of blocks of one shape; `toolkit.gpu.kernels.expression` applies it. A new
one is a row of `table`, and its formula: below, in `toolkit.gpu.kernels.functions`, or Triton's
own. Parameters in capitals are known at compile time.

The table is the body of a function because Triton hashes the functions that a function names, as
part of every kernel with an expression, and refuses to do so for those of a global value. In its
interpreter, too, `tl.exp` is another function while a kernel runs.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels import functions
from toolkit.gpu.kernels.int8 import INTERPRETED, as_float, near_int8, relu_int8, round_int8


@triton.constexpr_function
def table():
    """Return the function of each primitive, and its number of operands; numbers follow them."""
    return {
        "constant": (constant, 0),
        "same": (same, 1),
        "cast": (cast, 1),
        "is_nonzero": (is_nonzero, 1),
        "where": (tl.where, 3),
        # Arithmetic
        "neg": (tl.tensor.__neg__, 1),
        "abs": (tl.abs, 1),
        "reciprocal": (reciprocal, 1),
        "add": (tl.tensor.__add__, 2),
        "sub": (tl.tensor.__sub__, 2),
        "mul": (tl.tensor.__mul__, 2),
        "div": (tl.div_rn, 2),  # what is rounded after it must not tip
        "max": (maximum, 2),
        "min": (minimum, 2),
        "sign": (sign, 1),
        "floor": (tl.floor, 1),
        "ceil": (tl.ceil, 1),
        "round": (functions.round_half_even, 1),
        "remainder": (functions.remainder, 2),
        "modulo": (functions.modulo, 2),
        # Powers and logarithms
        "sqrt": (tl.sqrt, 1),
        "exp": (tl.exp, 1),
        "log": (tl.log, 1),
        "power": (functions.power, 2),
        "mixed_power": (functions.mixed_power, 2),
        # Angles and hyperbolic functions
        "sin": (functions.sin, 1),
        "cos": (functions.cos, 1),
        "tan": (functions.tan, 1),
        "asin": (functions.asin, 1),
        "acos": (functions.acos, 1),
        "atan": (functions.atan, 1),
        "sinh": (functions.sinh, 1),
        "cosh": (functions.cosh, 1),
        "tanh": (functions.tanh, 1),
        "tanh_half": (functions.tanh_half, 1),
        "asinh": (functions.asinh, 1),
        "acosh": (functions.acosh, 1),
        "atanh": (functions.atanh, 1),
        # Activations
        "relu": (relu, 1),
        "clip": (clip, 1),
        "leaky_relu": (leaky_relu, 1),
        "prelu": (prelu, 2),
        "hard_sigmoid": (hard_sigmoid, 1),
        "hard_swish": (hard_swish, 1),
        "sigmoid": (functions.sigmoid, 1),
        "silu": (functions.silu, 1),
        "silu_half": (functions.silu_half, 1),
        "erf": (tl.erf, 1),
        "gelu": (functions.gelu, 1),
        "gelu_half": (functions.gelu_half, 1),
        "gelu_tanh": (functions.gelu_tanh, 1),
        "gelu_tanh_half": (functions.gelu_tanh_half, 1),
        "mish": (functions.mish, 1),
        "softplus": (functions.softplus, 1),
        "softsign": (softsign, 1),
        "elu": (elu, 1),
        "celu": (celu, 1),
        "selu": (selu, 1),
        "shrink": (shrink, 1),
        "thresholded_relu": (thresholded_relu, 1),
        # INT8
        "real": (dequantize, 1),
        "round_int8": (quantize, 1),
        "near_int8": (quantize_near, 1),
        "relu_int8": (relu_int8, 1),
        # FP8
        "to_float8": (to_float8, 1),
        "gelu_to_float8": (gelu_to_float8, 1),
        "from_float8": (from_float8, 1),
        # Integers
        "int_div": (tl.tensor.__floordiv__, 2),  # without its fraction, as in C
        "int_remainder": (tl.tensor.__mod__, 2),
        "int_power": (functions.integer_power, 2),
        "bit_not": (tl.tensor.__invert__, 1),
        "shift_left": (tl.tensor.__lshift__, 2),
        "shift_right": (tl.tensor.__rshift__, 2),
        # Comparisons and logic
        "equal": (tl.tensor.__eq__, 2),
        "less": (tl.tensor.__lt__, 2),
        "greater": (tl.tensor.__gt__, 2),
        "less_equal": (tl.tensor.__le__, 2),
        "greater_equal": (tl.tensor.__ge__, 2),
        "is_nan": (is_nan, 1),
        "is_infinite": (is_infinite, 1),
        "not": (is_zero, 1),
        "and": (tl.tensor.__and__, 2),
        "or": (tl.tensor.__or__, 2),
        "xor": (tl.tensor.__xor__, 2),
    }


@triton.constexpr_function
def primitive(name):
    """Return the row of the table for a step, whose name is that of the row, or "NAME_by"."""
    row = table().get(name.removesuffix("_by"))
    if row is None:
        raise ValueError(f"{name!r} is not a primitive operator")
    return row


@triton.constexpr_function
def reads_scalar(name):
    """Whether the number of a step, "NAME_by", is the index of a scalar argument of the kernel."""
    return name.endswith("_by")


@triton.constexpr_function
def _triton_type(name):
    """Return the type in which values of numpy's type `name` are computed with."""
    return {
        "float32": tl.float32,
        "float64": tl.float32,
        "int8": tl.int8,
        "int16": tl.int16,
        "int32": tl.int32,
        "int64": tl.int64,
        "uint8": tl.uint8,
        "uint16": tl.uint16,
        "uint32": tl.uint32,
        "uint64": tl.uint64,
    }[name]


@triton.jit
def constant(SHAPE: tl.constexpr, NUMBER: tl.constexpr, DTYPE: tl.constexpr = "float32"):
    """A block of NUMBER."""
    if DTYPE == "float32":
        result = tl.full(SHAPE, NUMBER, tl.float32)
    else:
        result = cast(tl.full(SHAPE, NUMBER, tl.int64), DTYPE)
    return result


@triton.jit
def same(x):
    """x."""
    return x


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """x in an element type of numpy's name.

    A float loses its fraction; an integer type that is too small takes the low bits. A float out of
    range is not defined, in ONNX as here.
    """
    if DTYPE == "bool":
        result = x != 0
    elif DTYPE == "float16":
        result = x.to(tl.float16).to(tl.float32)
    else:
        result = x.to(_triton_type(DTYPE))
    return result


@triton.jit
def is_zero(x):
    """x == 0."""
    return x == 0


@triton.jit
def is_nonzero(x):
    """x != 0, which NaN is."""
    return x != 0


@triton.jit
def is_nan(x):
    """Whether x is NaN; no integer is."""
    return x != x


@triton.jit
def is_infinite(x, POSITIVE: tl.constexpr, NEGATIVE: tl.constexpr):
    """x == inf where POSITIVE is true, x == -inf where NEGATIVE is."""
    above, below = x == float("inf"), x == float("-inf")
    return (above & POSITIVE) | (below & NEGATIVE)


@triton.jit
def sign(x):
    """-1, 0 or 1 in the type of x; NaN stays."""
    above, below = x > 0, x < 0
    return tl.where(is_nan(x), x, above.to(x.dtype) - below.to(x.dtype))


@triton.jit
def reciprocal(x):
    """1 / x."""
    return 1.0 / x


@triton.jit
def maximum(a, b):
    """The larger one, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller one, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu(x):
    """max(x, 0); NaN stays."""
    return tl.where(x < 0, 0, x)


@triton.jit
def clip(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """min(max(x, LOW), HIGH)."""
    return minimum(maximum(x, LOW), HIGH)


@triton.jit
def leaky_relu(x, ALPHA: tl.constexpr):
    """ALPHA x below 0, x elsewhere."""
    return tl.where(x < 0.0, ALPHA * x, x)


@triton.jit
def prelu(x, slope):
    """x slope below 0, x elsewhere."""
    return tl.where(x < 0, slope * x, x)


@triton.jit
def hard_sigmoid(x, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """min(max(ALPHA x + BETA, 0), 1)."""
    return clip(ALPHA * x + BETA, 0.0, 1.0)


@triton.jit
def hard_swish(x):
    """x min(max(x / 6 + 1 / 2, 0), 1)."""
    if INTERPRETED:
        factor = hard_sigmoid(x, 0.16666666666666666, 0.5)
    else:
        factor = tl.inline_asm_elementwise(
            "add.rn.sat.f32 $0, $1, 0f3F000000;", "=f,f", [x * 0.16666666666666666], tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return x * factor


@triton.jit
def softsign(x):
    """x / (1 + |x|)."""
    return x / (1.0 + tl.abs(x))


@triton.jit
def elu(x, ALPHA: tl.constexpr):
    """ALPHA (exp(x) - 1) below 0, x elsewhere."""
    return tl.where(x < 0.0, ALPHA * functions.expm1(x), x)


@triton.jit
def celu(x, ALPHA: tl.constexpr):
    """ALPHA (exp(x / ALPHA) - 1) below 0, x elsewhere."""
    return tl.where(x < 0.0, ALPHA * functions.expm1(x / ALPHA), x)


@triton.jit
def selu(x, ALPHA: tl.constexpr, GAMMA: tl.constexpr):
    """GAMMA elu(x)."""
    return GAMMA * elu(x, ALPHA)


@triton.jit
def shrink(x, LAMBDA: tl.constexpr, BIAS: tl.constexpr):
    """x nearer to 0 by BIAS; 0 for |x| <= LAMBDA."""
    nearer = tl.where(x < 0, x + BIAS, x - BIAS)
    return tl.where(tl.abs(x) > LAMBDA, nearer, 0)


@triton.jit
def thresholded_relu(x, ALPHA: tl.constexpr):
    """x above ALPHA, 0 elsewhere."""
    return tl.where(x > ALPHA, x, 0.0)


@triton.jit
def dequantize(q, SCALE):
    """q SCALE, float32."""
    return as_float(q) * SCALE


@triton.jit
def quantize(x, FACTOR):
    """x FACTOR to the nearest INT8."""
    return round_int8(x * FACTOR)


@triton.jit
def quantize_near(x, FACTOR):
    """x FACTOR to the nearest number of INT8, float32."""
    return near_int8(x * FACTOR)


@triton.jit
def to_float8(x, FACTOR):
    """x FACTOR to the nearest E4M3; what is beyond its range becomes its largest number.

    Instructions of GPUs do that by themselves.
    """
    x = x * FACTOR
    if INTERPRETED:
        x = clip(x, -448.0, 448.0)
    return x.to(tl.float8e4nv)


@triton.jit
def gelu_to_float8(x, FACTOR):
    """x Phi(x) FACTOR to the nearest E4M3, in FP16 by pairs; for factors from 2**-7 to 2048.

    As `functions.gelu_half`; x is at least -6, so that FP16 overflows only where E4M3 does.
    """
    if INTERPRETED:
        result = to_float8(functions.gelu(x), FACTOR)
    else:
        result = tl.inline_asm_elementwise(
            """{
            .reg .b32 x<2>, u<2>, q<2>, p<2>, f, c, d;
            .reg .b16 r<2>;
            cvt.rn.f16x2.f32 x0, $2, $1;
            cvt.rn.f16x2.f32 x1, $4, $3;
            cvt.rn.f16x2.f32 f, $5, $5;
            mov.b32 c, 0xC600C600;
            max.NaN.f16x2 x0, x0, c;
            max.NaN.f16x2 x1, x1, c;
            mov.b32 c, 0x31553155;
            mul.rn.f16x2 u0, x0, c;
            mul.rn.f16x2 u1, x1, c;
            mul.rn.sat.f16x2 q0, u0, u0;
            mul.rn.sat.f16x2 q1, u1, u1;
            mov.b32 c, 0x47FE47FE;
            mov.b32 d, 0xC177C177;
            fma.rn.f16x2 p0, q0, d, c;
            fma.rn.f16x2 p1, q1, d, c;
            mov.b32 c, 0x44C944C9;
            fma.rn.f16x2 p0, q0, p0, c;
            fma.rn.f16x2 p1, q1, p1, c;
            mul.rn.f16x2 u0, u0, p0;
            mul.rn.f16x2 u1, u1, p1;
            tanh.approx.f16x2 u0, u0;
            tanh.approx.f16x2 u1, u1;
            mul.rn.f16x2 x0, x0, f;
            mul.rn.f16x2 x1, x1, f;
            fma.rn.f16x2 x0, x0, u0, x0;
            fma.rn.f16x2 x1, x1, u1, x1;
            cvt.rn.satfinite.e4m3x2.f16x2 r0, x0;
            cvt.rn.satfinite.e4m3x2.f16x2 r1, x1;
            mov.b32 $0, {r0, r1};
            }""",
            "=r,f,f,f,f,f,f,f,f", [x, 0.5 * FACTOR], tl.float8e4nv, is_pure=True, pack=4,
        )  # fmt: skip
    return result


@triton.jit
def from_float8(q, SCALE):
    """q SCALE, float32."""
    return q.to(tl.float32) * SCALE
