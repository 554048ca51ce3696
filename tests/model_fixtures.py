"""Small ONNX models for tests, written with onnx.helper."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    outputs: dict[str, Sequence[int | str | None] | None],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 19,
    dtype: int = TensorProto.FLOAT,
) -> Path:
    """Write a model and return its path."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    onnx.save(model, path)
    return path


def classification_of_convnet(folder: Path) -> Path:
    """Write a pipeline for `small_convnet`, whose video is missing, and labels.txt beside it."""
    (folder / "labels.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    path = folder / "pipeline.toml"
    path.write_text(
        'name = "classes"\n[source]\nuri = "missing.mp4"\n[preprocess]\nwidth = 32\nheight = 32\n'
        '[decode]\nkind = "classification"\nscores = "y"\n'
    )
    return path


def small_convnet(path: Path, rng: np.random.Generator, size: int = 32, channels: int = 16) -> Path:
    """A residual convolutional network: input x [1,3,size,size], output y [1,10]."""
    c = channels
    weights = {
        "w0": rng.normal(size=(c, 3, 3, 3)).astype(np.float32) * 0.3,
        "b0": rng.normal(size=c).astype(np.float32) * 0.1,
        "w1": rng.normal(size=(c, c, 3, 3)).astype(np.float32) * 0.1,
        "b1": rng.normal(size=c).astype(np.float32) * 0.1,
        "gamma": rng.uniform(0.5, 1.5, c).astype(np.float32),
        "beta": rng.normal(size=c).astype(np.float32) * 0.1,
        "mean": rng.normal(size=c).astype(np.float32) * 0.1,
        "var": rng.uniform(0.5, 1.5, c).astype(np.float32),
        "w2": rng.normal(size=(10, c)).astype(np.float32) * 0.3,
        "b2": rng.normal(size=10).astype(np.float32) * 0.1,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], name="conv0", pads=[1] * 4),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], name="conv1", pads=[1] * 4),
        helper.make_node(
            "BatchNormalization", ["c1", "gamma", "beta", "mean", "var"], ["n1"], name="bn1"
        ),
        helper.make_node("Add", ["n1", "r0"], ["a1"], name="add1"),
        helper.make_node("Relu", ["a1"], ["r1"], name="relu1"),
        helper.make_node("GlobalAveragePool", ["r1"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "w2", "b2"], ["y"], name="fc", transB=1),
    ]
    return save(path, nodes, {"x": [1, 3, size, size]}, {"y": [1, 10]}, weights)
