"""Element-wise expressions, evaluated inside every kernel that stores a result.

    v[0..n-1]  the operands, float32
    v[n + i] = STEPS[i] of earlier values
    result   = the last v

A step is (operator, index of a value, ...); what follows the indices are numbers. Triton unrolls
the steps while it compiles, so an expression costs its arithmetic and nothing else.
"""

import triton
import triton.language as tl


@triton.jit
def _apply(v, STEP: tl.constexpr):
    OP: tl.constexpr = STEP[0]
    if OP == "constant":
        result = STEP[1]
    elif OP == "relu":
        result = tl.where(v[STEP[1]] < 0.0, 0.0, v[STEP[1]])  # NaN stays, unlike with a maximum
    elif OP == "clip":
        result = _clip(v[STEP[1]], STEP[2], STEP[3])
    elif OP == "leaky_relu":
        result = tl.where(v[STEP[1]] < 0.0, STEP[2] * v[STEP[1]], v[STEP[1]])
    elif OP == "hard_sigmoid":
        result = _clip(STEP[2] * v[STEP[1]] + STEP[3], 0.0, 1.0)
    elif OP == "sigmoid":
        result = 1.0 / (1.0 + tl.exp(-v[STEP[1]]))
    elif OP == "exp":
        result = tl.exp(v[STEP[1]])
    elif OP == "sqrt":
        result = tl.sqrt(v[STEP[1]])
    elif OP == "erf":
        result = tl.erf(v[STEP[1]])
    elif OP == "neg":
        result = -v[STEP[1]]
    elif OP == "abs":
        result = tl.abs(v[STEP[1]])
    elif OP == "add":
        result = v[STEP[1]] + v[STEP[2]]
    elif OP == "sub":
        result = v[STEP[1]] - v[STEP[2]]
    elif OP == "mul":
        result = v[STEP[1]] * v[STEP[2]]
    elif OP == "div":
        result = v[STEP[1]] / v[STEP[2]]
    elif OP == "real":
        result = v[STEP[1]].to(tl.float32) * STEP[2]
    elif OP == "round_int8":
        result = _round_int8(v[STEP[1]] * STEP[2])
    else:
        tl.static_assert(False, "an operator that expressions do not have")
    return result


@triton.jit
def _round_int8(a):
    """Round to the nearest whole number in -128..127, halves to even."""
    a = tl.minimum(tl.maximum(a, -128.0), 127.0)
    return (a + 12582912.0) - 12582912.0  # 1.5 * 2**23: no float32 so large has a fraction


@triton.jit
def _clip(a, LOW: tl.constexpr, HIGH: tl.constexpr):
    a = tl.where(a < LOW, LOW, a)
    return tl.where(a > HIGH, HIGH, a)


@triton.jit
def evaluate(v, STEPS: tl.constexpr):
    """Return the value of the last step; `v` is a tuple of float32 blocks of one shape."""
    for i in tl.static_range(len(STEPS)):
        v = v + (_apply(v, STEPS[i]),)
    return v[len(v) - 1]


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
def store_rows(
    total, bias, scale, residual, y, row, column, rows, COLUMNS: tl.constexpr,
    Y_PITCH: tl.constexpr, R_PITCH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Store y[row, column] = STEPS((total + bias[column]) scale[column], residual[row, column]).

    `total` is a block of row x column, float32, or with `scale` int32, as the bias then is; `bias`,
    `scale` and `residual` may be None. A pitch is the distance of two rows in elements.
    """
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=column < COLUMNS, other=0)[None, :]
    if scale is not None:
        factor = tl.load(scale + column, mask=column < COLUMNS, other=0.0)
        total = total.to(tl.float32) * factor[None, :]
    if residual is not None:
        place = row[:, None] * R_PITCH + column[None, :]
        operand = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        total = evaluate((total, operand), STEPS)
    else:
        total = evaluate((total,), STEPS)
    place = row[:, None] * Y_PITCH + column[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
