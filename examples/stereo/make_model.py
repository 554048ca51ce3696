"""Write a small stereo network that needs the operators of plugin.py: python make_model.py OUT.

Each picture goes through random filters without a mean, the answers of a pixel are scaled to length
1, and so the cost of a disparity is the correlation of two neighbourhoods: 1 where they match.
Nothing is trained; the network finds how far textures are shifted.
"""

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT, WIDTH = 96, 160
FILTERS, TAPS = 32, 5
DISPARITIES = 24
GAIN = 30.0  # of a correlation before the softmax: the larger, the nearer to the best alone


def make_model(height: int = HEIGHT, width: int = WIDTH) -> onnx.ModelProto:
    """Return the network: left and right (1, 1, H, W) -> disparity (1, H, W) in pixels."""
    filters = np.random.default_rng(7).normal(size=(FILTERS, 1, TAPS, TAPS))
    filters -= filters.mean(axis=(2, 3), keepdims=True)
    weights = {
        "filters": filters.astype(np.float32),
        "gain": np.array(GAIN * FILTERS, np.float32),  # CostVolume divides by the channels
    }
    nodes = []
    for side in ("left", "right"):
        raw, unit = f"{side}_raw", f"{side}_unit"
        nodes += [
            helper.make_node("Conv", [side, "filters"], [raw], name=raw, pads=[TAPS // 2] * 4),
            helper.make_node("LpNormalization", [raw], [unit], name=unit, axis=1, p=2),
        ]
    domain, units = "tandem.stereo", ["left_unit", "right_unit"]
    nodes += [
        helper.make_node(
            "CostVolume", units, ["match"], name="match", domain=domain, disparities=DISPARITIES
        ),
        helper.make_node("Mul", ["match", "gain"], ["cost"], name="cost"),
        helper.make_node("SoftDisparity", ["cost"], ["disparity"], name="disparity", domain=domain),
    ]
    shape, depth = [1, 1, height, width], [1, height, width]
    graph = helper.make_graph(
        nodes,
        "stereo",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("left", "right")],
        [helper.make_tensor_value_info("disparity", TensorProto.FLOAT, depth)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


if __name__ == "__main__":
    onnx.save(make_model(), sys.argv[1])
