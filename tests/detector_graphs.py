"""A two-stage detector in a few nodes, as exporters write one: proposals, levels, a head."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, CHANNELS, BOXES, KEPT = 16, 4, 30, 6  # pixels, channels, candidates, proposals at most


def detector(
    rng: np.random.Generator, *, kept: int = KEPT, threshold: float = 0.2
) -> onnx.ModelProto:
    """Return a model of `image` (1, 3, 16, 16), `boxes` (30, 4) and `scores` (30).

    Boxes with scores above 0 are proposals, the first `kept` of them. Small ones are sampled from
    the large map, others from the small one. Outputs: `classes` (rows, 3) of probabilities above
    `threshold`, and `places` (rows, 5): boxes with areas, of all proposals.
    """
    weights = {
        "w0": rng.normal(size=(CHANNELS, 3, 3, 3)),
        "w1": rng.normal(size=(CHANNELS, CHANNELS, 3, 3)) / 4,
        "fc": rng.normal(size=(CHANNELS * 4, 8)) / 2,
        "head": rng.normal(size=(8, 3)) / 2,
        "zero_f": np.array(0.0),
        "middle": np.array(20.0),
        "threshold": np.array(threshold),
    }
    integers = {
        "zero": [0], "one": [1], "kept": [kept], "axis": [0], "row": [-1], "column": [-1, 1, 1, 1],
        "sizes": [CHANNELS, 2, 2], "xs": [0, 2], "ys": [1, 3], "left": [0], "wide": [2],
    }  # fmt: skip
    constants = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in weights.items()]
    constants += [numpy_helper.from_array(np.asarray(v, np.int64), n) for n, v in integers.items()]
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "w0"], ["c0"], "conv0", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["c0"], ["f0"], "relu0"),
        node("Conv", ["f0", "w1"], ["f1"], "conv1", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Greater", ["scores", "zero_f"], ["good"], "greater"),
        node("NonZero", ["good"], ["found"], "nonzero"),
        node("Reshape", ["found", "row"], ["good_places"], "flat"),
        node("Slice", ["good_places", "zero", "kept", "axis"], ["first"], "slice"),
        node("Gather", ["boxes", "first"], ["proposals"], "gather"),
        node("Gather", ["proposals", "xs"], ["x_sides"], "gather_x", axis=1),
        node("Gather", ["proposals", "ys"], ["y_sides"], "gather_y", axis=1),
        node("ReduceMax", ["x_sides"], ["right"], "reduce_x", axes=[1], keepdims=0),
        node("ReduceMax", ["y_sides"], ["bottom"], "reduce_y", axes=[1], keepdims=0),
        node("Mul", ["right", "bottom"], ["area"], "area"),
        node("Less", ["area", "middle"], ["small"], "small"),
        node("Not", ["small"], ["large"], "large"),
        node("Shape", ["area"], ["count"], "count"),
        node("Concat", ["count", "sizes"], ["sampled_shape"], "sampled_shape", axis=0),
        node("ConstantOfShape", ["sampled_shape"], ["s0"], "empty"),
        *_level("small", "f0", 0.5, "s0", "s1"),
        *_level("large", "f1", 0.25, "s1", "s2"),
        node("Flatten", ["s2"], ["flat_rows"], "flatten", axis=1),
        node("Gemm", ["flat_rows", "fc"], ["h"], "fc"),
        node("Relu", ["h"], ["hr"], "relu_h"),
        node("Gemm", ["hr", "head"], ["logits"], "head"),
        node("Softmax", ["logits"], ["p"], "softmax", axis=1),
        node("Reshape", ["p", "row"], ["p_flat"], "p_flat"),
        node("Greater", ["p_flat", "threshold"], ["sure"], "sure"),
        node("NonZero", ["sure"], ["sure_at"], "nonzero_sure"),
        node("Reshape", ["sure_at", "row"], ["sure_places"], "sure_flat"),
        node("Gather", ["p_flat", "sure_places"], ["classes"], "gather_p"),
        node("Unsqueeze", ["area", "one"], ["area_column"], "area_column"),
        node("Concat", ["proposals", "area_column"], ["places"], "places", axis=1),
    ]
    inputs = {"image": (1, 3, SIDE, SIDE), "boxes": (BOXES, 4), "scores": (BOXES,)}
    outputs = {"classes": ("n",), "places": ("r", 5)}
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in outputs.items()],
        constants,
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _level(mask: str, features: str, scale: float, data: str, result: str) -> list[onnx.NodeProto]:
    """Sample the proposals of a mask and write them to their rows."""
    node, own = helper.make_node, f"{mask}_"
    return [
        node("NonZero", [mask], [own + "at"], own + "nonzero"),
        node("Transpose", [own + "at"], [own + "t"], own + "transpose", perm=[1, 0]),
        node("Squeeze", [own + "t", "one"], [own + "i"], own + "squeeze"),
        node("Gather", ["proposals", own + "i"], [own + "boxes"], own + "gather"),
        node("Gather", [own + "boxes", "left"], [own + "x"], own + "first", axis=1),
        node("Mul", [own + "x", "zero_f"], [own + "zeros"], own + "zeros"),
        node("Squeeze", [own + "zeros", "one"], [own + "flat"], own + "flat"),
        node("Cast", [own + "flat"], [own + "image"], own + "image", to=TensorProto.INT64),
        node(
            "RoiAlign", [features, own + "boxes", own + "image"], [own + "s"], own + "align",
            output_height=2, output_width=2, sampling_ratio=2, spatial_scale=scale,
            coordinate_transformation_mode="half_pixel",
        ),
        node("Shape", [own + "s"], [own + "shape"], own + "shape"),
        node("Reshape", [own + "i", "column"], [own + "c"], own + "column"),
        node("Expand", [own + "c", own + "shape"], [own + "e"], own + "expand"),
        node("ScatterElements", [data, own + "e", own + "s"], [result], own + "scatter", axis=0),
    ]  # fmt: skip


def detector_feeds(
    rng: np.random.Generator, good: int, *, side: float = SIDE
) -> dict[str, np.ndarray]:
    """Return an image and boxes, of which `good` have a score above 0, in its first `side`."""
    corners = rng.uniform(0, side, (2, BOXES, 2)).astype(np.float32)
    # Quarters of pixels: FP16 holds their areas, so that all precisions take the same level.
    boxes = np.concatenate([np.floor(corners.min(0) * 2), np.ceil(corners.max(0) * 2)], 1) / 4
    scores = -rng.uniform(0.1, 1, BOXES).astype(np.float32)
    scores[rng.choice(BOXES, good, replace=False)] *= -1
    image = rng.normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    return {"image": image, "boxes": boxes, "scores": scores}
