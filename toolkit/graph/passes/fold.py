"""Folds constants and drops nodes that do nothing.

f(c1, .., cn) = c      when every operand is a constant: c becomes an initializer
Identity(x) = x, Dropout(x) = x at inference
"""

import math

import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from toolkit.graph.passes.branches import own_branch_outputs

# What folding may write in all, in elements. Light models keep their weights as ConstantOfShape;
# the largest, VGG-19, has 1.4e8 of them.
MAX_FOLDED_ELEMENTS = 1 << 28
KEPT_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Operators whose output may be far larger than their inputs: a few bytes can ask for terabytes.
GROWING_OPS = frozenset(
    {"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile"}
)


def remove_no_ops(model: ir.Model) -> str:
    """Drop Identity and inference-time Dropout nodes and whatever nothing reads."""
    before = _count(model)
    rewrite(model, [dropout_inference_rule, dropout_zero_rule])
    ir_passes.IdentityEliminationPass()(model)
    own_branch_outputs(model)  # first: what only an output of a branch reads counts as unused
    ir_passes.RemoveUnusedNodesPass()(model)
    removed = before - _count(model)
    return f"removed {removed} nodes" if removed else ""


def fold_constants(model: ir.Model) -> str:
    """Evaluate nodes whose inputs are all constants; constants become initializers.

    Repeats until nothing more folds: folding makes more shapes known.
    """
    before = remaining = _count(model)
    budget = _FoldingBudget(MAX_FOLDED_ELEMENTS)
    while True:
        _fold_once(model, budget)
        count = _count(model)
        if count == remaining:
            break
        remaining = count
    return f"folded {before - remaining} nodes" if remaining < before else ""


def _fold_once(model: ir.Model, budget: "_FoldingBudget") -> None:
    ir_passes.ShapeInferencePass(data_prop=True)(model)  # sizes are known before they are made
    fold_constants_ir(
        model,
        input_size_limit=MAX_FOLDED_ELEMENTS,
        output_size_limit=MAX_FOLDED_ELEMENTS,
        should_fold=budget.take,
    )
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    own_branch_outputs(model)
    ir_passes.RemoveUnusedNodesPass()(model)


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
    """The number of elements that folding may still write."""

    def __init__(self, elements: int) -> None:
        self._left = elements

    def take(self, node: ir.Node) -> bool:
        """Whether a node may be evaluated; if so, its outputs count against the budget.

        Q/DQ carry scales and are kept.
        """
        if node.op_type in KEPT_OPS:
            return False
        sizes = [_elements(value) for value in node.outputs]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) and node.op_type in GROWING_OPS:
            return False
        if sum(known) > self._left:
            return False
        self._left -= sum(known)
        return True


def _elements(value: ir.Value) -> int | None:
    """The number of elements of a value, None where it is not known."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    return math.prod(int(dim) for dim in value.shape if isinstance(dim, int))


def _count(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
