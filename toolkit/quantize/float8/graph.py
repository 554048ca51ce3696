"""Writes Q/DQ of FP8 into a graph, as the importer and TensorRT read it.

Each activation has one Q/DQ pair, read by all products in FP8. Weights are stored as FP8, with a DQ
alone: the file is half as large as that of FP16.
"""

from collections.abc import Collection, Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from toolkit.errors import BuildError
from toolkit.graph.dtypes import FIRST_OPSET_WITH_FLOAT8
from toolkit.quantize.float8.products import float8_products, round_weight, scale_of
from toolkit.quantize.qdq.writer import QdqWriter

_ZERO = np.zeros((), ml_dtypes.float8_e4m3fn)


def check_opset(model: ir.Model) -> None:
    """Raise BuildError: the opset has no FP8."""
    opset = model.graph.opset_imports.get("", 0)
    if opset < FIRST_OPSET_WITH_FLOAT8:
        raise BuildError(
            f"The model has opset {opset}, but Q/DQ of FP8 need {FIRST_OPSET_WITH_FLOAT8} or newer "
            "and it cannot be raised; export it again with a newer opset."
        )


def with_float8(
    model: ir.Model,
    amax: Mapping[str, float],
    keep_float: Collection[str] = (),
    *,
    beside: Collection[str] = (),
) -> ir.Model:
    """Return a copy whose products have operands of FP8, but for the nodes `keep_float`.

    `amax`: of their activations. Of the nodes in `beside` a copy multiplies FP8, and its result is
    an output of the model; they themselves do not. Raises BuildError: the opset has no FP8.
    """
    check_opset(model)
    copy = model.clone()
    writer = QdqWriter(copy.graph)
    activations: dict[ir.Value, ir.Value] = {}
    for node in float8_products(copy):
        name, x = str(node.name), node.inputs[0]
        assert x is not None
        if name in keep_float:
            continue
        if x not in activations:
            activations[x] = _activation(writer, x, amax[str(x.name)])
        operands = (activations[x], _weight(writer, node))
        if name in beside:
            _copy_beside(copy.graph, node, operands)
            continue
        old = node.inputs[1]
        for index, operand in enumerate(operands):
            node.replace_input_with(index, operand)
        if old is not None and old.is_initializer() and not list(old.uses()):
            copy.graph.initializers.pop(str(old.name))
    copy.graph.sort()
    return copy


def beside_name(node: ir.Node) -> str:
    """Return the name of the result of a product's copy in FP8."""
    return f"{node.outputs[0].name}.fp8"


def _copy_beside(graph: ir.Graph, node: ir.Node, operands: tuple[ir.Value, ir.Value]) -> None:
    result = ir.Value(name=beside_name(node), shape=node.outputs[0].shape)
    result.type = node.outputs[0].type
    inputs = (*operands, *node.inputs[2:])
    attributes = list(node.attributes.values())
    name = f"{node.name}.fp8"
    graph.append(ir.Node("", node.op_type, inputs, attributes, outputs=[result], name=name))


def _activation(writer: QdqWriter, value: ir.Value, amax: float) -> ir.Value:
    scale = writer.constant(f"{value.name}_scale", scale_of(amax))
    parameters = (scale, writer.constant(f"{value.name}_zero", _ZERO))
    dtype = ir.DataType.FLOAT8E4M3FN
    stored = writer.quantize(value, parameters, f"{value.name}_fp8", dtype=dtype)
    return writer.dequantize(stored, parameters, f"{value.name}_restored")


def _weight(writer: QdqWriter, node: ir.Node) -> ir.Value:
    weight, value = round_weight(node), node.inputs[1]
    assert value is not None
    stored = writer.constant(f"{value.name}_fp8", weight.stored)
    zeros = np.zeros(weight.scales.shape, ml_dtypes.float8_e4m3fn)
    parameters = (
        writer.constant(f"{value.name}_scales", weight.scales),
        writer.constant(f"{value.name}_zeros", zeros),
    )
    return writer.dequantize(stored, parameters, f"{value.name}_restored", axis=weight.axis)
