"""The products that kernels multiply in FP8, and their weights.

w' = s_c e4m3(w / s_c),   s_c = max|w_c| / 448 per output channel c
x' = s e4m3(clip(x / s, -448, 448)),   s = amax / 448 per tensor
"""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.errors import BuildError
from toolkit.graph.block_weights import BlockTensor
from toolkit.graph.dtypes import LARGEST_FLOAT8, MIN_CHANNELS
from toolkit.quantize.quantize import QUANTIZED_OPS, is_activation, weight_axis
from toolkit.quantize.weights import constant_of

LARGEST_HALF = 65504.0
# Smaller scales are raised to these, so that products of two of them are normal float32.
SMALLEST_SCALE = 2.0**-80
SMALLEST_WEIGHT_SCALE = 2.0**-40
_PRODUCTS = ("Conv", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """`stored` as FP8 with `scales` float32 [channels] along `axis`."""

    stored: NDArray[np.generic]
    scales: NDArray[np.float32]
    axis: int


def float8_products(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that kernels can multiply in FP8, in graph order.

    They have a constant weight: a matrix, or filters of a dense 2-D convolution.
    """
    return [node for node in model.graph if _multiplies(node)]


def _multiplies(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in _PRODUCTS or len(node.inputs) < 2:
        return False
    x, weight = node.inputs[0], constant_of(node, 1)
    value = node.inputs[1]
    if x is None or value is None or weight is None or not is_activation(x):
        return False
    if isinstance(value.const_value, BlockTensor) or not np.isfinite(weight).all():
        return False
    if any(bias is not None and bias.const_value is None for bias in node.inputs[2:]):
        return False
    if node.op_type == "Conv":
        dense = weight.ndim == 4 and node.attributes.get_int("group", 1) == 1
        return dense and weight.shape[1] >= MIN_CHANNELS
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    plain = not node.attributes.get_int("transA", 0) and factors == [1.0, 1.0]
    return plain and weight.ndim == 2 and weight.size > 0 and rank is not None and rank > 1


def why_half(node: ir.Node, amax: Mapping[str, float]) -> str:
    """Return why a product stays in floating point by the ranges of its tensors, "": it need not.

    Raises BuildError: its operand has no range.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    if str(x.name) not in amax:
        raise BuildError(
            f"Tensor {x.name!r}, read by node {node.name!r} ({node.op_type}), has no range in the "
            "calibration table; FP8 without ranges is refused: calibrate again on this model."
        )
    for value in (x, y):
        if amax.get(str(value.name), 0.0) > LARGEST_HALF:
            return f"{value.name!r} reaches {amax[str(value.name)]:.3g}, beyond FP16"
    return ""


def scale_of(amax: float) -> NDArray[np.float32]:
    """Return the scale, [], of an activation whose largest magnitude is `amax`."""
    return np.array(max(amax / LARGEST_FLOAT8, SMALLEST_SCALE), np.float32)


def round_weight(node: ir.Node) -> Float8Weight:
    """Round the weight of a product, each output channel by its largest magnitude."""
    weight = constant_of(node, 1)
    assert weight is not None
    axis = weight_axis(node, QUANTIZED_OPS[node.op_type], weight)
    assert axis is not None
    others = tuple(at for at in range(weight.ndim) if at != axis)
    largest = np.abs(weight).max(others, keepdims=True).astype(np.float64)
    scales = np.maximum(largest / LARGEST_FLOAT8, SMALLEST_WEIGHT_SCALE).astype(np.float32)
    # Of a scale rounded down, the largest weight is just above 448; it has no infinity.
    steps = np.clip(weight / scales, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return Float8Weight(steps.astype(ml_dtypes.float8_e4m3fn), scales.reshape(-1), axis)
