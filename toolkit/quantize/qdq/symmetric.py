"""Check that Q/DQ nodes are symmetric INT8, and apply them to constants."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from toolkit.errors import ImportModelError
from toolkit.quantize.qdq.nodes import (
    QuantParams,
    constant_of,
    has_weight,
    is_dequantize,
    quant_params_of,
    quantized_constant,
)
from toolkit.quantize.quantize import QUANTIZED_OPS, weight_axis

# Stored type -> its integers, and the zero point of symmetric quantization.
_INTEGERS: Mapping[ir.DataType, tuple[int, int, int]] = {
    ir.DataType.INT8: (-128, 127, 0),
    ir.DataType.UINT8: (0, 255, 128),
    ir.DataType.INT4: (-8, 7, 0),
    ir.DataType.UINT4: (0, 15, 8),
    ir.DataType.INT32: (-(1 << 31), (1 << 31) - 1, 0),
}
_OF_ACTIVATIONS = (ir.DataType.INT8, ir.DataType.UINT8)


def symmetric_params(node: ir.Node, *, any_zero_point: bool = False) -> QuantParams:
    """The parameters of a node, checked: constant, symmetric, with usable scales.

    `any_zero_point` accepts those that are not symmetric. Constants alone may have other types than
    INT8 and UINT8, and scales for blocks.
    """
    params = quant_params_of(node)
    subject = f"Node {node.name!r} ({node.op_type})"
    if params is None:
        raise ImportModelError(
            f"{subject} computes its scale or zero point, which must be constants; fold them, or "
            "quantize with calibration (onnxruntime: quantize_static, not quantize_dynamic)."
        )
    constant = is_dequantize(node) and quantized_constant(node) is not None
    if params.dtype not in (_INTEGERS if constant else _OF_ACTIVATIONS):
        raise ImportModelError(
            f"{subject} stores {params.dtype.name}, but only INT8 and UINT8 (INT4, UINT4 and INT32 "
            "for constants) are taken; quantize to INT8 (AIMET: activation_type='int8')."
        )
    expected = _INTEGERS[params.dtype][2]
    differs = params.zero != expected
    if differs.any() and not any_zero_point:
        raise ImportModelError(
            f"{subject} has the zero point {params.zero.flat[np.argmax(differs)]} in "
            f"{params.dtype.name}, but the symmetric one is {expected}; quantize symmetrically "
            "(onnxruntime: ActivationSymmetric and WeightSymmetric in extra_options), or let "
            "`tandem build --precision int8` make the range symmetric and say what that loses."
        )
    if params.block and not constant:
        raise ImportModelError(f"{subject} has a scale for each block; quantize per tensor.")
    # onnxruntime signs the scales of its INT4 blocks.
    signed = constant and constant_of(node.inputs[0]) is not None
    usable = ((params.scale > 0) | signed) & np.isfinite(params.scale)
    if not usable.all():
        raise ImportModelError(
            f"{subject} has the scale {params.scale.flat[np.argmin(usable)]}, but scales are "
            "positive "
            "and finite; calibrate the model again."
        )
    return params


def symmetric_steps(params: QuantParams) -> int:
    """The steps of the scale between 0 and the end of a symmetric range that holds all integers.

    127, the last of INT8, where 128 would do.
    """
    low, high, _ = _INTEGERS[params.dtype]
    zero = int(params.zero)
    steps = max(high - zero, zero - low)
    return steps if steps > 128 else 127


def cuts_negatives(params: QuantParams) -> bool:
    """Whether the least integer stands for 0, so that Q and DQ rectify."""
    return int(params.zero) == _INTEGERS[params.dtype][0]


def along(parameter: np.ndarray, params: QuantParams, array: np.ndarray, node: str) -> np.ndarray:
    """Reshape a scale or zero point to broadcast over an array."""
    if parameter.ndim == 0:
        return parameter.astype(np.float64 if array.dtype == np.int32 else np.float32)
    axis = params.axis % max(array.ndim, 1)
    if params.block and parameter.ndim == array.ndim and axis < array.ndim:
        blocks = list(array.shape)
        blocks[axis] = -(-array.shape[axis] // params.block)
        if list(parameter.shape) == blocks:
            wide = np.repeat(parameter, params.block, axis)
            return np.take(wide, np.arange(array.shape[axis]), axis).astype(np.float32)
    if (
        params.block
        or parameter.ndim != 1
        or axis >= array.ndim
        or array.shape[axis] != parameter.size
    ):
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
    low, high, _ = _INTEGERS[params.dtype]
    rounded: np.ndarray = np.clip(np.rint(array / scale) + zero, low, high)
    return rounded.astype(np.int8 if low else np.uint8)


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
