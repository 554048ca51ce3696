"""INT8 of models with NMS inside: as many rows as the data decide, judged as detections."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from model_fixtures import save
from onnx import TensorProto, helper

from toolkit.engine.build import build_engine
from toolkit.engine.options import BuildOptions
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.detections import comparable, detections
from toolkit.quantize.loss.judge import Judgement, error_of, judge
from toolkit.quantize.loss.metrics import DETECTION_DROP, SCORE_RISE, powers
from toolkit.quantize.loss.parts import OutputPart, output_parts, split_outputs
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.report_text import judgement_builtins, judgement_lines

CELLS = 8


def detector(path: Path, rng: np.random.Generator) -> Path:
    """x [1,3,32,32] -> boxes [N,4], labels [N], scores [N] of NMS, and their logs [N,1]."""
    column, row = np.meshgrid(4.0 * np.arange(CELLS), 4.0 * np.arange(CELLS))
    grid = np.stack([column, row, column + 6, row + 6], axis=-1).reshape(1, CELLS**2, 4)
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1", "b1"], ["logits"], "classes", strides=[4, 4]),
        helper.make_node("Sigmoid", ["logits"], ["sigmoid"], "sigmoid"),
        helper.make_node("Reshape", ["sigmoid", "to2"], ["all_scores"], "flat_scores"),
        helper.make_node("Conv", ["r", "w2"], ["offsets"], "places", strides=[4, 4]),
        helper.make_node("Reshape", ["offsets", "to4"], ["flat"], "flat_boxes"),
        helper.make_node("Transpose", ["flat"], ["turned"], "turn", perm=[0, 2, 1]),
        helper.make_node("Add", ["turned", "grid"], ["all_boxes"], "place"),
        helper.make_node(
            "NonMaxSuppression", ["all_boxes", "all_scores", "most", "iou", "least"], ["chosen"]
        ),
        helper.make_node("Split", ["chosen", "ones"], ["batch", "class", "at"], axis=1),
        helper.make_node("Squeeze", ["at", "last"], ["rows"]),
        helper.make_node("Squeeze", ["all_boxes", "first"], ["places"]),
        helper.make_node("Gather", ["places", "rows"], ["boxes"]),
        helper.make_node("Squeeze", ["class", "last"], ["labels"]),
        helper.make_node("GatherND", ["all_scores", "chosen"], ["scores"]),
        helper.make_node("Unsqueeze", ["scores", "last"], ["column"]),
        helper.make_node("Log", ["column"], ["logs"]),
    ]
    weights = {
        "w0": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "w1": rng.normal(scale=0.4, size=(2, 8, 1, 1)).astype(np.float32),
        "b1": np.full(2, -2, np.float32),
        "w2": rng.normal(scale=0.02, size=(4, 8, 1, 1)).astype(np.float32),
        "to2": np.array([1, 2, CELLS**2]),
        "to4": np.array([1, 4, CELLS**2]),
        "grid": grid.astype(np.float32),
        "most": np.array([20]),
        "iou": np.array([0.5], np.float32),
        "least": np.array([0.3], np.float32),
        "ones": np.ones(3, np.int64),
        "first": np.array([0]),
        "last": np.array([1]),
    }
    outputs = {"boxes": ["n", 4], "labels": ["n"], "scores": ["n"], "logs": ["n", 1]}
    save(path, nodes, {"x": [1, 3, 32, 32]}, outputs, weights)
    model = onnx.load(path)
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    onnx.save(model, path)
    return path


PART = OutputPart("scores", "scores", "detections", boxes="boxes", labels="labels")


def test_boxes_scores_and_labels_behind_nms_are_detections(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    graph = run_passes(import_model(detector(tmp_path / "m.onnx", rng)).model)[0]
    assert output_parts(graph) == (PART, OutputPart("logs", "logs", "varying"))


SCENE = {
    "boxes": np.array([[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 10, 30]], np.float32),
    "labels": np.array([4, 4, 7]),
    "scores": np.array([0.9, 0.8, 0.7], np.float32),
}


def judged(candidate: dict[str, np.ndarray]) -> Judgement:
    runs = [[split_outputs([PART], run)] for run in (SCENE, candidate)]
    return judge([PART], *runs, basis="seen")


def changed(**arrays: object) -> dict[str, np.ndarray]:
    return {name: np.asarray(arrays.get(name, array)) for name, array in SCENE.items()}


def drop_of(judgement: Judgement) -> float:
    return next(loss.value for loss in judgement.losses if loss.metric is DETECTION_DROP)


@pytest.mark.parametrize(
    ("candidate", "drop", "broken"),
    [
        ({name: array[::-1] for name, array in SCENE.items()}, 0.0, False),
        (changed(scores=[0.9, 0.71, 0.7]), 0.09, False),
        (changed(scores=[0.9, 0.69, 0.7]), 0.11, True),
        (changed(labels=[4, 7, 7]), 0.8, True),
        (changed(boxes=SCENE["boxes"] + [[0, 0, 0, 0], [6, 0, 6, 0], [0, 0, 0, 0]]), 0.8, True),
        ({name: array[:1] for name, array in SCENE.items()}, 0.8, True),
        ({name: array[:0] for name, array in SCENE.items()}, 0.9, True),
    ],
)
def test_a_detection_is_compared_with_that_of_its_place_and_class(
    candidate: dict[str, np.ndarray], drop: float, broken: bool
) -> None:
    judgement = judged(candidate)
    assert drop_of(judgement) == pytest.approx(drop, abs=1e-6)
    assert bool(judgement.broken) == broken


def test_a_detection_of_a_class_that_was_not_there_is_a_rise() -> None:
    more = {
        name: np.concatenate((array, array[:1]))
        for name, array in SCENE.items()
        if name != "labels"
    }
    judgement = judged({**more, "labels": np.array([4, 4, 7, 9])})
    assert drop_of(judgement) == 0.0
    (rise,) = [loss for loss in judgement.losses if loss.metric is SCORE_RISE]
    assert rise.value == pytest.approx(0.9)
    assert judgement.broken == (rise,)


def test_no_detection_in_any_run_is_nothing_to_lose() -> None:
    none = split_outputs([PART], {name: array[:0] for name, array in SCENE.items()})
    judgement = judge([PART], [none], [none], basis="seen")
    assert (judgement.nothing_to_lose, judgement.losses) == (("scores",), ())
    assert error_of([PART], [none], [none]) == 0.0


def test_the_noise_of_detections_is_that_of_their_scores(rng: np.random.Generator) -> None:
    count = 40
    corner = 20.0 * np.arange(count)
    boxes = np.stack([corner, corner, corner + 9, corner + 9], axis=1)
    scores, labels = rng.uniform(size=count), rng.integers(0, 3, count)
    order, noise = rng.permutation(count)[: count - 5], rng.normal(scale=0.01, size=count)
    exact = detections(boxes, scores, labels)
    actual = detections(boxes[order] + 0.5, (scores + noise)[order], labels[order])
    lost = np.setdiff1d(np.arange(count), order)
    expected = np.sum(noise[order] ** 2) + np.sum(scores[lost] ** 2)
    assert powers(exact, actual) == pytest.approx((np.sum(scores**2), expected))
    assert powers(exact, exact)[1] == 0.0


def test_arrays_of_other_sizes_have_nothing_in_common() -> None:
    before, after = comparable(np.array([3.0, 4.0]), np.array([1.0]))
    np.testing.assert_array_equal(before, [3, 4, 0])
    np.testing.assert_array_equal(after, [0, 0, 1])
    part = OutputPart("y", "y", "values")
    runs = [[{"y": np.ones(size)}] for size in (180, 152)]
    judgement = judge([part], *runs, basis="seen")
    assert (judgement.varying, judgement.losses) == (("y",), ())
    assert error_of([part], *runs) > 0.0


@pytest.mark.parametrize("method", ["minmax", "auto"])
def test_a_model_with_nms_inside_is_calibrated_and_judged(method: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)  # some random detectors lose a detection in INT8
    path = detector(tmp_path / "m.onnx", rng)
    data = [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(8)]
    data += [{"x": np.zeros((1, 3, 32, 32), np.float32)}]  # without any detection
    options = BuildOptions(
        precision="int8", data=data, ranges=RangeOptions(method), accept_loss=True, kernels=False
    )
    result = build_engine(path, "laptop", tmp_path / "m.engine", options)
    judgement = result.loss
    assert judgement is not None
    assert {loss.part for loss in judgement.losses} == {"scores"}
    assert drop_of(judgement) < 0.9
    assert judgement.varying == ("logs",)
    assert judgement_builtins(judgement)["varying"] == ["logs"]
    assert any("logs: its size depends on the data" in line for line in judgement_lines(judgement))
