"""NonMaxSuppression ends where later nodes read no more of its boxes; the results stay."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model

ALL = 2**62
NAME = "limit-boxes"
BOXES = 40


def model(
    path: Path, *, inside: bool = True, classes: int = 1, begin: int = 0, step: int = 1,
    second_reader: bool = False, column: int = 2, most: int = ALL,
) -> Path:  # fmt: skip
    """boxes, scores -> the first 5 that NonMaxSuppression keeps, as torchvision writes it."""
    constants = {
        "most": np.array([most], np.int64), "iou": np.array([0.5], np.float32),
        "column": np.array([column], np.int64), "one": np.array([1], np.int64),
        "begin": np.array([begin], np.int64), "end": np.array([5], np.int64),
        "axis": np.array([0], np.int64), "step": np.array([step], np.int64),
        "true": np.array(True),
    }  # fmt: skip
    suppress = [
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou"], ["kept"], "nms"),
        helper.make_node("Gather", ["kept", "column"], ["rows"], axis=1),
        helper.make_node("Squeeze", ["rows", "one"], ["keep"]),
    ]
    keep = helper.make_tensor_value_info("keep", TensorProto.INT64, [None])
    nodes = suppress
    if inside:
        none = numpy_helper.from_array(np.zeros(0, np.int64), "none")
        empty = helper.make_graph(
            [helper.make_node("Constant", [], ["empty"], value=none)], "then", [],
            [helper.make_tensor_value_info("empty", TensorProto.INT64, [0])],
        )  # fmt: skip
        result = helper.make_graph(suppress, "else", [], [keep])
        nodes = [
            helper.make_node("If", ["is_empty"], ["result"], then_branch=empty, else_branch=result)
        ]
    source = "result" if inside else "keep"
    nodes = [*nodes, helper.make_node("Slice", [source, "begin", "end", "axis", "step"], ["y"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, [None])]
    if second_reader:
        nodes.append(helper.make_node("Identity", [source], ["z"]))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.INT64, [None]))
    inputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, BOXES, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, classes, BOXES]),
        helper.make_tensor_value_info("is_empty", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(
        nodes, "g", inputs if inside else inputs[:2], outputs,
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def limited(path: Path) -> tuple[onnx.ModelProto, str]:
    """The model after the passes, and what the pass says."""
    import onnx_ir as ir

    changed, reports = run_passes(import_model(path).model)
    (report,) = [report for report in reports if report.name == NAME]
    assert report.failure == ""
    return ir.to_proto(changed), report.changes


def run(proto: onnx.ModelProto, seed: int, classes: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 20, (1, BOXES, 2))
    boxes = np.concatenate((corner, corner + rng.uniform(2, 9, (1, BOXES, 2))), 2)
    feeds = {
        "boxes": boxes.astype(np.float32),
        "scores": rng.uniform(size=(1, classes, BOXES)).astype(np.float32),
        "is_empty": np.array(False),
    }
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in feeds.items() if name in names})


@pytest.mark.parametrize("inside", [True, False])
def test_no_more_boxes_are_selected_than_are_read(inside: bool, tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", inside=inside)
    changed, says = limited(path)
    assert says == "ended 1 NonMaxSuppression where no more boxes are read"
    for seed in range(8):
        (expected,), (actual,) = run(onnx.load(path), seed), run(changed, seed)
        assert len(expected) == 5
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 2},  # boxes of one class follow those of the other
        {"begin": 1},
        {"step": 2},
        {"second_reader": True},
        {"column": 1},
        {"most": 5},  # it ends there already
        {"most": 4},
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_what_may_read_other_boxes_has_all_of_them(
    inside: bool, options: dict[str, int], tmp_path: Path
) -> None:
    path = model(tmp_path / "m.onnx", inside=inside, **options)
    changed, says = limited(path)
    assert says == ""
    classes = options.get("classes", 1)
    for expected, actual in zip(
        run(onnx.load(path), 3, classes), run(changed, 3, classes), strict=True
    ):
        assert np.array_equal(actual, expected)
