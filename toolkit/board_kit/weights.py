"""Networks whose weights repeat a short pattern.

Times do not depend on weights, and an engine of them is small once it is compressed: layouts that
permute the weights keep the repetition.
"""

import math

import numpy as np
import onnx_ir as ir

_PERIOD = 251  # prime: rows of no usual length begin alike
_SEED = 5


def tile_weights(model: ir.Model) -> None:
    """Replace every float32 weight of two dimensions or more by the pattern, of the same spread.

    Weights without a spread to copy get 1 / sqrt(elements of one output).
    """
    pattern = np.random.default_rng(_SEED).normal(0, 1, _PERIOD).astype(np.float32)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2:
            continue
        shape = tuple(tensor.shape.numpy())
        size = math.prod(shape)
        spread = np.float32(1 / math.sqrt(max(1, size // shape[0])))
        array = np.resize(pattern * spread, size).reshape(shape)
        value.const_value = ir.Tensor(array, name=value.name)
