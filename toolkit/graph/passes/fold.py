"""Folds constants and drops nodes that do nothing.

f(c1, .., cn) = c      when every operand is a constant: c becomes an initializer
Identity(x) = x, Dropout(x) = x at inference

What a node may cost is judged before it is evaluated: LINEAR_OPS, whose time is that of reading and
writing, here within a number of elements; all others in the child of `toolkit.graph.native`, where
a few small operands of an Einsum may take all of the seconds, but no more. A node that costs too
much stays a node.
"""

import math
import time

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from toolkit.errors import ImportModelError
from toolkit.graph import native
from toolkit.graph.cpu_budget import CpuBudget
from toolkit.graph.max_memory import max_memory_bytes
from toolkit.graph.memory_limit import value_bytes
from toolkit.graph.passes.branches import own_branch_outputs
from toolkit.graph.passes.folder import Folder
from toolkit.graph.passes.shapes import INFERENCE_ERRORS, propagate_shapes, settle_shapes

# What folding may write in all. Light models keep their weights as ConstantOfShape; the largest,
# VGG-19, has 1.4e8 of them in float32.
MAX_FOLDED_BYTES = 1 << 30
MAX_FOLDED_ELEMENTS = 1 << 28  # of one node, for the folder of onnxscript
KEPT_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Operators that NumPy evaluates in a time of the elements that they read and write.
LINEAR_OPS = frozenset(
    {"Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "Cos"}
    | {"CumSum", "Div", "Equal", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "Gather"}
    | {"Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log"}
    | {"Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pad", "Pow", "Range"}
    | {"Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu"}
    | {"Reshape", "Round", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt"}
    | {"Squeeze", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"}
)
MAX_LINEAR_ELEMENTS = 1 << 31  # read and written by LINEAR_OPS in all: a minute or two at most
MAX_CHILD_SECONDS = 30.0  # of other operators in all
MAX_SECONDS = 60.0  # of the processor, for folding in all; large models take a few
# Operators whose output may be far larger than their inputs: a few bytes can ask for terabytes.
GROWING_OPS = frozenset({"ConstantOfShape", "Expand", "EyeLike", "Pad", "Range", "Tile"})
# Others of unknown size are evaluated on so few elements that even all pairs of them are few.
MAX_ELEMENTS_OF_UNKNOWN = 1 << 13
MAX_PARTS = 1 << 14  # of a SplitToSequence, whose folding makes a tensor of each
MAX_RANK = 64
MAX_GATHERED = 1 << 20  # sizes of a tensor's shape, which are integers of Python while they fold


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
    Raises ImportModelError: it takes longer than MAX_SECONDS, or makes millions of tensors of one.
    """
    before = remaining = _count(model)
    seconds = CpuBudget("folding its constants", MAX_SECONDS)
    budget = _FoldingBudget(min(MAX_FOLDED_BYTES, max_memory_bytes() // 4), seconds)
    shape_changes: list[str] = []
    while True:
        _fold_once(model, budget)
        seconds.check()
        count = _count(model)
        if count == remaining:
            changes = settle_shapes(model, seconds)
            if not changes:
                break
            shape_changes += changes
        remaining = count
    folded = [f"folded {before - remaining} nodes"] if remaining < before else []
    return "; ".join(folded + shape_changes)


def _fold_once(model: ir.Model, budget: "_FoldingBudget") -> None:
    propagate_shapes(model)  # sizes are known before they are made
    evaluator = _Evaluator(model, budget)
    Folder(
        model,
        max_elements=MAX_FOLDED_ELEMENTS,
        should_fold=evaluator.should_fold,
        before=_refuse_parts,
    )(model)
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
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


class _Evaluator:
    """Decides which nodes the folder of onnxscript evaluates, and evaluates others itself."""

    def __init__(self, model: ir.Model, budget: "_FoldingBudget") -> None:
        self._model = model
        self._budget = budget

    def should_fold(self, node: ir.Node) -> bool:
        """Whether the folder may evaluate a node; a result that is made here replaces its own."""
        budget, graph = self._budget, node.graph
        if not budget.allows(node):
            return False
        is_replaceable = isinstance(graph, ir.Graph) and not any(
            value.is_graph_output() for value in node.outputs
        )
        if node.op_type not in LINEAR_OPS:
            if is_replaceable and budget.tries(node):
                self._fold_in_child(node)
            return False
        budget.take(node)
        if node.op_type != "Split":
            return True
        if is_replaceable:
            _fold_split(node)
        return False  # the folder leaves out nodes of several results

    def _fold_in_child(self, node: ir.Node) -> None:
        """Evaluate a node that may take long, until the seconds of such nodes are over."""
        budget, begin_s = self._budget, time.monotonic()
        try:
            results = native.evaluate(
                _alone(node, self._model),
                cpu_seconds=budget.child_seconds,
                max_bytes=budget.left_bytes,
            )
        except native.TooSlowError:
            budget.child_seconds = 0.0
            return
        except (ImportModelError, RuntimeError, *INFERENCE_ERRORS):
            return  # the node stays, and is judged where it runs
        finally:
            budget.child_seconds -= time.monotonic() - begin_s
        if len(results) == len(node.outputs):
            budget.left_bytes -= sum(len(tensor.raw_data) for tensor in results.values())
            for value in node.outputs:
                _replace(node, value, ir.from_proto(results[str(value.name)]))


def _fold_split(node: ir.Node) -> None:
    """Fold a Split of a constant whose lengths are known."""
    source = node.inputs[0]
    data = source.const_value if source is not None else None
    axis = node.attributes.get_int("axis", 0)
    lengths = [None if v.shape is None else v.shape[axis] for v in node.outputs]
    known = [length for length in lengths if isinstance(length, int)]
    if data is None or len(known) < len(lengths):
        return
    parts = np.split(data.numpy(), np.cumsum(known)[:-1], axis)
    for value, part in zip(node.outputs, parts, strict=True):
        _replace(node, value, ir.tensor(part))


def _replace(node: ir.Node, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Let readers of a result of a node read a constant."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    name = f"{value.name}_folded"
    tensor.name = name
    constant = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    constant.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(constant)
    ir.convenience.replace_all_uses_with(value, constant)


def _alone(node: ir.Node, model: ir.Model) -> onnx.ModelProto:
    """Return a model of one node and the constants that it reads."""
    read = {str(v.name): v for v in node.inputs if v is not None}
    graph = onnx.GraphProto(name="node", node=[ir.to_proto(node)])
    for name, value in read.items():
        assert value.const_value is not None
        tensor = ir.serde.serialize_tensor(value.const_value)
        tensor.name = name
        graph.initializer.append(tensor)
    graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in node.outputs)
    opsets = [onnx.helper.make_opsetid(*row) for row in model.graph.opset_imports.items()]
    return onnx.ModelProto(graph=graph, opset_import=opsets, ir_version=model.ir_version)


def _refuse_parts(node: ir.Node) -> None:
    """Refuse a node that folding would take apart into millions of values of Python.

    Raises ImportModelError, which names the node.
    """
    count, limit = 0, MAX_PARTS
    if node.op_type == "SplitToSequence" and not node.domain:
        count = _parts(node)
    elif node.op_type == "Gather" and not node.domain and len(node.inputs) == 2:
        source, indices = (0 if v is None else _elements(v) for v in node.inputs)
        if source is not None and source <= MAX_RANK:
            count, limit = indices or 0, MAX_GATHERED
    if count > limit:
        raise ImportModelError(
            f"node {node.name!r} ({node.op_type}) makes {count} parts, the limit is {limit}; "
            "export the model again"
        )


def _parts(node: ir.Node) -> int:
    """Return how many tensors a SplitToSequence makes, 0 where that is not known."""
    source, split, *_ = (*node.inputs, None)
    if source is None or split is None or split.shape is None or source.shape is None:
        return 0
    if len(split.shape) == 1:
        return _elements(split) or 0
    axis = node.attributes.get_int("axis", 0)
    size = source.shape[axis] if -len(source.shape) <= axis < len(source.shape) else 0
    chunk = 1 if split.const_value is None else int(split.const_value.numpy().reshape(-1)[0])
    return size // max(1, chunk) if isinstance(size, int) else 0


def remove_unread(model: ir.Model) -> str:
    """Drop nodes and constants that only branches read which folding took away.

    The nodes of such a branch are in no graph any more, and still count as readers.
    """
    before = _count(model) + len(model.graph.initializers)
    live = set(model.graph.all_nodes())
    values = [value for node in live for value in node.outputs]
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *values):
        for use in tuple(value.uses()):
            if use.node not in live:
                use.node.replace_input_with(use.idx, None)
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
    """What folding may still write and compute."""

    def __init__(self, limit_bytes: int, seconds: CpuBudget) -> None:
        self.left_bytes = limit_bytes
        self.child_seconds = MAX_CHILD_SECONDS
        self._left_elements = MAX_LINEAR_ELEMENTS
        self._seconds = seconds
        self._tried: set[str] = set()

    def allows(self, node: ir.Node) -> bool:
        """Whether there is enough left for a node.

        Q/DQ carry scales and are kept. Text is never evaluated: it grows without a size, and
        patterns of it take for ever.
        """
        if node.op_type in KEPT_OPS or self._seconds.is_spent or _holds_text(node):
            return False
        sizes = [_known_bytes(value) for value in node.outputs]
        if None in sizes and node.op_type in LINEAR_OPS and not _stays_small(node):
            return False
        return _bytes_made(node) <= self.left_bytes and _work(node) <= self._left_elements

    def take(self, node: ir.Node) -> None:
        """Count a node that is evaluated in this process."""
        self.left_bytes -= _bytes_made(node)
        self._left_elements -= _work(node)

    def tries(self, node: ir.Node) -> bool:
        """Whether to evaluate a node in the child, which each is once."""
        if self.child_seconds <= 0 or str(node.name) in self._tried:
            return False
        self._tried.add(str(node.name))
        return True


def _bytes_made(node: ir.Node) -> int:
    return sum(_known_bytes(value) or 0 for value in node.outputs)


def _work(node: ir.Node) -> int:
    """The elements that a node reads and writes, as far as they are known."""
    values = (value for value in (*node.inputs, *node.outputs) if value is not None)
    return sum(_elements(value) or 0 for value in values)


def _holds_text(node: ir.Node) -> bool:
    return any(
        value is not None and value.dtype == ir.DataType.STRING
        for value in (*node.inputs, *node.outputs)
    )


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
