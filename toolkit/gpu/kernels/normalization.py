"""Normalization along rows of any strides.

    y[r, i] = EPILOGUE((x[r, i] - m[r]) s[r] gain[r, i] + bias[r, i])

    m[r] = sum_i x[r, i] / COLUMNS
    s[r] = 1 / sqrt(sum_i (x[r, i] - m[r])^2 / COLUMNS + EPSILON)                "variance"
    m[r] = 0,  s[r] = 1 / sqrt(sum_i x[r, i]^2 / COLUMNS + EPSILON)              "square"
    m[r] = 0,  s[r] = 1 / sum_i |x[r, i]|                                        "l1"
    m[r] = 0,  s[r] = 1 / sqrt(sum_i x[r, i]^2)                                  "l2"

In "l1" and "l2" s[r] is 0 for a row of zeros. A row of up to BLOCK columns, or of exactly 3 BLOCK
(384, 768), is held in registers; others are read up to three times.
"""

import triton
import triton.language as tl

from toolkit.gpu.kernels.expression import evaluate
from toolkit.gpu.kernels.strided_rows import load_strided, offsets, store_strided


@triton.jit
def normalize(
    x, gain, bias, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, GAIN_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    Y_STRIDES: tl.constexpr,
    MODE: tl.constexpr, EPSILON: tl.constexpr, EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, scalars=None,
):  # fmt: skip
    """Grid: (blocks of rows)."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    mean = tl.zeros((ROWS,), tl.float32)
    if COLUMNS <= BLOCK or COLUMNS == 3 * BLOCK:
        BLOCKS: tl.constexpr = 1 if COLUMNS <= BLOCK else 3
        LIMIT: tl.constexpr = COLUMNS if BLOCKS == 1 else None  # three blocks are full
        values = (load_strided(x, r, rows, i, LIMIT, OUTER, INNER, X_STRIDES, 0.0),)
        sums = values[0]
        for n in tl.static_range(1, BLOCKS):
            at = n * BLOCK + i
            value = load_strided(x, r, rows, at, LIMIT, OUTER, INNER, X_STRIDES, 0.0)
            values = values + (value,)
            sums += value
        if MODE == "variance":
            mean = tl.sum(sums, 1) / COLUMNS
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for n in tl.static_range(BLOCKS):
            total = _add_power(total, values[n], mean, i, LIMIT, MODE)
        scale = _scale(tl.sum(total, 1), COLUMNS, MODE, EPSILON)
        for n in tl.static_range(BLOCKS):
            _store_scaled(
                (values[n] - mean[:, None]) * scale[:, None], gain, bias, y, r, rows,
                n * BLOCK + i, LIMIT, OUTER, INNER, GAIN_STRIDES, BIAS_STRIDES, Y_STRIDES, EPILOGUE,
                scalars,
            )  # fmt: skip
    else:
        if MODE == "variance":
            sums = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, COLUMNS, BLOCK):
                sums += load_strided(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, 0.0)
            mean = tl.sum(sums, 1) / COLUMNS
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            value = load_strided(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, 0.0)
            sums = _add_power(sums, value, mean, start + i, COLUMNS, MODE)
        scale = _scale(tl.sum(sums, 1), COLUMNS, MODE, EPSILON)
        for start in range(0, COLUMNS, BLOCK):
            value = load_strided(x, r, rows, start + i, COLUMNS, OUTER, INNER, X_STRIDES, 0.0)
            result = (value - mean[:, None]) * scale[:, None]
            _store_scaled(
                result, gain, bias, y, r, rows, start + i, COLUMNS, OUTER, INNER,
                GAIN_STRIDES, BIAS_STRIDES, Y_STRIDES, EPILOGUE, scalars,
            )  # fmt: skip


@triton.jit
def _add_power(total, value, mean, i, COLUMNS: tl.constexpr, MODE: tl.constexpr):
    """Add the terms of s[r] to the total, 0 outside of the row; COLUMNS None: all are inside."""
    if MODE == "l1":
        result = total + tl.abs(value)
    else:
        deviation = value - mean[:, None]
        if COLUMNS is not None:
            deviation = tl.where((i < COLUMNS)[None, :], deviation, 0.0)
        result = tl.fma(deviation, deviation, total)
    return result


@triton.jit
def _scale(total, COLUMNS: tl.constexpr, MODE: tl.constexpr, EPSILON: tl.constexpr):
    if MODE == "l1":
        result = tl.where(total == 0.0, 0.0, 1.0 / total)
    elif MODE == "l2":
        result = tl.where(total == 0.0, 0.0, 1.0 / tl.sqrt(total))
    else:
        tl.static_assert((MODE == "variance") | (MODE == "square"))
        result = 1.0 / tl.sqrt(total / COLUMNS + EPSILON)
    return result


@triton.jit
def _store_scaled(
    result, gain, bias, y, r, rows, i, COLUMNS: tl.constexpr,
    OUTER: tl.constexpr, INNER: tl.constexpr, GAIN_STRIDES: tl.constexpr,
    BIAS_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr, EPILOGUE: tl.constexpr, scalars,
):  # fmt: skip
    factor = 1.0
    if gain is not None:
        factor = load_strided(gain, r, rows, i, COLUMNS, OUTER, INNER, GAIN_STRIDES, 0.0)
        if bias is None:
            result *= factor
    if bias is not None:
        shift = load_strided(bias, r, rows, i, COLUMNS, OUTER, INNER, BIAS_STRIDES, 0.0)
        result = tl.fma(result, factor, shift)
    result = evaluate((result,), EPILOGUE, scalars)
    store_strided(result, y, r, rows, i, COLUMNS, OUTER, INNER, Y_STRIDES)


@triton.jit
def local_response_norm(
    x, y, rows,
    COLUMNS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr,
    X_STRIDES: tl.constexpr, Y_STRIDES: tl.constexpr,
    SIZE: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[r, i] = EPILOGUE(x[r, i] / (BIAS + ALPHA / SIZE sum_j x[r, j]^2)^BETA)

    j: the SIZE columns around i. Grid: (blocks of rows, blocks of columns).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = x + offsets(r, OUTER, X_STRIDES[0])[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for at in range(SIZE):
        j = i + at - (SIZE - 1) // 2
        inside = (r < rows)[:, None] & ((j >= 0) & (j < COLUMNS))[None, :]
        value = tl.load(row + j[None, :] * X_STRIDES[1][0], mask=inside, other=0.0).to(tl.float32)
        total += value * value
    value = load_strided(x, r, rows, i, COLUMNS, OUTER, INNER, X_STRIDES, 0.0)
    result = value * tl.exp2(-BETA * tl.log2(BIAS + (ALPHA / SIZE) * total))
    result = evaluate((result,), EPILOGUE)
    store_strided(result, y, r, rows, i, COLUMNS, OUTER, INNER, Y_STRIDES)
