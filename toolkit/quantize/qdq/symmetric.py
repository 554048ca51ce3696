"""Check that Q/DQ nodes are symmetric INT8, and apply them to constants."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from toolkit.errors import ImportModelError
from toolkit.quantize.qdq.nodes import (
    QuantParams,
    has_weight,
    is_dequantize,
    quant_params_of,
    quantized_constant,
)
from toolkit.quantize.quantize import QUANTIZED_OPS, weight_axis

# Stored type -> zero point of symmetric quantization.
_SYMMETRIC_ZERO: Mapping[ir.DataType, int] = {ir.DataType.INT8: 0, ir.DataType.UINT8: 128}


def symmetric_params(node: ir.Node) -> QuantParams:
    """The parameters of a node, checked: constant, symmetric, with usable scales."""
    params = quant_params_of(node)
    subject = f"Node {node.name!r} ({node.op_type})"
    if params is None:
        raise ImportModelError(
            f"{subject} computes its scale or zero point, which must be constants; fold them first."
        )
    bias = params.dtype == ir.DataType.INT32 and is_dequantize(node)
    if params.dtype not in _SYMMETRIC_ZERO and not (bias and quantized_constant(node) is not None):
        raise ImportModelError(
            f"{subject} stores {params.dtype.name}, but only INT8 and UINT8 (and INT32 for biases) "
            "are "
            "taken; quantize to INT8."
        )
    expected = _SYMMETRIC_ZERO.get(params.dtype, 0)
    differs = params.zero != expected
    if differs.any():
        raise ImportModelError(
            f"{subject} has the zero point {params.zero.flat[np.argmax(differs)]} in "
            f"{params.dtype.name}, but the symmetric one is {expected}; quantize symmetrically."
        )
    if params.blocked:
        raise ImportModelError(f"{subject} has a scale for each block; quantize per channel.")
    usable = (params.scale > 0) & np.isfinite(params.scale)
    if not usable.all():
        raise ImportModelError(
            f"{subject} has the scale {params.scale.flat[np.argmin(usable)]}, but scales are "
            "positive "
            "and finite; calibrate the model again."
        )
    return params


def along(parameter: np.ndarray, params: QuantParams, array: np.ndarray, node: str) -> np.ndarray:
    """Reshape a scale or zero point to broadcast over an array."""
    if parameter.ndim == 0:
        return parameter.astype(np.float64 if array.dtype == np.int32 else np.float32)
    axis = params.axis % max(array.ndim, 1)
    if parameter.ndim != 1 or axis >= array.ndim or array.shape[axis] != parameter.size:
        raise ImportModelError(
            f"Node {node!r} has scales of shape {list(parameter.shape)} along axis {params.axis} "
            "for a "
            f"constant of shape {list(array.shape)}; they do not fit."
        )
    shaped = parameter.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return shaped.astype(np.float64 if array.dtype == np.int32 else np.float32)


def quantized_by(array: np.ndarray, params: QuantParams, node: str) -> np.ndarray:
    """Quantize a constant with the parameters of a Q node."""
    scale, zero = (along(part, params, array, node) for part in (params.scale, params.zero))
    kind = np.iinfo(np.uint8 if params.dtype == ir.DataType.UINT8 else np.int8)
    rounded: np.ndarray = np.clip(np.rint(array / scale) + zero, kind.min, kind.max)
    return rounded.astype(kind.dtype)


def weight_readers(node: ir.Node, weight: np.ndarray) -> Iterator[tuple[ir.Node, int | None]]:
    """The nodes that multiply with a dequantized weight, and its output-channel axis for each.

    A Transpose between them is skipped.
    """
    for use in node.outputs[0].uses():
        reader, index, shape = use.node, use.idx, weight
        permutation: tuple[int, ...] = tuple(range(weight.ndim))
        readers = [(reader, index)]
        if reader.op_type == "Transpose":
            default = list(reversed(permutation))
            permutation = tuple(reader.attributes.get_ints("perm", default) or default)
            shape = weight.transpose(permutation)
            readers = [(inner.node, inner.idx) for inner in reader.outputs[0].uses()]
        for product, operand in readers:
            if not has_weight(product) or weight.ndim < 2:
                continue
            row = QUANTIZED_OPS[product.op_type]
            if operand == row.weight:
                axis = weight_axis(product, row, shape)
                yield product, None if axis is None else permutation[axis]
