"""Operators that ONNX defines by others: where no kernel computes one, its definition does.

Attention, GroupNormalization or SoftmaxCrossEntropyLoss are functions in the ONNX standard: graphs
of simpler operators. The nodes of a definition carry the name of the node that they stand for.
"""

from collections.abc import Collection, Mapping
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import defs, helper

from toolkit.graph.extract import is_large
from toolkit.graph.passes import run_passes

Schema = Any  # defs.OpSchema: the stubs of onnx leave out all that speaks of functions
_DOMAIN = "definition"  # of an operator that is to be replaced


def expand_functions(segment: ir.Model, names: Collection[str]) -> ir.Model | None:
    """Return a copy of a segment with the nodes `names` as what defines them, one level of it.

    None where ONNX has a definition of none of them.
    """
    opset = segment.graph.opset_imports.get("", 1)
    bodies: dict[int, ir.Graph] = {}
    for at, node in enumerate(segment.graph):
        schema = _schema(node, opset) if node.name in names else None
        body = None if schema is None else _definition(node, schema, segment)
        if body is not None and all(inner.op_type != node.op_type for inner in body):
            bodies[at] = body
    if not bodies:
        return None
    expanded = segment.clone()
    nodes = list(expanded.graph)
    for at, body in bodies.items():
        _inline(expanded.graph, nodes[at], body)
    return expanded


def _inline(graph: ir.Graph, node: ir.Node, body: ir.Graph) -> None:
    """Put the body of a definition in the place of a node; names join them."""
    actual = {value.name: value for value in node.inputs if value is not None}
    results = {value.name: value for value in body.outputs}
    constants = list(body.initializers.values())
    for formal in (*body.inputs, *constants):
        if formal.name in actual:
            formal.replace_all_uses_with(actual[formal.name])
    members = list(body)
    body.outputs.clear()
    body.remove(members)
    for constant in constants:
        body.initializers.pop(str(constant.name))
        if constant.name not in actual:
            graph.register_initializer(constant)
    graph.insert_before(node, members)
    for value in node.outputs:
        if value.name:
            value.replace_all_uses_with(results[value.name], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _schema(node: ir.Node, opset: int) -> Schema | None:
    """Return what ONNX says of an operator that it defines by others; None for all others."""
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        schema = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:
        return None
    return schema if schema.all_function_opset_versions else None  # type: ignore[attr-defined]


def _with_defaults(node: ir.Node, schema: Schema) -> onnx.NodeProto:
    """Return a node with all its attributes: a definition reads those left to their defaults."""
    whole = ir.serde.serialize_node(node)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type:
            whole.attribute.append(attribute.default_value)
    return whole


def _function(
    node: onnx.NodeProto, schema: Schema, opset: int, types: Mapping[str, onnx.ValueInfoProto]
) -> onnx.FunctionProto:
    """Return the definition of an operator as a function of a domain of its own."""
    at = [version for version in schema.all_function_opset_versions if version <= opset][-1]
    if at in schema.function_opset_versions:
        raw = schema.get_function_with_opset_version(at)
    else:
        kinds = [types[name].type if name else onnx.TypeProto() for name in node.input]
        raw = schema.get_context_dependent_function_with_opset_version(
            at, node.SerializeToString(), [kind.SerializeToString() for kind in kinds]
        )
    function = onnx.FunctionProto.FromString(raw)
    function.domain, function.name = _DOMAIN, node.op_type
    del function.opset_import[:]
    function.opset_import.append(helper.make_opsetid("", opset))
    return function


def _definition(node: ir.Node, schema: Schema, model: ir.Model) -> ir.Graph | None:
    """Return what defines a node, folded, with shapes; None: its operands do not fit it.

    ONNX has definitions as protos only.
    """
    whole = _with_defaults(node, schema)
    read = {str(value.name): value for value in node.inputs if value is not None}
    types = {name: _typed(value) for name, value in read.items()}
    opset = model.graph.opset_imports[""]
    function = _function(whole, schema, opset, types)
    whole.domain = _DOMAIN
    small = {
        name: value.const_value
        for name, value in read.items()
        if value.is_initializer() and value.const_value and not is_large(value.const_value)
    }
    alone = helper.make_graph(
        [whole],
        "definition",
        list(types.values()),
        [_typed(value) for value in node.outputs if value.name],
        [ir.serde.serialize_tensor(tensor) for tensor in small.values()],
    )
    imports = [helper.make_opsetid(*item) for item in model.graph.opset_imports.items()]
    one_node = helper.make_model(
        alone,
        opset_imports=[*imports, helper.make_opsetid(_DOMAIN, 1)],
        ir_version=model.ir_version,
        functions=[function],
    )
    try:
        inlined = onnx.inliner.inline_local_functions(one_node)
    except RuntimeError:  # all that ONNX's C++ raises here
        return None
    for constant in [value for value in inlined.graph.input if value.name in small]:
        inlined.graph.input.remove(constant)  # was there for its type alone
    folded, _ = run_passes(ir.from_proto(inlined))
    _rename(folded.graph, node, {*read, *(str(value.name) for value in node.outputs)})
    return folded.graph


def _rename(body: ir.Graph, node: ir.Node, outside: Collection[str]) -> None:
    """Name the tensors of a definition after the node's result, and its nodes as the node."""
    prefix = node.outputs[0].name
    results = [value for part in body for value in part.outputs]
    for value in (*body.initializers.values(), *results):
        if value.name and value.name not in outside:
            value.name = f"{prefix}/{value.name}"
    for part in body:
        part.name = node.name


def _typed(value: ir.Value) -> onnx.ValueInfoProto:
    if value.is_initializer() and value.const_value is not None:
        tensor = value.const_value
        shape = tensor.shape.numpy()
        return helper.make_tensor_value_info(str(value.name), tensor.dtype.value, shape)
    return ir.serde.serialize_value(value)
