"""Element-wise expressions, evaluated inside every kernel that stores a result.

    v[0..n-1]  the operands: float32, integers of their own width, bools
    v[n + i] = EPILOGUE[i] of earlier values
    result   = the last v

A step is (operator, index of a value, ...); what follows the indices are numbers, or indices of
scalar arguments of the kernel, so that kernels of one shape and other scales are one kernel.
Triton unrolls the steps while it compiles, so an expression costs its arithmetic and nothing else.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels import functions
from toolkit.gpu.kernels.int8 import as_float, near_int8, relu_int8, round_int8, scaled_rectified


@triton.jit
def _number(scalars, AT: tl.constexpr):
    if isinstance(scalars, tl.tensor):
        result = tl.load(scalars + AT)
    else:
        result = scalars[AT]
    return result


@triton.jit
def _apply(v, STEP: tl.constexpr, scalars):
    """Return the value of one step: arithmetic, and what networks use most."""
    OP: tl.constexpr = STEP[0]
    if OP == "constant":
        if len(STEP) > 2:
            result = _cast(tl.full(v[0].shape, STEP[1], tl.int64), STEP[2])
        else:
            result = tl.full(v[0].shape, STEP[1], tl.float32)
    elif OP == "same":
        result = v[STEP[1]]
    elif OP == "bool":
        result = v[STEP[1]] != 0
    elif OP == "relu":
        result = tl.where(v[STEP[1]] < 0, 0, v[STEP[1]])  # NaN stays, unlike with a maximum
    elif OP == "clip":
        result = _clip(v[STEP[1]], STEP[2], STEP[3])
    elif OP == "leaky_relu":
        result = tl.where(v[STEP[1]] < 0.0, STEP[2] * v[STEP[1]], v[STEP[1]])
    elif OP == "prelu":
        result = tl.where(v[STEP[1]] < 0, v[STEP[2]] * v[STEP[1]], v[STEP[1]])
    elif OP == "hard_sigmoid":
        result = _clip(STEP[2] * v[STEP[1]] + STEP[3], 0.0, 1.0)
    elif OP == "sigmoid":
        result = functions.sigmoid(v[STEP[1]])
    elif OP == "silu":
        result = functions.silu(v[STEP[1]])
    elif OP == "silu_half":
        result = functions.silu_half(v[STEP[1]])
    elif OP == "tanh":
        result = functions.tanh(v[STEP[1]])
    elif OP == "tanh_half":
        result = functions.tanh_half(v[STEP[1]])
    elif OP == "exp":
        result = tl.exp(v[STEP[1]])
    elif OP == "log":
        result = tl.log(v[STEP[1]])
    elif OP == "sqrt":
        result = tl.sqrt(v[STEP[1]])
    elif OP == "erf":
        result = tl.erf(v[STEP[1]])
    elif OP == "gelu":
        result = functions.gelu(v[STEP[1]])
    elif OP == "gelu_half":
        result = functions.gelu_half(v[STEP[1]])
    elif OP == "neg":
        result = -v[STEP[1]]
    elif OP == "abs":
        result = tl.abs(v[STEP[1]])
    elif OP == "reciprocal":
        result = 1.0 / v[STEP[1]]
    elif OP == "add":
        result = v[STEP[1]] + v[STEP[2]]
    elif OP == "sub":
        result = v[STEP[1]] - v[STEP[2]]
    elif OP == "mul":
        result = v[STEP[1]] * v[STEP[2]]
    elif OP == "div":
        result = tl.div_rn(v[STEP[1]], v[STEP[2]])  # what is rounded after it must not tip
    elif OP == "max":
        result = tl.where((v[STEP[1]] > v[STEP[2]]) | _is_nan(v[STEP[1]]), v[STEP[1]], v[STEP[2]])
    elif OP == "min":
        result = tl.where((v[STEP[1]] < v[STEP[2]]) | _is_nan(v[STEP[1]]), v[STEP[1]], v[STEP[2]])
    elif OP == "where":
        result = tl.where(v[STEP[1]], v[STEP[2]], v[STEP[3]])
    elif OP == "real":
        result = as_float(v[STEP[1]]) * STEP[2]
    elif OP == "round_int8":
        result = round_int8(v[STEP[1]] * STEP[2])
    elif OP == "near_int8":
        result = near_int8(v[STEP[1]] * STEP[2])
    elif OP == "relu_int8":
        result = relu_int8(v[STEP[1]], STEP[2])
    elif OP == "real_by":
        result = as_float(v[STEP[1]]) * _number(scalars, STEP[2])
    elif OP == "rectified_by":
        result = scaled_rectified(v[STEP[1]], _number(scalars, STEP[2]))
    elif OP == "round_int8_by":
        result = round_int8(v[STEP[1]] * _number(scalars, STEP[2]))
    elif OP == "near_int8_by":
        result = near_int8(v[STEP[1]] * _number(scalars, STEP[2]))
    elif OP == "relu_int8_by":
        result = relu_int8(v[STEP[1]], _number(scalars, STEP[2]))
    elif OP == "cast":
        result = _cast(v[STEP[1]], STEP[2])
    else:
        result = _apply_function(v, STEP)
    return result


@triton.jit
def _apply_function(v, STEP: tl.constexpr):
    """Functions of floats."""
    OP: tl.constexpr = STEP[0]
    if OP == "sin":
        result = tl.sin(functions.reduce_angle(v[STEP[1]]))
    elif OP == "cos":
        result = tl.cos(functions.reduce_angle(v[STEP[1]]))
    elif OP == "tan":
        result = functions.tan(v[STEP[1]])
    elif OP == "asin":
        result = functions.asin(v[STEP[1]])
    elif OP == "acos":
        result = functions.acos(v[STEP[1]])
    elif OP == "atan":
        result = functions.atan(v[STEP[1]])
    elif OP == "sinh":
        result = functions.sinh(v[STEP[1]])
    elif OP == "cosh":
        result = 0.5 * (tl.exp(v[STEP[1]]) + tl.exp(-v[STEP[1]]))
    elif OP == "asinh":
        result = functions.asinh(v[STEP[1]])
    elif OP == "acosh":
        result = functions.acosh(v[STEP[1]])
    elif OP == "atanh":
        result = functions.atanh(v[STEP[1]])
    elif OP == "gelu_tanh":
        result = functions.gelu_tanh(v[STEP[1]])
    elif OP == "gelu_tanh_half":
        result = functions.gelu_tanh_half(v[STEP[1]])
    elif OP == "mish":
        result = functions.mish(v[STEP[1]])
    elif OP == "softplus":
        result = functions.softplus(v[STEP[1]])
    elif OP == "softsign":
        result = v[STEP[1]] / (1.0 + tl.abs(v[STEP[1]]))
    elif OP == "elu":
        result = tl.where(v[STEP[1]] < 0.0, STEP[2] * functions.expm1(v[STEP[1]]), v[STEP[1]])
    elif OP == "celu":
        low = STEP[2] * functions.expm1(v[STEP[1]] / STEP[2])
        result = tl.where(v[STEP[1]] < 0.0, low, v[STEP[1]])
    elif OP == "selu":
        low = STEP[2] * functions.expm1(v[STEP[1]])
        result = STEP[3] * tl.where(v[STEP[1]] < 0.0, low, v[STEP[1]])
    elif OP == "shrink":
        far = tl.where(v[STEP[1]] < 0, v[STEP[1]] + STEP[3], v[STEP[1]] - STEP[3])
        result = tl.where(tl.abs(v[STEP[1]]) > STEP[2], far, 0)
    elif OP == "thresholded":
        result = tl.where(v[STEP[1]] > STEP[2], v[STEP[1]], 0.0)
    elif OP == "floor":
        result = tl.floor(v[STEP[1]])
    elif OP == "ceil":
        result = tl.ceil(v[STEP[1]])
    elif OP == "round":
        result = functions.round_half_even(v[STEP[1]])
    elif OP == "power":
        result = functions.power(v[STEP[1]], v[STEP[2]])
    elif OP == "remainder":
        result = functions.remainder(v[STEP[1]], v[STEP[2]])
    else:
        result = _apply_whole(v, STEP)
    return result


@triton.jit
def _apply_whole(v, STEP: tl.constexpr):
    """Integers, comparisons and logic."""
    OP: tl.constexpr = STEP[0]
    if OP == "whole_div":
        result = v[STEP[1]] // v[STEP[2]]  # without its fraction, as in C
    elif OP == "whole_remainder":
        result = v[STEP[1]] % v[STEP[2]]
    elif OP == "modulo":
        result = functions.modulo(v[STEP[1]], v[STEP[2]])
    elif OP == "whole_power":
        result = functions.integer_power(v[STEP[1]], v[STEP[2]])
    elif OP == "mixed_power":
        result = functions.mixed_power(v[STEP[1]], v[STEP[2]])
    elif OP == "sign":
        above, below = v[STEP[1]] > 0, v[STEP[1]] < 0
        result = above.to(v[STEP[1]].dtype) - below.to(v[STEP[1]].dtype)
        result = tl.where(_is_nan(v[STEP[1]]), v[STEP[1]], result)
    elif OP == "equal":
        result = v[STEP[1]] == v[STEP[2]]
    elif OP == "less":
        result = v[STEP[1]] < v[STEP[2]]
    elif OP == "greater":
        result = v[STEP[1]] > v[STEP[2]]
    elif OP == "not_greater":
        result = v[STEP[1]] <= v[STEP[2]]
    elif OP == "not_less":
        result = v[STEP[1]] >= v[STEP[2]]
    elif OP == "is_nan":
        result = _is_nan(v[STEP[1]])
    elif OP == "is_infinite":
        above, below = v[STEP[1]] == float("inf"), v[STEP[1]] == float("-inf")
        result = (above & STEP[2]) | (below & STEP[3])
    elif OP == "not":
        result = v[STEP[1]] == 0
    elif OP == "and":
        result = v[STEP[1]] & v[STEP[2]]
    elif OP == "or":
        result = v[STEP[1]] | v[STEP[2]]
    elif OP == "xor":
        result = v[STEP[1]] ^ v[STEP[2]]
    elif OP == "bit_not":
        result = ~v[STEP[1]]
    elif OP == "shift_left":
        result = v[STEP[1]] << v[STEP[2]]
    elif OP == "shift_right":
        result = v[STEP[1]] >> v[STEP[2]]
    else:
        tl.static_assert(False, "an operator that expressions do not have")
    return result


@triton.jit
def _cast(a, NAME: tl.constexpr):
    """Return a value in an element type of numpy's name; doubles are computed with as FP32.

    A float loses its fraction; an integer type that is too small takes the low bits. A float out of
    range is not defined, in ONNX as here.
    """
    if NAME == "bool":
        result = a != 0
    elif NAME == "float16":
        result = a.to(tl.float16).to(tl.float32)
    elif NAME == "float32" or NAME == "float64":
        result = a.to(tl.float32)
    elif NAME == "int64":
        result = a.to(tl.int64)
    elif NAME == "int32":
        result = a.to(tl.int32)
    elif NAME == "int16":
        result = a.to(tl.int16)
    elif NAME == "int8":
        result = a.to(tl.int8)
    elif NAME == "uint64":
        result = a.to(tl.uint64)
    elif NAME == "uint32":
        result = a.to(tl.uint32)
    elif NAME == "uint16":
        result = a.to(tl.uint16)
    elif NAME == "uint8":
        result = a.to(tl.uint8)
    else:
        tl.static_assert(False, "an element type that expressions do not have")
    return result


@triton.jit
def _is_nan(a):
    return a != a


@triton.jit
def _clip(a, LOW: tl.constexpr, HIGH: tl.constexpr):
    a = tl.where(a < LOW, LOW, a)
    return tl.where(a > HIGH, HIGH, a)


@triton.jit
def load_scalars(scalars, COUNT: tl.constexpr):
    """Return the first COUNT numbers for `evaluate`, so that a loop does not load them again."""
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(scalars + i),)
    return values


@triton.jit
def evaluate(v, EPILOGUE: tl.constexpr, scalars=None):
    """Return the value of the last step; `v` is a tuple of blocks of one shape.

    `scalars`: a pointer to them, or a tuple of them.
    """
    for i in tl.static_range(len(EPILOGUE)):
        v = v + (_apply(v, EPILOGUE[i], scalars),)
    return v[len(v) - 1]


@triton.jit
def evaluate_operand(v, EPILOGUE: tl.constexpr, scalars):
    """Return what the last step is applied to: the value that its index names."""
    for i in tl.static_range(len(EPILOGUE) - 1):
        v = v + (_apply(v, EPILOGUE[i], scalars),)
    return v[EPILOGUE[len(EPILOGUE) - 1][1]]


@triton.jit
def first_sums(bias, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return what sums of INT8 begin with, [ROWS, WIDTH]: the bias of each column, or 0."""
    sums = tl.zeros((ROWS, WIDTH), tl.int32)
    if bias is not None:
        sums += load_columns(bias, column, COLUMNS)[None, :]
    return sums


@triton.jit
def load_columns(scalars, column, COLUMNS: tl.constexpr):
    """Return a number for each column, 0 where there is none; COLUMNS None: there are all."""
    if COLUMNS is None:
        values = tl.load(scalars + column)
    else:
        values = tl.load(scalars + column, mask=column < COLUMNS, other=0)
    return values


@triton.jit
def _in_bounds(row, column, rows, COLUMNS: tl.constexpr):
    """Return the mask of the elements of a block that exist."""
    inside = (row < rows)[:, None]
    if COLUMNS is not None:
        inside = inside & (column < COLUMNS)[None, :]
    return inside


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Return total + a b; products of INT8 are exact sums in INT32."""
    if PRECISION == "int8":
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    elif PRECISION == "int8 as fp16":  # for GPUs where Triton has no products of integers
        total += tl.dot(a.to(tl.float16), b.to(tl.float16)).to(tl.int32)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def load_residual(
    residual, row, column, rows, COLUMNS: tl.constexpr, R_PITCH: tl.constexpr
):  # fmt: skip
    """Return residual[row, column] for `store_with_epilogue`, None of None.

    A kernel loads it before its products, so that memory answers while they are made.
    """
    if residual is not None:
        inside = _in_bounds(row, column, rows, COLUMNS)
        offset = row[:, None] * R_PITCH + column[None, :]
        residual = tl.load(residual + offset, mask=inside, other=0)
    return residual


@triton.jit
def apply_epilogue(
    total, bias, scale, residual, column, COLUMNS: tl.constexpr, EPILOGUE: tl.constexpr,
    scalars=None
):  # fmt: skip
    """Return EPILOGUE((total + bias[column]) scale[column], residual)."""
    if bias is not None:
        total += load_columns(bias, column, COLUMNS)[None, :]
    if scale is not None:
        total = total.to(tl.float32) * load_columns(scale, column, COLUMNS)[None, :]
    if residual is not None:
        total = evaluate((total, as_float(residual)), EPILOGUE, scalars)
    else:
        total = evaluate((total,), EPILOGUE, scalars)
    return total


@triton.jit
def store_with_epilogue(
    total, bias, scale, residual, y, row, column, rows, COLUMNS: tl.constexpr,
    Y_PITCH: tl.constexpr, EPILOGUE: tl.constexpr, scalars=None,
):  # fmt: skip
    """Store y[row, column] = EPILOGUE((total + bias[column]) scale[column], residual[row, column]).

    `total` is a block of row x column, float32, or with `scale` int32, as the bias then is;
    `residual` is what `load_residual` returns. `bias`, `scale` and `residual` may be None. A pitch
    is the distance of two rows in elements.
    """
    inside = _in_bounds(row, column, rows, COLUMNS)
    total = apply_epilogue(total, bias, scale, residual, column, COLUMNS, EPILOGUE, scalars)
    offset = row[:, None] * Y_PITCH + column[None, :]
    tl.store(y + offset, total.to(y.dtype.element_ty), mask=inside)
