"""FP8 products: the operands as they are stored, and the factors of their sums.

    sum_k x w + b[f]  =  (sum_k q_x q_w + b[f] / (s_x s_w[f])) s_x s_w[f]

with sums of FP32, of fewer digits on sm_90. `toolkit.gpu.passes.float8` says which products are
FP8.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.passes.float8 import X_SCALE


@dataclass(frozen=True, slots=True)
class Float8Weights:
    """Weights of FP8 as the node reads them, and `factors` s_x s_w float32 of each column."""

    values: Array
    factors: Array


def float8_weights(ctx: LoweringContext, op: Operation, columns: int) -> Float8Weights | None:
    """Return the weights of an FP8 product; None of others."""
    if X_SCALE not in op.attributes:
        return None
    weights = ctx.network.integers[op.inputs[1]]
    factors = weights.scale * np.float32(op.number(X_SCALE, 1.0))
    return Float8Weights(weights.values, np.broadcast_to(factors, (columns,)))
