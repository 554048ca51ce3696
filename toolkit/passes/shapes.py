"""Infer the shape and type of every value, so that rules and costs can read them."""

import onnx_ir as ir
from onnx_ir.passes import common as ir_passes


def infer_shapes(model: ir.Model) -> str:
    """Run ONNX shape inference; values whose shape stays unknown are counted."""
    ir_passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    values = [value for node in model.graph for value in node.outputs]
    unknown = sum(value.shape is None for value in values)
    return f"{unknown} of {len(values)} values have no known shape" if unknown else ""
