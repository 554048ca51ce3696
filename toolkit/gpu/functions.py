"""Operators that ONNX defines by others: where no kernel computes one, its definition does.

Attention, GroupNormalization or SoftmaxCrossEntropyLoss are functions in the ONNX standard: graphs
of simpler operators. The nodes of a definition carry the name of the node that they stand for.
"""

from collections.abc import Collection, Mapping, Sequence

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import defs, helper

from toolkit.passes import run_passes

Types = Mapping[str, onnx.ValueInfoProto]
Weights = Mapping[str, onnx.TensorProto]


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
        body = None
        schema = _schema(node, model.opset_import) if node.name in names else None
        if schema is not None:
            body = _definition(node, schema, model, types, weights)
        if body is None:
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


def _schema(
    node: onnx.NodeProto, imports: Sequence[onnx.OperatorSetIdProto]
) -> defs.OpSchema | None:
    """Return what ONNX says of an operator that it defines by others; None for all others."""
    if node.domain not in ("", "ai.onnx"):
        return None
    version = next(one.version for one in imports if one.domain in ("", "ai.onnx"))
    try:
        schema = defs.get_schema(node.op_type, version, "")
    except defs.SchemaError:
        return None
    # The stubs of onnx do not have these two.
    has = schema.has_function or schema.has_context_dependent_function  # type: ignore[attr-defined]
    return schema if has else None


def _with_defaults(node: onnx.NodeProto, schema: defs.OpSchema) -> onnx.NodeProto:
    """Return a node with all its attributes: a definition reads those left to their defaults."""
    given = {one.name for one in node.attribute}
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            whole.attribute.append(attribute.default_value)
    return whole


def _definition(
    node: onnx.NodeProto,
    schema: defs.OpSchema,
    model: onnx.ModelProto,
    types: Types,
    weights: Weights,
) -> onnx.GraphProto | None:
    """Return what defines a node, folded, with shapes; None where that is the node itself."""
    read = [name for name in dict.fromkeys(node.input) if name]
    small = [weights[name] for name in read if name in weights and _is_inside(weights[name])]
    held = {one.name for one in small}
    alone = helper.make_graph(
        [_with_defaults(node, schema)],
        "definition",
        [_typed(name, types, weights) for name in read],
        [types[name] for name in node.output if name],
        small,
    )
    whole = helper.make_model(alone, opset_imports=model.opset_import, ir_version=model.ir_version)
    inlined = onnx.inliner.inline_selected_functions(
        whole, [("", node.op_type)], inline_schema_functions=True
    )
    if [one.op_type for one in inlined.graph.node] == [node.op_type]:
        return None
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
