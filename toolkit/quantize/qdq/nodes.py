"""What a QuantizeLinear or DequantizeLinear node says: its grid, and what lies behind it.

q = round(x / scale) + zero,  x' = (q - zero) scale
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.quantize.quantize import QUANTIZED_OPS

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
# The contributed ones are the same as the standard ones.
_DOMAINS = frozenset({"", "com.microsoft"})

# Operators that compute in integers by themselves; TensorRT has none of them.
INTEGER_OPS = frozenset(
    {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"}
)


@dataclass(frozen=True, slots=True)
class Grid:
    """`scale` and `zero` are [] for a whole tensor and [channels] along `axis`."""

    scale: np.ndarray
    zero: np.ndarray
    dtype: ir.DataType
    axis: int
    blocked: bool


def is_quantize(node: ir.Node | None) -> bool:
    """Whether a node is a QuantizeLinear."""
    return node is not None and node.op_type == QUANTIZE and node.domain in _DOMAINS


def is_dequantize(node: ir.Node | None) -> bool:
    """Whether a node is a DequantizeLinear."""
    return node is not None and node.op_type == DEQUANTIZE and node.domain in _DOMAINS


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or of a Constant node."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def grid_of(node: ir.Node) -> Grid | None:
    """The grid of a Q or DQ node; None where its scale or zero point is computed."""
    scale = constant_of(node.inputs[1])
    given = node.inputs[2] if len(node.inputs) > 2 else None
    zero = constant_of(given)
    if scale is None or (given is not None and zero is None):
        return None
    if zero is None:
        zero = np.zeros(scale.shape, np.int8)
    if scale.size == 1 and zero.size == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    return Grid(
        scale=scale,
        zero=zero,
        dtype=_stored_dtype(node, given),
        axis=node.attributes.get_int("axis", 1),
        blocked=node.attributes.get_int("block_size", 0) != 0,
    )


def quantized_constant(node: ir.Node) -> ir.Value | None:
    """The constant behind a DQ node, with or without a Q between; None for an activation."""
    source = node.inputs[0]
    maker = source.producer() if source is not None else None
    if maker is not None and is_quantize(maker):
        source = maker.inputs[0]
    return source if constant_of(source) is not None else None


def has_weight(node: ir.Node) -> bool:
    """Whether the operator is one that multiplies with a weight."""
    row = QUANTIZED_OPS.get(node.op_type) if node.domain == "" else None
    return row is not None and row.weight is not None and row.weight < len(node.inputs)


def _stored_dtype(node: ir.Node, zero: ir.Value | None) -> ir.DataType:
    array = constant_of(zero)
    if array is not None:
        return ir.DataType.from_numpy(array.dtype)
    if is_quantize(node):
        return ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)
    source = node.inputs[0]
    stored = constant_of(source)
    if stored is not None:
        return ir.DataType.from_numpy(stored.dtype)
    maker = source.producer() if source is not None else None
    if maker is not None and is_quantize(maker):
        return _stored_dtype(maker, maker.inputs[2] if len(maker.inputs) > 2 else None)
    return (source.dtype if source is not None else None) or ir.DataType.UNDEFINED
