"""Softmax, log-softmax and hardmax along rows of any strides.

    y[r, i] = EPILOGUE(s[r, i])

    s[r, i] = exp(x[r, i] - max_j x[r, j]) / sum_j exp(x[r, j] - max_j x[r, j])     "softmax"
    s[r, i] = x[r, i] - max_j x[r, j] - log(sum_j exp(x[r, j] - max_j x[r, j]))     "log_softmax"
    s[r, i] = 1 where i is the first maximum of row r, else 0                       "hardmax"

A row longer than BLOCK is read twice: once for its maximum and its sum, which is rescaled whenever
the maximum grows, and once to write.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import load_strided, store_strided


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
    LOWEST: tl.constexpr = float("-inf")
    if COLUMNS <= BLOCK:
        value = load_strided(x, r, rows, i, COLUMNS, OUTER, INNER, X_STRIDES, LOWEST)
        row_max = tl.max(value, 1)
        total = tl.sum(tl.exp(value - row_max[:, None]), 1)
        first = _first(value, row_max, i, COLUMNS)
        result = evaluate((_result(value, i, row_max, total, first, MODE),), EPILOGUE, scalars)
        store_strided(result, y, r, rows, i, COLUMNS, OUTER, INNER, Y_STRIDES)
    else:
        row_max = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        first = tl.full((ROWS,), COLUMNS, tl.int32)
        for start in range(0, COLUMNS, BLOCK):
            value = load_strided(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, LOWEST)
            block_max = tl.max(value, 1)
            block_first = _first(value, block_max, start + i, COLUMNS)
            first = tl.where(block_max > row_max, block_first, first)
            new_max = tl.maximum(row_max, block_max)
            shift = tl.where(new_max == LOWEST, 0.0, new_max)
            total = total * tl.exp(row_max - shift) + tl.sum(tl.exp(value - shift[:, None]), 1)
            row_max = new_max
        for start in range(0, COLUMNS, BLOCK):
            value = load_strided(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, LOWEST)
            result = _result(value, start + i, row_max, total, first, MODE)
            result = evaluate((result,), EPILOGUE, scalars)
            store_strided(result, y, r, rows, start + i, COLUMNS, OUTER, INNER, Y_STRIDES)


@triton.jit
def _first(value, row_max, i, COLUMNS: tl.constexpr):
    return tl.min(tl.where(value == row_max[:, None], i[None, :], COLUMNS), 1)


@triton.jit
def _result(value, i, row_max, total, first, MODE: tl.constexpr):
    if MODE == "softmax":
        result = tl.exp(value - row_max[:, None]) / total[:, None]
    elif MODE == "log_softmax":
        result = value - row_max[:, None] - tl.log(total)[:, None]
    else:
        tl.static_assert(MODE == "hardmax")
        result = tl.where(i[None, :] == first[:, None], 1.0, 0.0)
    return result
