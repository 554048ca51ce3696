"""Softmax, its logarithm and its limit along rows of any strides.

    y[r, i] = STEPS(s[r, i])

    s[r, i] = exp(x[r, i] - max_j x[r, j]) / sum_j exp(x[r, j] - max_j x[r, j])         "softmax"
    s[r, i] = x[r, i] - max_j x[r, j] - log(sum_j exp(x[r, j] - max_j x[r, j]))         "log"
    s[r, i] = 1 where i is the first maximum of row r, else 0                           "first"

A row longer than BLOCK is read twice: once for its maximum and its sum, which is scaled anew
whenever the maximum grows, and once to write.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import load_rows, store_strided


@triton.jit
def softmax(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    MODE: tl.constexpr, EPILOGUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    scalars=None,
):  # fmt: skip
    """Grid: (blocks of rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    LEAST: tl.constexpr = float("-inf")
    if COLUMNS <= BLOCK:
        value = load_rows(x, r, rows, i, COLUMNS, OUTER, INNER, X_STRIDES, LEAST)
        most = tl.max(value, 1)
        total = tl.sum(tl.exp(value - most[:, None]), 1)
        first = _first(value, most, i, COLUMNS)
        result = evaluate((_result(value, i, most, total, first, MODE),), EPILOGUE, scalars)
        store_strided(result, y, r, rows, i, COLUMNS, OUTER, INNER, Y_STRIDES)
    else:
        most = tl.full((ROWS,), LEAST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        first = tl.full((ROWS,), COLUMNS, tl.int32)
        for start in range(0, COLUMNS, BLOCK):
            value = load_rows(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, LEAST)
            here = tl.max(value, 1)
            first = tl.where(here > most, _first(value, here, start + i, COLUMNS), first)
            grown = tl.maximum(most, here)
            shift = tl.where(grown == LEAST, 0.0, grown)
            total = total * tl.exp(most - shift) + tl.sum(tl.exp(value - shift[:, None]), 1)
            most = grown
        for start in range(0, COLUMNS, BLOCK):
            value = load_rows(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, LEAST)
            result = _result(value, start + i, most, total, first, MODE)
            result = evaluate((result,), EPILOGUE, scalars)
            store_strided(result, y, r, rows, start + i, COLUMNS, OUTER, INNER, Y_STRIDES)


@triton.jit
def _first(value, most, i, COLUMNS: tl.constexpr):
    return tl.min(tl.where(value == most[:, None], i[None, :], COLUMNS), 1)


@triton.jit
def _result(value, i, most, total, first, MODE: tl.constexpr):
    if MODE == "softmax":
        result = tl.exp(value - most[:, None]) / total[:, None]
    elif MODE == "log":
        result = value - most[:, None] - tl.log(total)[:, None]
    else:
        tl.static_assert(MODE == "first")
        result = tl.where(i[None, :] == first[:, None], 1.0, 0.0)
    return result
