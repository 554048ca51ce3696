"""Sums and other reductions along rows of any strides.

    y[r] = EPILOGUE(POST(REDUCE_i PRE(x[r, i])))

    MODE             PRE             REDUCE    POST
    "sum"            x               +         y
    "mean"           x               +         y / COLUMNS
    "max", "min"     x               max, min  y
    "prod"           x               *         y
    "l1"             |x|             +         y
    "l2"             x^2             +         sqrt(y)
    "sum_square"     x^2             +         y
    "lp"             |x|^POWER       +         y^(1 / POWER)
    "log_sum"        x               +         log(y)
    "log_sum_exp"    exp(x - m)      +         log(y) + m,  m = max_i x[r, i]

Floats are reduced in FP32, integers in INT64; only floats have an epilogue. IDENTITY is that of
REDUCE: 0, 1, or the lowest or highest number.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import offsets


@triton.jit
def reduce(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    MODE: tl.constexpr, IDENTITY: tl.constexpr, POWER: tl.constexpr, EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = offsets(r, OUTER, X_STRIDES[0])
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    row_max = tl.zeros((ROWS,), tl.float32)
    if MODE == "log_sum_exp":
        maxima = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
            offset = row[:, None] + offsets(i, INNER, X_STRIDES[1])[None, :]
            value = tl.load(x + offset, mask=inside, other=float("-inf")).to(tl.float32)
            maxima = tl.maximum(maxima, value)
        row_max = tl.max(maxima, 1)
        row_max = tl.where(tl.abs(row_max) == float("inf"), 0.0, row_max)

    total = tl.full((ROWS, BLOCK), IDENTITY, TYPE)
    for start in range(0, COLUMNS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
        offset = row[:, None] + offsets(i, INNER, X_STRIDES[1])[None, :]
        value = tl.load(x + offset, mask=inside, other=0).to(TYPE)
        value = _pre(value, row_max, MODE, POWER)
        total = _combine(total, tl.where(inside, value, IDENTITY), MODE)

    if MODE == "max":
        result = tl.max(total, 1)
    elif MODE == "min":
        result = tl.min(total, 1)
    elif MODE == "prod":
        result = tl.reduce(total, 1, _multiply)
    else:
        result = tl.sum(total, 1)
    result = _post(result, row_max, COLUMNS, MODE, POWER)
    if FLOAT:
        result = evaluate((result,), EPILOGUE)
    tl.store(y + offsets(r, OUTER, Y_STRIDES[0]), result.to(y.dtype.element_ty), mask=r < rows)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _pre(value, row_max, MODE: tl.constexpr, POWER: tl.constexpr):
    if MODE == "l1":
        result = tl.abs(value)
    elif MODE == "l2" or MODE == "sum_square":
        result = value * value
    elif MODE == "lp":
        result = tl.where(value == 0.0, 0.0, tl.exp2(POWER * tl.log2(tl.abs(value))))
    elif MODE == "log_sum_exp":
        result = tl.exp(value - row_max[:, None])
    else:
        result = value
    return result


@triton.jit
def _combine(total, value, MODE: tl.constexpr):
    if MODE == "max":
        result = tl.maximum(total, value)
    elif MODE == "min":
        result = tl.minimum(total, value)
    elif MODE == "prod":
        result = total * value
    else:
        result = total + value
    return result


@triton.jit
def _post(total, row_max, COLUMNS: tl.constexpr, MODE: tl.constexpr, POWER: tl.constexpr):
    if MODE == "mean" and total.dtype.is_floating():
        result = total / COLUMNS
    elif MODE == "mean":
        result = total // COLUMNS
    elif MODE == "l2":
        result = tl.sqrt(total.to(tl.float32))
    elif MODE == "lp":
        result = tl.where(total == 0.0, 0.0, tl.exp2(tl.log2(total) / POWER))
    elif MODE == "log_sum":
        result = tl.log(total.to(tl.float32))
    elif MODE == "log_sum_exp":
        result = tl.log(total.to(tl.float32)) + row_max
    else:
        result = total
    return result


@triton.jit
def arg_reduce(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    IS_MAX: tl.constexpr, LAST: tl.constexpr, IDENTITY: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[r] = the first i, or with LAST the last, where x[r, i] is the row's maximum or minimum.

    Grid: (blocks of rows).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = offsets(r, OUTER, X_STRIDES[0])
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    best = tl.full((ROWS,), IDENTITY, TYPE)
    best_index = tl.zeros((ROWS,), tl.int32)
    for start in range(0, COLUMNS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
        offset = row[:, None] + offsets(i, INNER, X_STRIDES[1])[None, :]
        value = tl.load(x + offset, mask=inside, other=0).to(TYPE)
        value = tl.where(inside, value, IDENTITY)
        extreme = tl.max(value, 1) if IS_MAX else tl.min(value, 1)
        equal = (value == extreme[:, None]) & inside
        if LAST:
            index = tl.max(tl.where(equal, i[None, :], 0), 1)
            better = extreme >= best if IS_MAX else extreme <= best
        else:
            index = tl.min(tl.where(equal, i[None, :], COLUMNS), 1)
            better = extreme > best if IS_MAX else extreme < best
        best_index = tl.where(better, index, best_index)
        best = tl.where(better, extreme, best)
    best_index = best_index.to(y.dtype.element_ty)
    tl.store(y + offsets(r, OUTER, Y_STRIDES[0]), best_index, mask=r < rows)
