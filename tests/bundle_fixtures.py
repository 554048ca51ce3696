"""An engine of two heads, and what a bundle of it asks."""

from pathlib import Path

import numpy as np
import onnx
from click.testing import CliRunner

from toolkit.cli.commands.build import build as build_command


def engine_of(folder: Path, outputs: dict[str, list[int]], size: int | str = 64) -> Path:
    """Build an engine with an image input and the given outputs, by the command of a user."""
    image = onnx.helper.make_tensor_value_info("images", 1, [1, 3, size, size])
    nodes, results = [onnx.helper.make_node("ReduceMean", ["images"], ["mean"], keepdims=0)], []
    weights = []
    for name, shape in outputs.items():
        weights.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), f"{name}_shape"))
        nodes.append(onnx.helper.make_node("Expand", ["mean", f"{name}_shape"], [name]))
        results.append(onnx.helper.make_tensor_value_info(name, 1, shape))
    graph = onnx.helper.make_graph(nodes, "heads", [image], results, weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    model, engine = folder / "heads.onnx", folder / "heads.engine"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), model)
    dynamic = [f"--dim={size}=32:64:96"] if isinstance(size, str) else []
    command = [str(model), "--profile", "laptop", "--precision", "fp32", "-o", str(engine)]
    built = CliRunner().invoke(build_command, [*command, *dynamic])
    assert built.exit_code == 0, built.output
    return engine


CELLS = 8 * 8 + 4 * 4 + 2 * 2


HEADS = {"boxes": [1, 4, CELLS], "scores": [1, 3, CELLS], "classes": [1, 3, 1, 1]}
