"""Check a Q/DQ model against the rules of TensorRT; each rule yields its violations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.quantize.qdq.export import SHAPE_READERS, QdqTarget, qdq_target
from toolkit.quantize.qdq.nodes import (
    INTEGER_OPS,
    QuantParams,
    constant_of,
    has_weight,
    is_dequantize,
    is_quantize,
    quant_params_of,
    quantized_constant,
)
from toolkit.quantize.quantize import QUANTIZED_OPS, is_activation, masked_tensors, weight_axis


@dataclass(frozen=True, slots=True)
class QdqRule:
    """`check` yields one sentence for each violation."""

    name: str
    check: Callable[[ir.Model, QdqTarget], Iterator[str]]


def check_qdq(
    model: ir.Model, target: str, *, in_int8: frozenset[str] | None = None
) -> tuple[str, ...]:
    """Every violation of RULES for a row of `qdq_export.TARGETS`, as "rule: sentence".

    `in_int8`: the nodes of which a target asks Q/DQ on every tensor, None: all. Those on the GPU,
    and those kept in floating point, may read floats.
    """
    row = qdq_target(target)
    sentences = [f"{rule.name}: {text}" for rule in RULES for text in rule.check(model, row)]
    if row.every_tensor:
        sentences += [f"every-tensor: {text}" for text in _every_tensor(model, row, in_int8)]
    return tuple(sentences)


def _opset(model: ir.Model, row: QdqTarget) -> Iterator[str]:
    opset = model.graph.opset_imports.get("", 0)
    if opset < row.min_opset:
        yield f"the model has opset {opset}, but {row.since} wants {row.min_opset} or newer"


def _integer_operators(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node in model.graph.all_nodes():
        if node.op_type in INTEGER_OPS or node.op_type.startswith("QLinear"):
            yield f"node {node.name!r} is {node.op_type}, which TensorRT does not have"


def _signed(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node, params in _quant_params(model):
        if params is None or params.dtype == ir.DataType.INT8:
            continue
        constant = is_dequantize(node) and quantized_constant(node) is not None
        hint = ", as of a bias" if constant and params.dtype == ir.DataType.INT32 else ""
        yield f"node {node.name!r} has {params.dtype.name}{hint}, but only INT8 is taken"


def _symmetric(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node, params in _quant_params(model):
        if params is not None and np.any(params.zero != 0):
            worst = params.zero.flat[np.argmax(params.zero != 0)]
            yield f"node {node.name!r} has the zero point {worst}, but only 0 is taken"


def _scales(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node, params in _quant_params(model):
        if params is None:
            yield f"node {node.name!r} computes its scale or zero point, which must be constants"
        elif params.block:
            yield f"node {node.name!r} has a scale for each block, but INT8 has none"
        elif not np.all((params.scale > 0) & np.isfinite(params.scale)):
            yield f"node {node.name!r} has a scale that is not positive and finite"


def _per_tensor(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node, params in _quant_params(model):
        if params is None or params.scale.ndim == 0:
            continue
        constant = quantized_constant(node) if is_dequantize(node) else node.inputs[0]
        if constant_of(constant) is None:
            yield (
                f"node {node.name!r} gives an activation {params.scale.size} scales, "
                "but activations have one"
            )


def _pairs(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node in model.graph:
        if is_quantize(node):
            for reader, _ in node.outputs[0].uses():
                if not is_dequantize(reader):
                    yield (
                        f"node {reader.name!r} ({reader.op_type}) reads INT8 of {node.name!r}, "
                        "but only DequantizeLinear may"
                    )
        if not is_dequantize(node) or node.inputs[0] is None:
            continue
        quantize = node.inputs[0].producer()
        if quantize is None or not is_quantize(quantize):
            continue
        params, quantize_params = quant_params_of(node), quant_params_of(quantize)
        if params is None or quantize_params is None:
            continue
        if not np.array_equal(params.scale, quantize_params.scale) or (
            params.scale.ndim and params.axis != quantize_params.axis
        ):
            yield f"nodes {quantize.name!r} and {node.name!r} are a pair, but their scales differ"


def _weights(model: ir.Model, _row: QdqTarget) -> Iterator[str]:
    for node in model.graph:
        if not has_weight(node):
            continue
        index = QUANTIZED_OPS[node.op_type].weight
        assert index is not None  # has_weight
        weight, first = node.inputs[index], node.inputs[0]
        producer = weight.producer() if weight is not None else None
        int8_data = first is not None and is_dequantize(first.producer())
        if producer is None or not is_dequantize(producer):
            array = constant_of(weight)
            if int8_data and array is not None and array.ndim > 1:
                yield f"node {node.name!r} reads INT8, but its weight has no Q/DQ"
        elif quantized_constant(producer) is not None:
            if not int8_data:
                yield f"node {node.name!r} has an INT8 weight, but reads floating point"
            yield from _channels(node, producer)


def _channels(node: ir.Node, dequantize: ir.Node) -> Iterator[str]:
    params, array = quant_params_of(dequantize), constant_of(quantized_constant(dequantize))
    if params is None or array is None or array.ndim < 2:
        return
    axis = weight_axis(node, QUANTIZED_OPS[node.op_type], array)
    if axis is None:
        if params.scale.ndim:
            yield f"node {node.name!r} has a batch of weights, which has one scale"
    elif params.scale.ndim == 0:
        if array.shape[axis] > 1:
            yield (
                f"the weight of node {node.name!r} has one scale for its {array.shape[axis]} "
                f"channels, but needs one for each along axis {axis}"
            )
    elif params.axis % array.ndim != axis:
        yield (
            f"the weight of node {node.name!r} ({node.op_type}) has its scales along axis "
            f"{params.axis}, but its output channels are axis {axis}"
        )
    elif params.scale.size != array.shape[axis]:
        yield (
            f"the weight of node {node.name!r} has {params.scale.size} scales for "
            f"{array.shape[axis]} channels"
        )


def _every_tensor(model: ir.Model, row: QdqTarget, in_int8: frozenset[str] | None) -> Iterator[str]:
    masks = masked_tensors(model)
    for node in model.graph:
        if is_quantize(node) or is_dequantize(node) or node.op_type in SHAPE_READERS:
            continue
        if in_int8 is not None and str(node.name) not in in_int8:
            continue
        for value in node.inputs:
            if value is None or not is_activation(value) or str(value.name) in masks:
                continue
            if not is_dequantize(value.producer()):
                yield (
                    f"node {node.name!r} ({node.op_type}) reads {value.name!r} in floating point, "
                    f"but {row.name} wants Q/DQ on every tensor"
                )


def _quant_params(model: ir.Model) -> Iterator[tuple[ir.Node, QuantParams | None]]:
    for node in model.graph.all_nodes():
        if is_quantize(node) or is_dequantize(node):
            yield node, quant_params_of(node)


RULES: tuple[QdqRule, ...] = (
    QdqRule("opset", _opset),
    QdqRule("integer-operator", _integer_operators),
    QdqRule("signed", _signed),
    QdqRule("symmetric", _symmetric),
    QdqRule("scale", _scales),
    QdqRule("per-tensor", _per_tensor),
    QdqRule("pair", _pairs),
    QdqRule("weight", _weights),
)
