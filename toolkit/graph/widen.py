"""A model typed in floats of 16 bits -> the same in float32.

Tools for TensorRT type the tensors, weights and scales of their Q/DQ models in float16 (ModelOpt by
default), with a Cast behind the inputs and before the outputs; others export in bfloat16. Every
float16 and bfloat16 is a float32, so constants keep their values; what nodes make is not rounded.
"""

import numpy as np
import onnx_ir as ir

from toolkit.graph.dtypes import IO_DTYPES

_FLOAT = ir.DataType.FLOAT
# Attributes that hold a type: of Cast, of EyeLike and of what is random, of DequantizeLinear, of
# Attention, of LayerNormalization.
_TYPES = ("to", "dtype", "output_dtype", "softmax_precision", "stash_type")


def widen(model: ir.Model, narrow: ir.DataType) -> bool:
    """Turn floats of 16 bits into float32 in a model, in place; return whether there were any.

    A model with such inputs or outputs stays as it is where engines can have them: these are its
    interface.
    """
    graph = model.graph
    ports = (*graph.inputs, *graph.outputs)
    if narrow in IO_DTYPES and any(value.dtype == narrow for value in ports):
        return False
    nodes = list(graph.all_nodes())
    # A state that a Loop only passes on is no node's operand.
    inner = (
        value for subgraph in graph.subgraphs() for value in (*subgraph.inputs, *subgraph.outputs)
    )
    operands: set[ir.Value | None] = {*ports, *inner}
    operands |= {value for node in nodes for value in (*node.inputs, *node.outputs)}
    halves = [
        value
        for value in operands
        if value is not None and isinstance(value.type, ir.TensorType) and value.dtype == narrow
    ]
    for value in halves:
        value.type = ir.TensorType(_FLOAT)
        if value.const_value is not None:
            value.const_value = _wide(value.const_value)
    changed = [_widen_attributes(node, narrow) for node in nodes]
    for node in nodes:
        if node.op_type == "Cast":
            _remove_cast(graph, node)
    return bool(halves) or any(changed)


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def _widen_attributes(node: ir.Node, narrow: ir.DataType) -> bool:
    """Return whether an attribute held or named the type."""
    widened = dict[str, ir.Attr]()
    for name, attribute in node.attributes.items():
        kind = attribute.type
        if kind == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == narrow:
            widened[name] = ir.AttrTensor(name, _wide(attribute.as_tensor()))
        elif kind == ir.AttributeType.INT and name in _TYPES and attribute.as_int() == narrow:
            widened[name] = ir.AttrInt64(name, _FLOAT)
    node.attributes.update(widened)
    return bool(widened)


def _remove_cast(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a Cast from float32 to float32; an output of the model keeps its name."""
    source, out = node.inputs[0], node.outputs[0]
    if source is None or source.dtype != _FLOAT or node.attributes.get_int("to", 0) != _FLOAT:
        return
    if out.is_graph_output():
        if node.graph is not graph or source.producer() is None or source.is_graph_output():
            return
        name, out.name = out.name, f"{out.name}_cast"
        source.name = name
        graph.outputs[list(graph.outputs).index(out)] = source
    out.replace_all_uses_with(source)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
