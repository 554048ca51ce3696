"""Boxes and scores are exact to a fraction of a pixel in FP16, too."""

import gpu_interpreter
import numpy as np
import onnx_ir as ir
import pytest
from detector_graphs import detector
from gpu_graphs import ORIN, Case, node

from toolkit.gpu.coordinates import coordinate_tensors
from toolkit.gpu.lower import lower_segment
from toolkit.graph.passes import run_passes

pytest.importorskip("triton", reason="Triton is not installed")


def decode() -> Case:
    """Boxes from a product of matrices, scaled to 1000 pixels around anchors, then sampled at."""
    nodes = [
        node("MatMul", "x w", "deltas"),
        node("Mul", "deltas scale", "scaled"),
        node("Add", "scaled anchors", "boxes"),
        node("Reshape", "boxes flat", "rows"),
        node("Clip", "rows low high", "y"),
        node("RoiAlign", "f y b", "samples", output_height=1, output_width=1, sampling_ratio=1,
             coordinate_transformation_mode="half_pixel"),
    ]  # fmt: skip
    anchors = np.linspace(100.37, 900.73, 24).reshape(6, 4)
    weights = {"w": np.eye(4) / 8, "scale": np.array(16.0), "anchors": anchors,
               "low": np.array(0.0), "high": np.array(999.0)}  # fmt: skip
    constants = {name: values.astype(np.float32) for name, values in weights.items()}
    constants["flat"] = np.array([6, 4])
    shapes = {"x": (1, 6, 4), "f": (1, 2, 3, 3), "b": (6,)}
    return Case(nodes, shapes, constants, ("y", "samples"), {"b": "int64"}, opset=16)


def test_boxes_are_stored_in_fp32_from_their_arithmetic_on(rng: np.random.Generator) -> None:
    case = decode()
    segment = case.segment()
    exact = coordinate_tensors([segment.model])
    assert {"scaled", "boxes", "rows", "y", "anchors"} <= exact
    assert exact.isdisjoint({"deltas", "x", "f", "samples"})
    feeds = case.feeds(rng) | {"b": np.zeros(6, np.int64)}
    truth = case.truth(feeds)["y"]
    errors = []
    for names in (frozenset[str](), exact):
        program = lower_segment(segment.model, gpu=ORIN, precision="fp16", exact=names)
        boxes = gpu_interpreter.run(program, feeds)["y"]
        errors.append(float(np.abs(boxes - truth).max()))
    assert errors[0] > 0.05  # what FP16 costs between 256 and 1024 pixels
    assert errors[1] < 0.01


def test_what_is_no_box_keeps_the_precision_of_the_build(rng: np.random.Generator) -> None:
    graph, _ = run_passes(ir.from_proto(detector(rng)))
    exact = coordinate_tensors([graph])
    assert not exact & {"f0", "c0", "h", "hr", "logits", "s2"}
    without = [node("Conv", "x w", "c"), node("Sigmoid", "c", "y")]
    weights = {"w": rng.normal(size=(4, 3, 1, 1)).astype(np.float32)}
    assert not coordinate_tensors([Case(without, {"x": (1, 3, 4, 4)}, weights).segment().model])
