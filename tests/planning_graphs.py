"""Single nodes and small graphs for the planning tests."""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from scripts.one_node import Shape, constant, numbers, one_node

__all__ = ["constant", "graph_of", "numbers", "one_node"]


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Shape],
    outputs: Sequence[str],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 19,
) -> ir.Model:
    """Return a model with the shapes of all tensors inferred."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))
