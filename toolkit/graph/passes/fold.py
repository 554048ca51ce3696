"""Folds constants and drops nodes that do nothing.

f(c1, .., cn) = c      when every operand is a constant: c becomes an initializer
Identity(x) = x, Dropout(x) = x at inference
"""

import math

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from toolkit.graph.memory_limit import max_memory_bytes, value_bytes
from toolkit.graph.passes.branches import own_branch_outputs
from toolkit.graph.passes.shapes import propagate_shapes, settle_shapes

# What folding may write in all. Light models keep their weights as ConstantOfShape; the largest,
# VGG-19, has 1.4e8 of them in float32.
MAX_FOLDED_BYTES = 1 << 30
MAX_FOLDED_ELEMENTS = 1 << 28  # of one node, for the folder of onnxscript
KEPT_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Operators whose output may be far larger than their inputs: a few bytes can ask for terabytes.
GROWING_OPS = frozenset(
    {"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
)
# Others of unknown size are evaluated on so few elements that even all pairs of them are few.
MAX_ELEMENTS_OF_UNKNOWN = 1 << 13


def remove_no_ops(model: ir.Model) -> str:
    """Drop Identity and inference-time Dropout nodes and whatever nothing reads."""
    before = _count(model)
    rewrite(model, [dropout_inference_rule, dropout_zero_rule])
    _remove_identities(model)
    own_branch_outputs(model)  # first: what only an output of a branch reads counts as unused
    ir_passes.RemoveUnusedNodesPass()(model)
    removed = before - _count(model)
    return f"removed {removed} nodes" if removed else ""


def _remove_identities(model: ir.Model) -> None:
    """Let readers of an Identity read its input; one that gives a graph its output may stay."""
    for node in list(model.graph.all_nodes()):
        source = node.inputs[0] if node.inputs else None
        if node.op_type != "Identity" or node.domain != "" or source is None:
            continue
        result, graph, producer = node.outputs[0], node.graph, source.producer()
        assert graph is not None
        if result.is_graph_output():
            if producer is None or producer.graph is not graph or source.is_graph_output():
                continue
            source.name, name = None, result.name
            result.name = None
            source.name = name
        if source.shape is None:
            source.shape = result.shape
        source.type = source.type or result.type
        ir.convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def fold_constants(model: ir.Model) -> str:
    """Evaluate nodes whose inputs are all constants; constants become initializers.

    Repeats until nothing more folds: folding makes more shapes known, and shapes rule out branches.
    """
    before = remaining = _count(model)
    budget = _FoldingBudget(min(MAX_FOLDED_BYTES, max_memory_bytes() // 4))
    settled: list[str] = []
    while True:
        _fold_once(model, budget)
        count = _count(model)
        if count == remaining:
            changes = settle_shapes(model)
            if not changes:
                break
            settled += changes
        remaining = count
    folded = [f"folded {before - remaining} nodes"] if remaining < before else []
    return "; ".join(folded + settled)


def _fold_once(model: ir.Model, budget: "_FoldingBudget") -> None:
    propagate_shapes(model)  # sizes are known before they are made
    fold_constants_ir(
        model,
        input_size_limit=MAX_FOLDED_ELEMENTS,
        output_size_limit=MAX_FOLDED_ELEMENTS,
        should_fold=budget.take,
    )
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _fold_splits(model.graph, budget)
    _note_folded(model.graph)
    own_branch_outputs(model)
    ir_passes.RemoveUnusedNodesPass()(model)


def _note_folded(graph: ir.Graph) -> None:
    """Give constants the type and the sizes that they have; a model may note others."""
    for value in graph.initializers.values():
        constant = value.const_value
        if constant is None:
            continue
        if value.dtype != constant.dtype:
            value.type = ir.TensorType(constant.dtype)
        if value.shape != constant.shape:
            value.shape = ir.Shape(constant.shape.numpy())


def _fold_splits(graph: ir.Graph, budget: "_FoldingBudget") -> None:
    """Fold Split of a constant; the folder of onnxscript leaves out nodes of several results."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Split" and node.domain == "" else None
        data = source.const_value if source is not None else None
        if data is None or any(value.is_graph_output() for value in node.outputs):
            continue
        axis = node.attributes.get_int("axis", 0)
        lengths = [None if v.shape is None else v.shape[axis] for v in node.outputs]
        known = [length for length in lengths if isinstance(length, int)]
        if len(known) < len(lengths) or not budget.take(node):
            continue
        parts = np.split(data.numpy(), np.cumsum(known)[:-1], axis)
        for value, part in zip(node.outputs, parts, strict=True):
            name = f"{value.name}_folded"
            tensor = ir.tensor(part, name=name)
            constant = ir.Value(name=name, shape=ir.Shape(part.shape), const_value=tensor)
            constant.type = ir.TensorType(tensor.dtype)
            graph.register_initializer(constant)
            ir.convenience.replace_all_uses_with(value, constant)


def remove_unread(model: ir.Model) -> str:
    """Drop nodes and constants that only branches read which folding took away.

    Nodes of a branch count as readers until the model is copied, as it is before each pass.
    """
    before = _count(model) + len(model.graph.initializers)
    ir_passes.RemoveUnusedNodesPass()(model)
    removed = before - _count(model) - len(model.graph.initializers)
    return f"removed {removed} nodes and constants" if removed else ""


def own_outputs(model: ir.Model) -> str:
    """Give each output a node of its own: an Identity where it is an input or a constant."""
    ir_passes.OutputFixPass()(model)
    graph = model.graph
    constants = [i for i, value in enumerate(graph.outputs) if value.const_value is not None]
    for i in constants:
        value = graph.outputs[i]
        name = str(value.name)
        value.name = f"{name}_constant"
        out = ir.Value(name=name, type=value.type, shape=value.shape)
        graph.append(ir.Node("", "Identity", [value], outputs=[out], name=f"Identity_{name}"))
        graph.outputs[i] = out
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return f"{len(constants)} outputs are constants" if constants else ""


class _FoldingBudget:
    """The number of bytes that folding may still write."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes

    def take(self, node: ir.Node) -> bool:
        """Whether a node may be evaluated; if so, its outputs count against the budget.

        Q/DQ carry scales and are kept.
        """
        if node.op_type in KEPT_OPS:
            return False
        sizes = [_known_bytes(value) for value in node.outputs]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) and not _stays_small(node):
            return False
        if sum(known) > self._left:
            return False
        self._left -= sum(known)
        return True


def _stays_small(node: ir.Node) -> bool:
    """Whether results of unknown size cannot be large."""
    read = [_elements(value) for value in node.inputs if value is not None]
    total = sum(size for size in read if size is not None)
    return node.op_type not in GROWING_OPS and None not in read and total <= MAX_ELEMENTS_OF_UNKNOWN


def _known_bytes(value: ir.Value) -> int | None:
    """The bytes of a value, None where its size is not known; an unknown type counts as 8."""
    count = _elements(value)
    if count is None:
        return None
    return value_bytes(value) if value.dtype is not None else 8 * count


def _elements(value: ir.Value) -> int | None:
    """The number of elements of a value, None where it is not known."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    return math.prod(int(dim) for dim in value.shape if isinstance(dim, int))


def _count(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
