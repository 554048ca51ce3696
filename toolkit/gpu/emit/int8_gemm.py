"""INT8 products: which matrix products are INT8, and how their accumulators are dequantized.

For an operand with scale s_x and weights with scales s_w, one for each column f,

    sum_k x w + b[f]  =  (sum_k q_x q_w + b_q[f]) s_x s_w[f],      b_q = rte(b / (s_x s_w))

with exact INT32 accumulators and one float32 multiplication at the end. An INT32 bias with scale
s_x s_w is b_q; another is rounded to it, by half a step at most.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.network import Array, IntegerConstant, Operation
from toolkit.gpu.shapes.sizes import Size

_MAX_PRODUCT = 128 * 128
_MAX_SUM = 2**31 - 1
_SCALE_TOLERANCE = 1e-6  # relative: scales of a bias that were multiplied in float32 or in float64


@dataclass(frozen=True, slots=True)
class Int8Epilogue:
    """`bias` int32 and `factors` s_x s_w float32, one for each column."""

    bias: Array | None
    factors: Array


@dataclass(frozen=True, slots=True)
class Int8Weights(Int8Epilogue):
    """An epilogue with the int8 weights."""

    values: Array


def int8_weights(
    ctx: LoweringContext,
    op: Operation,
    axis: int,
    columns: int,
    depth: int,
    *,
    x_scale: float | None = None,
) -> Int8Weights | None:
    """Return the weights of an INT8 product; None where floats are multiplied.

    Operand 0 is the activation, with its own scale or `x_scale`, 1 the weights with columns along
    `axis`, 2 a bias. A product that may overflow INT32 is none of INT8.
    """
    scale = ctx.read(op.inputs[0]).scale if x_scale is None else x_scale
    weights = ctx.network.integers.get(op.inputs[1])
    if scale is None or weights is None or weights.values.dtype != np.int8:
        return None
    if weights.axis not in (None, axis % weights.values.ndim):
        return None
    factors = np.broadcast_to(weights.scale * np.float32(scale), (columns,))
    bias = None
    if op.input(2):
        if op.inputs[2] not in ctx.network.constants:
            return None
        bias = _quantized_bias(ctx, op.inputs[2], factors)
        if bias is None:
            return None
    largest = 0 if bias is None else int(np.abs(bias).max())
    if largest + depth * _MAX_PRODUCT > _MAX_SUM:
        return None
    return Int8Weights(None if bias is None else bias.astype(np.int32), factors, weights.values)


def int8_factors(
    ctx: LoweringContext, op: Operation, depth: int, columns: int
) -> Int8Epilogue | None:
    """Return the epilogue of the product of two INT8 tensors; None where floats are multiplied.

    Factors are packed for each column, so the number of columns must not be dynamic.
    """
    if isinstance(depth, Size) or isinstance(columns, Size):
        return None
    if op.input(2) or depth * _MAX_PRODUCT > _MAX_SUM:
        return None
    if any(name in ctx.network.constants for name in op.inputs[:2]):
        return None  # not INT8; to read one would pack it
    scales = [ctx.read(name).scale for name in op.inputs[:2]]
    if scales[0] is None or scales[1] is None:
        return None
    factor = np.float32(scales[0]) * np.float32(scales[1])
    return Int8Epilogue(None, np.full((columns,), factor))


def _quantized_bias(ctx: LoweringContext, name: str, factors: Array) -> Array | None:
    """Return a bias divided by `factors`, rounded, as int64 for each column; None if too large."""
    stored = ctx.network.integers.get(name)
    if stored is not None and _has_accumulator_scale(stored, factors):
        return np.broadcast_to(stored.values.reshape(-1).astype(np.int64), factors.shape)
    real = ctx.network.constants[name].astype(np.float64)
    if real.size not in (1, factors.size) or (real.size > 1 and real.shape[-1] != factors.size):
        return None
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        steps = np.rint(real.reshape(-1) / factors)
    if not (np.abs(steps) < _MAX_SUM).all():
        return None
    return np.broadcast_to(steps.astype(np.int64), factors.shape)


def _has_accumulator_scale(stored: IntegerConstant, factors: Array) -> bool:
    """Whether a bias is INT32 with the scale of the accumulators."""
    fits = stored.values.dtype == np.int32 and stored.values.size in (1, factors.size)
    return fits and bool(np.allclose(stored.scale, factors, rtol=_SCALE_TOLERANCE, atol=0))
