"""Fold what does not depend on the inputs, and drop nodes that do nothing.

f(c1, .., cn) = c      when every operand is a constant: c becomes an initializer
Identity(x) = x, Dropout(x) = x at inference
"""

import math

import onnx_ir as ir
from onnx_ir.passes import common as ir_passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules.common import dropout_inference_rule, dropout_zero_rule

from toolkit.passes.branches import own_branch_outputs

# Light models keep weights as ConstantOfShape; the largest seen is VGG-19's first fully
# connected layer, 4096 x 25088 = 1.0e8 elements. Folding stops an order of magnitude above.
MAX_FOLDED_ELEMENTS = 1 << 30
KEPT_OPS = frozenset({"QuantizeLinear", "DequantizeLinear"})


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
    """Evaluate nodes whose inputs are all constants; constants become initializers."""
    before = _count(model)
    fold_constants_ir(
        model,
        input_size_limit=MAX_FOLDED_ELEMENTS,
        output_size_limit=MAX_FOLDED_ELEMENTS,
        should_fold=_should_fold,
    )
    ir_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    own_branch_outputs(model)
    ir_passes.RemoveUnusedNodesPass()(model)
    folded = before - _count(model)
    return f"folded {folded} nodes" if folded else ""


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


def _should_fold(node: ir.Node) -> bool:
    """Fold everything but Q/DQ, which carry scales, and constants too large to keep."""
    if node.op_type in KEPT_OPS:
        return False
    if node.op_type == "ConstantOfShape":
        shape = ir.convenience.get_const_tensor(node.inputs[0]) if node.inputs[0] else None
        return shape is not None and math.prod(shape.numpy().tolist()) <= MAX_FOLDED_ELEMENTS
    return True


def _count(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes())
