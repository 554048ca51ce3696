"""Infer the shape and type of every value, so that rules and costs can read them."""

import onnx_ir as ir
from onnx_ir.passes import common as ir_passes

# Inference calls the results of these tensors of their elements' type.
SEQUENCE_OPS = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence"}
)


def infer_shapes(model: ir.Model) -> str:
    """Run ONNX shape inference; values whose shape stays unknown are counted."""
    ir_passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    for node in model.graph.all_nodes():
        if node.op_type in SEQUENCE_OPS:
            node.outputs[0].type, node.outputs[0].shape = None, None
    values = [value for node in model.graph for value in node.outputs]
    unknown = sum(value.shape is None for value in values)
    return f"{unknown} of {len(values)} values have no known shape" if unknown else ""
