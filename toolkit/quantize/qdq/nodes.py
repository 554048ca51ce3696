"""Read QuantizeLinear and DequantizeLinear nodes: quantization parameters and operands.

q = round(x / scale) + zero,  x' = (q - zero) scale
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.errors import ImportModelError
from toolkit.quantize.quantize import QUANTIZED_OPS

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
# The contributed operators equal the standard ones.
_DOMAINS = frozenset({"", "com.microsoft"})

_TEXT = "SUO"  # kinds of numpy's types

# Integer operators without Q/DQ; TensorRT supports none of them.
INTEGER_OPS = frozenset(
    {"ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"}
)


@dataclass(frozen=True, slots=True)
class QuantParams:
    """Quantization parameters; `scale`, `zero`: [] per tensor, [channels] along `axis`.

    `block`: elements along `axis` that share a scale, of which there are as many axes as of the
    array; 0: no blocks.
    """

    scale: np.ndarray
    zero: np.ndarray
    dtype: ir.DataType
    axis: int
    block: int


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


def quant_params_of(node: ir.Node) -> QuantParams | None:
    """The parameters of a Q or DQ node; None if its scale or zero point is not constant.

    Raises ImportModelError: one of them holds text.
    """
    scale = constant_of(node.inputs[1])
    zero_value = node.inputs[2] if len(node.inputs) > 2 else None
    zero = constant_of(zero_value)
    if scale is None or (zero_value is not None and zero is None):
        return None
    for value, array in zip(node.inputs[1:], (scale, zero), strict=False):
        if value is not None and array is not None and array.dtype.kind in _TEXT:
            raise ImportModelError(
                f"node {node.name!r} ({node.op_type}) reads {value.name!r}, which holds text, "
                "instead of numbers; export the model again."
            )
    if zero is None:
        zero = np.zeros(scale.shape, np.int8)
    if scale.size == 1 and zero.size == 1:
        scale, zero = scale.reshape(()), zero.reshape(())
    return QuantParams(
        scale=scale,
        zero=zero,
        dtype=_stored_dtype(node, zero_value),
        axis=node.attributes.get_int("axis", 1),
        block=node.attributes.get_int("block_size", 0),
    )


def quantized_constant(node: ir.Node) -> ir.Value | None:
    """The constant that a DQ node reads, directly or through a Q; None for an activation."""
    source = node.inputs[0]
    producer = source.producer() if source is not None else None
    if producer is not None and is_quantize(producer):
        source = producer.inputs[0]
    return source if constant_of(source) is not None else None


def has_weight(node: ir.Node) -> bool:
    """True if the operator has a weight."""
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
    producer = source.producer() if source is not None else None
    if producer is not None and is_quantize(producer):
        return _stored_dtype(producer, producer.inputs[2] if len(producer.inputs) > 2 else None)
    return (source.dtype if source is not None else None) or ir.DataType.UNDEFINED
