"""Operators that ONNX defines by others: where no kernel computes one, its definition does.

Attention, GroupNormalization or SoftmaxCrossEntropyLoss are functions in the ONNX standard: graphs
of simpler operators. The nodes of a definition carry the name of the node that they stand for.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import defs, helper

from toolkit.graph.passes import run_passes

Types = Mapping[str, onnx.ValueInfoProto]
Weights = Mapping[str, onnx.TensorProto]
Schema = Any  # defs.OpSchema: the stubs of onnx leave out all that speaks of functions
_DOMAIN = "definition"  # of an operator that is to be replaced


def expand_functions(segment: bytes, names: Collection[str]) -> bytes | None:
    """Return a segment's ONNX with the nodes `names` as what defines them, one level of it.

    None where ONNX has a definition of none of them.
    """
    model = onnx.ModelProto.FromString(segment)
    graph = model.graph
    types = {one.name: one for one in (*graph.input, *graph.output, *graph.value_info)}
    weights = {one.name: one for one in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    expanded = False
    for node in graph.node:
        schema = _schema(node, model.opset_import) if node.name in names else None
        body = None if schema is None else _definition(node, schema, model, types, weights)
        if body is None or any(one.op_type == node.op_type for one in body.node):
            nodes.append(node)
            continue
        expanded = True
        nodes += body.node
        graph.initializer.extend(body.initializer)
        graph.value_info.extend(body.value_info)
    if not expanded:
        return None
    del graph.node[:]
    graph.node.extend(nodes)
    return model.SerializeToString()


def _schema(node: onnx.NodeProto, imports: Sequence[onnx.OperatorSetIdProto]) -> Schema | None:
    """Return what ONNX says of an operator that it defines by others; None for all others."""
    if node.domain not in ("", "ai.onnx"):
        return None
    try:
        schema = defs.get_schema(node.op_type, _opset(imports), "")
    except defs.SchemaError:
        return None
    return schema if schema.all_function_opset_versions else None  # type: ignore[attr-defined]


def _opset(imports: Sequence[onnx.OperatorSetIdProto]) -> int:
    return next(one.version for one in imports if one.domain in ("", "ai.onnx"))


def _with_defaults(node: onnx.NodeProto, schema: Schema) -> onnx.NodeProto:
    """Return a node with all its attributes: a definition reads those left to their defaults."""
    given = {one.name for one in node.attribute}
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            whole.attribute.append(attribute.default_value)
    return whole


def _function(
    node: onnx.NodeProto, schema: Schema, opset: int, types: Types, weights: Weights
) -> onnx.FunctionProto:
    """Return the definition of an operator as a function of a domain of its own."""
    at = [one for one in schema.all_function_opset_versions if one <= opset][-1]
    if at in schema.function_opset_versions:
        raw = schema.get_function_with_opset_version(at)
    else:
        kinds = [_typed(n, types, weights).type if n else onnx.TypeProto() for n in node.input]
        raw = schema.get_context_dependent_function_with_opset_version(
            at, node.SerializeToString(), [kind.SerializeToString() for kind in kinds]
        )
    function = onnx.FunctionProto.FromString(raw)
    function.domain, function.name = _DOMAIN, node.op_type
    del function.opset_import[:]
    function.opset_import.append(helper.make_opsetid("", opset))
    return function


def _definition(
    node: onnx.NodeProto,
    schema: Schema,
    model: onnx.ModelProto,
    types: Types,
    weights: Weights,
) -> onnx.GraphProto:
    """Return what defines a node, folded, with shapes."""
    whole = _with_defaults(node, schema)
    function = _function(whole, schema, _opset(model.opset_import), types, weights)
    whole.domain = _DOMAIN
    read = [name for name in dict.fromkeys(node.input) if name]
    small = [weights[name] for name in read if name in weights and _is_inside(weights[name])]
    held = {one.name for one in small}
    alone = helper.make_graph(
        [whole],
        "definition",
        [_typed(name, types, weights) for name in read],
        [types[name] for name in node.output if name],
        small,
    )
    imports = [*model.opset_import, helper.make_opsetid(_DOMAIN, 1)]
    one_node = helper.make_model(
        alone, opset_imports=imports, ir_version=model.ir_version, functions=[function]
    )
    inlined = onnx.inliner.inline_local_functions(one_node)
    for one in [one for one in inlined.graph.input if one.name in held]:
        inlined.graph.input.remove(one)  # was there for its type alone
    folded, _ = run_passes(ir.from_proto(inlined))
    body = ir.to_proto(folded).graph
    outside = {*read, *node.output}
    for tensor in body.initializer:
        tensor.name = _inner(tensor.name, outside, node)
    for value in body.value_info:
        value.name = _inner(value.name, outside, node)
    for part in body.node:
        part.name = node.name
        part.input[:] = [_inner(name, outside, node) for name in part.input]
        part.output[:] = [_inner(name, outside, node) for name in part.output]
    kept = [one for one in body.initializer if one.name not in outside]
    del body.initializer[:]
    body.initializer.extend(kept)
    return body


def _inner(name: str, outside: Collection[str], node: onnx.NodeProto) -> str:
    return name if not name or name in outside else f"{node.output[0]}/{name}"


def _is_inside(tensor: onnx.TensorProto) -> bool:
    """Whether the segment holds the values of a constant; large ones lie beside it."""
    return tensor.data_location != onnx.TensorProto.EXTERNAL


def _typed(name: str, types: Types, weights: Weights) -> onnx.ValueInfoProto:
    if name in weights:
        return helper.make_tensor_value_info(name, weights[name].data_type, weights[name].dims)
    return types[name]
