"""Products of INT8: which they are, and what turns their sums into real numbers.

For an operand on a grid of scale s_x and weights on grids of scales s_w, one for each column f,

    sum_k x w + b[f]  =  (sum_k q_x q_w + b_q[f]) s_x s_w[f],      b_q = rte(b / (s_x s_w))

with INT32 sums, exact, and one float32 product at the end. A bias that was given in INT32 at the
scale s_x s_w is b_q; another is rounded to it, by half a step at most.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.network import Array, IntegerConstant, Operation
from toolkit.gpu.shapes.sizes import Size

_LARGEST_PRODUCT = 128 * 128
_LARGEST_SUM = 2**31 - 1
_SAME = 1e-6  # relative: scales of a bias that were multiplied in float32 or in float64


@dataclass(frozen=True, slots=True)
class Int8Epilogue:
    """`bias` int32 and `factors` s_x s_w float32, one for each column."""

    bias: Array | None
    factors: Array


@dataclass(frozen=True, slots=True)
class Int8Weights(Int8Epilogue):
    """With the weights, int8."""

    values: Array


def int8_weights(
    ctx: LoweringContext,
    op: Operation,
    axis: int,
    columns: int,
    depth: int,
    *,
    grid: float | None = None,
) -> Int8Weights | None:
    """Return the weights of a product of INT8; None where it is none, and floats are multiplied.

    Operand 0 is the activation, on the grid on which it lies or on `grid`, 1 the weights with its
    columns along `axis`, 2 a bias. A product that could leave INT32, or a bias that does, is none.
    """
    scale = ctx.read(op.inputs[0]).scale if grid is None else grid
    given = ctx.network.integers.get(op.inputs[1])
    if scale is None or given is None or given.values.dtype != np.int8:
        return None
    if given.axis not in (None, axis % given.values.ndim):
        return None
    factors = np.broadcast_to(given.scale * np.float32(scale), (columns,))
    bias = None
    if op.input(2):
        if op.inputs[2] not in ctx.network.constants:
            return None
        bias = _steps(ctx, op.inputs[2], factors)
        if bias is None:
            return None
    largest = 0 if bias is None else int(np.abs(bias).max())
    if largest + depth * _LARGEST_PRODUCT > _LARGEST_SUM:
        return None
    return Int8Weights(None if bias is None else bias.astype(np.int32), factors, given.values)


def int8_factors(
    ctx: LoweringContext, op: Operation, depth: int, columns: int
) -> Int8Epilogue | None:
    """Return what ends the product of two tensors on grids; None where it is none of INT8.

    Factors are packed for each column, so the number of columns must not be dynamic.
    """
    if isinstance(depth, Size) or isinstance(columns, Size):
        return None
    if op.input(2) or depth * _LARGEST_PRODUCT > _LARGEST_SUM:
        return None
    if any(name in ctx.network.constants for name in op.inputs[:2]):
        return None  # on no grid; to read one would pack it
    scales = [ctx.read(name).scale for name in op.inputs[:2]]
    if scales[0] is None or scales[1] is None:
        return None
    factor = np.float32(scales[0]) * np.float32(scales[1])
    return Int8Epilogue(None, np.full((columns,), factor))


def _steps(ctx: LoweringContext, name: str, factors: Array) -> Array | None:
    """Return a bias in steps of `factors` as int64, one for each column; or None."""
    given = ctx.network.integers.get(name)
    if given is not None and _is_stored(given, factors):
        return np.broadcast_to(given.values.reshape(-1).astype(np.int64), factors.shape)
    real = ctx.network.constants[name].astype(np.float64)
    if real.size not in (1, factors.size) or (real.size > 1 and real.shape[-1] != factors.size):
        return None
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        steps = np.rint(real.reshape(-1) / factors)
    if not (np.abs(steps) < _LARGEST_SUM).all():
        return None
    return np.broadcast_to(steps.astype(np.int64), factors.shape)


def _is_stored(given: IntegerConstant, factors: Array) -> bool:
    """Whether a bias was given in INT32 at the scale of the sums."""
    fits = given.values.dtype == np.int32 and given.values.size in (1, factors.size)
    return fits and bool(np.allclose(given.scale, factors, rtol=_SAME, atol=0))
