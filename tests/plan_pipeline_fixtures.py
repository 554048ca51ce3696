"""A classifier for pipelines that are planned."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def classifier(path: Path, channels: int, activation: str = "Relu") -> Path:
    """Write convolutions that the DLA takes, if it takes their activation, and a Gemm behind a
    Flatten that it does not."""
    rng = np.random.default_rng()
    weights, nodes, data, depth = [], [], "image", 3
    for index in range(4):
        # Of a size that keeps values as large as the image: the ranges of the table are dummies.
        spread = (2 / (9 * depth)) ** 0.5
        values = rng.normal(0, spread, (channels, depth, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{index}"))
        nodes.append(
            helper.make_node(
                "Conv", [data, f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1] * 4
            )
        )
        nodes.append(helper.make_node(activation, [f"c{index}"], [f"t{index}"], f"relu{index}"))
        data, depth = f"t{index}", channels
    gemm = rng.normal(0, 1.0, (channels, 2)).astype(np.float32)
    weights.append(numpy_helper.from_array(gemm, "gemm"))
    nodes += [
        helper.make_node("GlobalAveragePool", [data], ["means"], "pool"),
        helper.make_node("Flatten", ["means"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "gemm"], ["logits"], "gemm"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("image", TensorProto.FLOAT, [1, 3, 64, 64])],
        [value("logits", TensorProto.FLOAT, [1, 2])],
        weights,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    return path
