"""Shapes: infer those of every value, and mend what makes the inference fail."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir
from onnx_ir.passes.common._c_api_utils import call_onnx_api  # leaves large weights out

from toolkit.graph import native
from toolkit.graph.cpu_budget import CpuBudget
from toolkit.graph.extract import values_read

LOG = logging.getLogger(__name__)
# What ONNX's inference raises on a model that it cannot go through.
INFERENCE_ERRORS = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    RuntimeError,
    ValueError,
)

# Inference calls the results of these tensors of their elements' type.
SEQUENCE_OPS = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence"}
)
BRANCHES = ("then_branch", "else_branch")


def infer_shapes(model: ir.Model) -> str:
    """Run ONNX shape inference; values whose shape stays unknown are counted."""
    propagate_shapes(model)
    for node in model.graph.all_nodes():
        if node.op_type in SEQUENCE_OPS:
            node.outputs[0].type, node.outputs[0].shape = None, None
    values = [value for node in model.graph for value in node.outputs]
    unknown = sum(value.shape is None for value in values)
    return f"{unknown} of {len(values)} values have no known shape" if unknown else ""


def propagate_shapes(model: ir.Model) -> None:
    """Infer the shape and type of every value; a node that fails leaves only its own unknown."""
    try:
        inferred = call_onnx_api(
            lambda proto: native.infer_shapes(proto, strict=False, data_prop=True), model
        )
    except INFERENCE_ERRORS as err:
        LOG.debug("shape inference of the whole model failed: %s", err)
        return
    for graph, known in _pairs(model.graph, inferred.graph):
        _take_types(graph, known)


def _pairs(
    graph: ir.Graph, inferred: onnx.GraphProto
) -> Iterator[tuple[ir.Graph, onnx.GraphProto]]:
    """Yield a graph and those inside it, each with its inferred form."""
    yield graph, inferred
    for node, row in zip(graph, inferred.node, strict=True):
        rows = {attribute.name: attribute for attribute in row.attribute}
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _pairs(attribute.as_graph(), rows[name].g)


def _take_types(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Give the values of a graph the shapes and types of those of equal names."""
    rows = (*inferred.value_info, *inferred.input, *inferred.output)
    known = {info.name: info.type for info in rows}
    for name, value in ir.convenience.create_value_mapping(graph).items():
        if name not in known:
            continue
        shape = ir.serde.deserialize_type_proto_for_shape(known[name])
        kind = ir.serde.deserialize_type_proto_for_type(known[name])
        if shape is not None and shape != value.shape:
            value.shape = shape
        if kind is not None and kind.dtype is not None and kind.dtype != value.dtype:
            value.dtype = kind.dtype


@dataclass(frozen=True, slots=True)
class Pruned:
    """An `If` whose condition is not known, of which one branch is not valid for the sizes."""

    node: str
    branch: str
    dropped: str
    why: str

    @property
    def text(self) -> str:
        """What was assumed, and why."""
        return (
            f"{self.node} takes its {self.branch} whatever its condition is: its {self.dropped} is "
            f"not valid for these sizes ({self.why})"
        )


def settle_shapes(model: ir.Model, budget: CpuBudget) -> list[str]:
    """Drop shapes that do not hold, and the branches of `If` that shapes rule out; say which.

    Exporters note shapes that the nodes contradict. `If` nodes on the rank or the size of a
    tensor have a branch that is not valid for the sizes given; onnxruntime refuses to load it.
    Constants are folded before, so that a condition of shapes alone has decided by itself.
    Raises ImportModelError: it takes longer than `budget`.
    """
    changes = []
    if _contradiction(model) is not None and _forget_shapes(model):
        changes.append("dropped shapes that the nodes contradict")
    if not any(node.op_type == "If" for node in model.graph.all_nodes()):
        return changes
    pruned, _ = _prune(model.graph, dict(model.graph.opset_imports), budget)
    return changes + [row.text for row in pruned]


def _contradiction(model: ir.Model) -> str | None:
    """Return what strict inference says against a model, None where all of it is consistent."""
    try:
        call_onnx_api(lambda proto: native.infer_shapes(proto, strict=True, data_prop=True), model)
    except onnx.shape_inference.InferenceError as err:
        return str(err)
    return None


def _forget_shapes(model: ir.Model) -> bool:
    """Forget the shapes of results of ONNX's own operators where they stand against inference."""
    shapes = {
        value: value.shape
        for node in model.graph.all_nodes()
        if node.domain == ""
        for value in node.outputs
    }
    for value in shapes:
        value.shape = None
    propagate_shapes(model)
    forgotten = False
    for value, claimed in shapes.items():
        if value.shape is None:
            value.shape = claimed
        elif claimed is not None and not agree(claimed, value.shape):
            forgotten = True
    return forgotten


def agree(claimed: ir.Shape, inferred: ir.Shape) -> bool:
    """Return True if two shapes can be those of one tensor."""
    return len(claimed) == len(inferred) and all(
        a == b
        for a, b in zip(claimed, inferred, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    )


def _prune(
    graph: ir.Graph, opsets: dict[str, int], budget: CpuBudget
) -> tuple[list[Pruned], str | None]:
    """Inline `If` nodes of which one branch cannot hold; return them and what still fails.

    Branches inside come first: those that remain decide whether the outer one holds.
    """
    pruned: list[Pruned] = []
    while True:
        budget.check()
        alone = _standing_alone(graph, opsets)
        propagate_shapes(alone)
        _copy_shapes(alone.graph, graph)
        rows = next((rows for node in graph if (rows := _prune_node(node, opsets, budget))), None)
        if rows is None:
            return pruned, _contradiction(alone)
        pruned += rows


def _prune_node(node: ir.Node, opsets: dict[str, int], budget: CpuBudget) -> list[Pruned]:
    if node.op_type != "If" or node.domain != "":
        return []
    pruned: list[Pruned] = []
    errors: dict[str, str | None] = {}
    for name in BRANCHES:
        rows, errors[name] = _prune(node.attributes[name].as_graph(), opsets, budget)
        pruned += rows
    holding = [name for name, error in errors.items() if error is None]
    if len(holding) == 1:
        inline_branch(node, holding[0])
        ((dropped, error),) = [row for row in errors.items() if row[1] is not None]
        return [Pruned(str(node.name), holding[0], dropped, _short(str(error)))]
    return pruned


def _short(error: str) -> str:
    """Return an error of inference without the names of its levels."""
    return error.strip().splitlines()[-1].rpartition("] ")[2].strip()


def inline_branch(node: ir.Node, name: str) -> None:
    """Put the nodes of a branch of an `If` in its place."""
    graph, branch = node.graph, node.attributes[name].as_graph()
    assert isinstance(graph, ir.Graph)
    results = list(branch.outputs)
    branch.outputs.clear()
    nodes = list(branch)
    branch.remove(nodes)
    for constant in tuple(branch.initializers.values()):
        branch.initializers.pop(str(constant.name))
        graph.register_initializer(constant)
    for old, result in zip(node.outputs, results, strict=True):
        copy = ir.Value(name=old.name, type=result.type, shape=result.shape)
        nodes.append(ir.Node("", "Identity", [result], outputs=[copy], name=f"Identity_{old.name}"))
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], nodes, node.outputs, [n.outputs[0] for n in nodes[-len(results) :]]
    )


def _standing_alone(graph: ir.Graph, opsets: dict[str, int]) -> ir.Model:
    """Return a copy of a graph with what it captures as inputs and constants of its own."""
    computed = {*graph.inputs, *(value for node in graph for value in node.outputs)}
    captured = dict.fromkeys(value for node in graph for value in values_read(node))
    outer = [value for value in captured if value not in computed]
    constants = {*graph.initializers.values(), *(v for v in outer if v.is_initializer())}
    view = ir.GraphView(
        [*graph.inputs, *(value for value in outer if value not in constants)],
        graph.outputs,
        nodes=list(graph),
        initializers=list(constants),
        opset_imports=opsets,
        name=graph.name,
    )
    return ir.Model(view.clone(), ir_version=10)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        yield from node.outputs


def _copy_shapes(source: ir.Graph, target: ir.Graph) -> None:
    """Give the results of nodes the shapes of a copy of the graph."""
    for known, value in zip(_values(source), _values(target), strict=True):
        value.shape, value.type = known.shape or value.shape, known.type or value.type
