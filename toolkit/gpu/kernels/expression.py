"""Element-wise expressions, evaluated inside every kernel that stores a result.

    v[0..n-1]  the operands: float32, integers of their own width, bools
    v[n + i] = EPILOGUE[i] of earlier values
    result   = the last v

A step is (operator, index of a value, ...); what follows the indices are numbers, or indices of
scalar arguments of the kernel, so that kernels of one shape and other scales are one kernel.
Triton unrolls the steps while it compiles.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.int8 import FIRST_SM_WITH_NAN_MAX, INTERPRETED, as_float, compiled_for
from toolkit.gpu.kernels.primitives import primitive, reads_scalar
from toolkit.gpu.kernels.strided_rows import in_bounds


@triton.jit
def _scalar(scalars, INDEX: tl.constexpr):
    if isinstance(scalars, tl.tensor):
        result = tl.load(scalars + INDEX)
    else:
        result = scalars[INDEX]
    return result


@triton.jit
def _apply(v, STEP: tl.constexpr, scalars):
    """Return the value of one step; one without operands has the shape of the first value."""
    ROW: tl.constexpr = primitive(STEP[0])
    COUNT: tl.constexpr = ROW[1]
    operands = ()
    for i in tl.static_range(COUNT):
        operands = operands + (v[STEP[i + 1]],)
    if COUNT == 0:
        result = ROW[0](v[0].shape, *STEP[1:])
    elif reads_scalar(STEP[0]):
        result = ROW[0](*operands, _scalar(scalars, STEP[COUNT + 1]))
    else:
        result = ROW[0](*operands, *STEP[COUNT + 1 :])
    return result


@triton.constexpr_function
def _rectifies_pairs(epilogue, dtype, elements):
    """Whether pairs of FP16 end as "relu", or as "clip" from 0 on."""
    if INTERPRETED or dtype != tl.float16 or elements % 2 or len(epilogue) == 0:
        return False
    return epilogue[-1][0] == "relu" or (epilogue[-1][0] == "clip" and epilogue[-1][2] == 0)


@triton.jit
def _rectify_pairs(x, STEP: tl.constexpr):
    """Return "relu" or "clip" in FP16: the conversion rectifies."""
    result = tl.inline_asm_elementwise(
        "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, is_pure=True, pack=2
    )
    if STEP[0] == "clip":
        limit = tl.full(x.shape, STEP[3], tl.float16)
        result = tl.inline_asm_elementwise(
            "min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [result, limit], tl.float16, is_pure=True, pack=2
        )
    return result


@triton.jit
def evaluate(v, EPILOGUE: tl.constexpr, scalars=None, DTYPE: tl.constexpr = None):
    """Return the value of the last step; `v` is a tuple of blocks of one shape.

    `scalars`: a pointer to them, or a tuple of them. DTYPE: what the caller makes of the value.
    """
    PAIRS: tl.constexpr = _rectifies_pairs(EPILOGUE, DTYPE, v[0].numel) and compiled_for(
        FIRST_SM_WITH_NAN_MAX
    )
    for i in tl.static_range(len(EPILOGUE) - PAIRS):
        v = v + (_apply(v, EPILOGUE[i], scalars),)
    result = v[len(v) - 1]
    if PAIRS:
        result = _rectify_pairs(v[EPILOGUE[-1][1]].to(tl.float32), EPILOGUE[-1])
    return result


@triton.jit
def load_columns(scalars, column, COLUMNS: tl.constexpr):
    """Return a number for each column, 0 where there is none; COLUMNS None: there are all."""
    if COLUMNS is None:
        values = tl.load(scalars + column)
    else:
        values = tl.load(scalars + column, mask=column < COLUMNS, other=0)
    return values


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
    """Return residual[row, column] for `store_with_epilogue`, None of None."""
    if residual is not None:
        inside = in_bounds(row, rows, column, COLUMNS)
        offset = row[:, None] * R_PITCH + column[None, :]
        residual = tl.load(residual + offset, mask=inside, other=0)
    return residual


@triton.jit
def apply_epilogue(
    total, bias, scale, residual, column, COLUMNS: tl.constexpr, EPILOGUE: tl.constexpr,
    scalars=None, DTYPE: tl.constexpr = None
):  # fmt: skip
    """Return EPILOGUE((total + bias[column]) scale[column], residual), for results of DTYPE."""
    if bias is not None:
        total += load_columns(bias, column, COLUMNS)[None, :]
    if scale is not None:
        total = total.to(tl.float32) * load_columns(scale, column, COLUMNS)[None, :]
    if residual is not None:
        total = evaluate((total, as_float(residual)), EPILOGUE, scalars, DTYPE)
    else:
        total = evaluate((total,), EPILOGUE, scalars, DTYPE)
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
    inside = in_bounds(row, rows, column, COLUMNS)
    DTYPE: tl.constexpr = y.dtype.element_ty
    total = apply_epilogue(total, bias, scale, residual, column, COLUMNS, EPILOGUE, scalars, DTYPE)
    offset = row[:, None] * Y_PITCH + column[None, :]
    tl.store(y + offset, total.to(DTYPE), mask=inside)
