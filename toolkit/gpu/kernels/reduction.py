"""Sums and other reductions along rows of any strides.

    y[r] = STEPS(AFTER(JOIN_i BEFORE(x[r, i])))

    MODE             BEFORE          JOIN      AFTER
    "sum"            x               +         y
    "mean"           x               +         y / COLUMNS
    "max", "min"     x               max, min  y
    "prod"           x               *         y
    "l1"             |x|             +         y
    "l2"             x^2             +         sqrt(y)
    "sum_square"     x^2             +         y
    "lp"             |x|^POWER       +         y^(1 / POWER)
    "log_sum"        x               +         log(y)
    "log_sum_exp"    exp(x - most)   +         log(y) + most,  most = max_i x[r, i]

Floats are reduced in FP32, integers in 64 bits; STEPS follow floats only.
START is where JOIN starts: 0, 1, or less or more than every number.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import walk


@triton.jit
def reduce(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    MODE: tl.constexpr, START: tl.constexpr, POWER: tl.constexpr, EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = walk(r, OUTER, X_STRIDES[0])
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    most = tl.zeros((ROWS,), tl.float32)
    if MODE == "log_sum_exp":
        found = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
            place = row[:, None] + walk(i, INNER, X_STRIDES[1])[None, :]
            value = tl.load(x + place, mask=inside, other=float("-inf")).to(tl.float32)
            found = tl.maximum(found, value)
        most = tl.max(found, 1)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)

    total = tl.full((ROWS, BLOCK), START, TYPE)
    for start in range(0, COLUMNS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
        place = row[:, None] + walk(i, INNER, X_STRIDES[1])[None, :]
        value = tl.load(x + place, mask=inside, other=0).to(TYPE)
        value = _before(value, most, MODE, POWER)
        total = _join(total, tl.where(inside, value, START), MODE)

    if MODE == "max":
        result = tl.max(total, 1)
    elif MODE == "min":
        result = tl.min(total, 1)
    elif MODE == "prod":
        result = tl.reduce(total, 1, _multiply)
    else:
        result = tl.sum(total, 1)
    result = _after(result, most, COLUMNS, MODE, POWER)
    if FLOAT:
        result = evaluate((result,), EPILOGUE)
    tl.store(y + walk(r, OUTER, Y_STRIDES[0]), result.to(y.dtype.element_ty), mask=r < rows)


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _before(value, most, MODE: tl.constexpr, POWER: tl.constexpr):
    if MODE == "l1":
        result = tl.abs(value)
    elif MODE == "l2" or MODE == "sum_square":
        result = value * value
    elif MODE == "lp":
        result = tl.where(value == 0.0, 0.0, tl.exp2(POWER * tl.log2(tl.abs(value))))
    elif MODE == "log_sum_exp":
        result = tl.exp(value - most[:, None])
    else:
        result = value
    return result


@triton.jit
def _join(total, value, MODE: tl.constexpr):
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
def _after(total, most, COLUMNS: tl.constexpr, MODE: tl.constexpr, POWER: tl.constexpr):
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
        result = tl.log(total.to(tl.float32)) + most
    else:
        result = total
    return result


@triton.jit
def find_extreme(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    GREATEST: tl.constexpr, LAST: tl.constexpr, START: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[r] = the first i, or the LAST, where x[r, i] is the GREATEST of its row, or the least.

    Grid: (blocks of rows).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = walk(r, OUTER, X_STRIDES[0])
    FLOAT: tl.constexpr = x.dtype.element_ty.is_floating()
    TYPE: tl.constexpr = tl.float32 if FLOAT else tl.int64
    best = tl.full((ROWS,), START, TYPE)
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(0, COLUMNS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = (r < rows)[:, None] & (i < COLUMNS)[None, :]
        place = row[:, None] + walk(i, INNER, X_STRIDES[1])[None, :]
        value = tl.load(x + place, mask=inside, other=0).to(TYPE)
        value = tl.where(inside, value, START)
        here = tl.max(value, 1) if GREATEST else tl.min(value, 1)
        equal = (value == here[:, None]) & inside
        if LAST:
            place = tl.max(tl.where(equal, i[None, :], 0), 1)
            better = here >= best if GREATEST else here <= best
        else:
            place = tl.min(tl.where(equal, i[None, :], COLUMNS), 1)
            better = here > best if GREATEST else here < best
        found = tl.where(better, place, found)
        best = tl.where(better, here, best)
    tl.store(y + walk(r, OUTER, Y_STRIDES[0]), found.to(y.dtype.element_ty), mask=r < rows)
