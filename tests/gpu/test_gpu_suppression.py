"""NonMaxSuppression in kernels: the boxes of onnxruntime, padded to their bound."""

from pathlib import Path

import cuda_double
import gpu_interpreter
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from model_fixtures import run_model
from onnx import TensorProto, helper, numpy_helper

from device.runtime.executors import cuda
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.data_dependent_shapes.rewrite import give_bounds
from toolkit.gpu.data_dependent_shapes.symbolic import PADDED
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.support import ask_support
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes

pytest.importorskip("triton", reason="Triton is not installed")

ORIN = GpuTarget(sm=87, sm_count=8)
node = helper.make_node


def suppressing(
    shape: tuple[int, int, int],
    most: int,
    iou: float = 0.5,
    least: float | None = None,
    **attributes: int,
) -> onnx.ModelProto:
    """`boxes` (images, boxes, 4) and `scores` (images, classes, boxes) -> `chosen` (n, 3)."""
    images, _, boxes = shape
    values = {"most": np.array([most]), "iou": np.array([iou], np.float32)}
    if least is not None:
        values["least"] = np.array([least], np.float32)
    graph = helper.make_graph(
        [node("NonMaxSuppression", ["boxes", "scores", *values], ["chosen"], "nms", **attributes)],
        "suppressing",
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, (images, boxes, 4)),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape),
        ],
        [helper.make_tensor_value_info("chosen", TensorProto.INT64, ("n", 3))],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", 19)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def padded(model: onnx.ModelProto) -> ir.Model:
    graph, _ = run_passes(ir.from_proto(model))
    assert "padded the results of 1 NonMaxSuppression" in give_bounds(graph)
    return graph


def kernels(graph: ir.Model) -> KernelProgram:
    """The kernels of the suppression alone."""
    (nms,) = (one for one in graph.graph if one.op_type == PADDED)
    names = {str(one.name): "gpu0" if one is nms else "cpu0" for one in graph.graph}
    pieces = extract_segments(graph, names, ["gpu0", "cpu0"])
    piece = next(piece for piece in pieces if piece.name == "gpu0")
    return lower_segment(piece.model, gpu=ORIN, precision="fp32")


def some_boxes(rng: np.random.Generator, images: int, boxes: int) -> np.ndarray:
    """Boxes of whole pixels, so that many overlap by the same ratio; corners in any order."""
    corners = rng.integers(0, 24, (images, boxes, 2, 2))
    corners[:, :, 1] = corners[:, :, 0] + rng.integers(0, 12, (images, boxes, 2))
    turned = rng.random((images, boxes)) < 0.3
    corners[turned] = corners[turned][:, ::-1]
    return corners.reshape(images, boxes, 4).astype(np.float32)


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """Compare the function and the kernels with onnxruntime; return how many boxes there are."""
    expected = run_model(model, feeds)["chosen"]
    graph = padded(model)
    assert np.array_equal(run_model(ir.to_proto(graph), feeds)["chosen"], expected)
    results = list(gpu_interpreter.run(kernels(graph), feeds).values())
    rows, count = sorted(results, key=lambda array: -array.ndim)
    assert count.tolist() == [len(expected)]
    assert np.array_equal(rows[: len(expected)], expected)
    rest = expected[-1] if len(expected) else np.zeros(3)
    assert (rows[len(expected) :] == rest).all()
    return len(expected)


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1, 1, 200), 200), ((1, 1, 200), 7), ((2, 3, 40), 9), ((1, 1, 1), 1), ((1, 5, 33), 4)],
)
@pytest.mark.parametrize("iou", [0.0, 0.5, 0.7, 1.0])
def test_the_boxes_of_onnxruntime(
    shape: tuple[int, int, int], most: int, iou: float, rng: np.random.Generator
) -> None:
    images, _, boxes = shape
    scores = rng.integers(0, 9, shape).astype(np.float32) / 8  # many are equal
    feeds = {"boxes": some_boxes(rng, images, boxes), "scores": scores}
    check(suppressing(shape, most, iou), feeds)


@pytest.mark.parametrize("least", [-1.0, 0.5, 0.875, 2.0])
def test_scores_must_be_above_a_threshold(least: float, rng: np.random.Generator) -> None:
    shape = (1, 2, 60)
    scores = rng.integers(0, 9, shape).astype(np.float32) / 8
    feeds = {"boxes": some_boxes(rng, 1, 60), "scores": scores}
    result = check(suppressing(shape, 50, 0.6, least), feeds)
    assert (result == 0) == (least == 2.0)


def test_without_a_threshold_the_lowest_scores_are_candidates(rng: np.random.Generator) -> None:
    scores = rng.choice(np.array([-np.inf, np.finfo(np.float32).min, 0.5], np.float32), (1, 1, 60))
    feeds = {"boxes": some_boxes(rng, 1, 60), "scores": scores}
    assert check(suppressing((1, 1, 60), 60, 1.0), feeds) == 60


def test_scores_that_are_no_numbers_are_no_candidates(rng: np.random.Generator) -> None:
    scores = rng.random((1, 1, 60)).astype(np.float32)
    feeds = {"boxes": some_boxes(rng, 1, 60), "scores": scores}
    lowest = {**feeds, "scores": np.where(scores < 0.5, np.nan, scores)}
    program = kernels(padded(suppressing((1, 1, 60), 60, 0.5)))
    results = gpu_interpreter.run(program, lowest).values()
    rows, count = sorted(results, key=lambda array: -array.ndim)
    expected = run_model(suppressing((1, 1, 60), 60, 0.5, 0.5), feeds)["chosen"]
    assert np.array_equal(rows[: int(count[0])], expected)


def test_equal_boxes_and_boxes_without_area(rng: np.random.Generator) -> None:
    boxes = np.repeat(some_boxes(rng, 1, 10), 4, axis=1)
    boxes[0, ::5, 2:] = boxes[0, ::5, :2]
    scores = np.full((1, 1, 40), 0.5, np.float32)
    check(suppressing((1, 1, 40), 40, 0.3), {"boxes": boxes, "scores": scores})


def test_a_chain_of_boxes_of_which_each_overlaps_the_next() -> None:
    """In one block every second stays: each decision depends on the one before."""
    left = np.arange(0, 64, dtype=np.float32) * 2
    boxes = np.stack([0 * left, left, 0 * left + 4, left + 4], 1)[None]
    scores = np.linspace(1, 0.5, 64, dtype=np.float32)[None, None]
    assert check(suppressing((1, 1, 64), 64, 0.2), {"boxes": boxes, "scores": scores}) == 32


def test_boxes_by_their_centres(rng: np.random.Generator) -> None:
    boxes = rng.integers(1, 16, (1, 80, 4)).astype(np.float32)
    scores = rng.random((1, 1, 80)).astype(np.float32)
    model = suppressing((1, 1, 80), 80, 0.4, center_point_box=1)
    check(model, {"boxes": boxes, "scores": scores})


def test_candidates_of_several_segments(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.gpu.emit.suppression._SEGMENT", 64)
    scores = rng.integers(0, 20, (1, 2, 300)).astype(np.float32)
    feeds = {"boxes": some_boxes(rng, 1, 300), "scores": scores}
    check(suppressing((1, 2, 300), 300, 0.4, 9.0), feeds)


def test_too_many_classes_stay_on_the_cpu() -> None:
    graph = padded(suppressing((2, 600, 4), 1))
    (nms,) = (str(one.name) for one in graph.graph if one.op_type == PADDED)
    reason = ask_support(graph).refused[nms]
    assert "has 1200 classes of 4 boxes; kernels take 1024 of 131072" in reason


def chain(most: int, side: float = 3.0) -> onnx.ModelProto:
    """What torchvision writes: small boxes dropped, then unlikely ones, then each class apart."""
    numbers = {
        "side": np.array(side, np.float32), "sure": np.array(0.25, np.float32),
        "one_f": np.array(1, np.float32), "iou": np.array([0.5], np.float32),
    }  # fmt: skip
    integers = {
        "two": 2, "zero": 0, "nothing": 0, "most": [most], "axis0": [0], "axis1": [1],
        "column": [2], "end": [most],
    }  # fmt: skip
    constants = [numpy_helper.from_array(v, n) for n, v in numbers.items()]
    constants += [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in integers.items()]
    result = [
        node("NonZero", ["mask0"], ["at0"]),
        node("Squeeze", ["at0", "axis0"], ["i0"]),
        node("Gather", ["boxes", "i0"], ["b0"]),
        node("Gather", ["scores", "i0"], ["s0"]),
        node("Gather", ["labels", "i0"], ["l0"]),
        node("GreaterOrEqual", ["s0", "sure"], ["mask1"]),
        node("NonZero", ["mask1"], ["at1"]),
        node("Transpose", ["at1"], ["t1"]),
        node("Squeeze", ["t1", "axis1"], ["i1"]),
        node("Gather", ["b0", "i1"], ["b1"]),
        node("Gather", ["s0", "i1"], ["s1"]),
        node("Gather", ["l0", "i1"], ["l1"]),
    ]
    branch = helper.make_graph(
        [
            node("ReduceMax", ["b1"], ["largest"], keepdims=0),
            node("Cast", ["l1"], ["lf"], to=TensorProto.FLOAT),
            node("Add", ["largest", "one_f"], ["step"]),
            node("Mul", ["lf", "step"], ["offsets"]),
            node("Unsqueeze", ["offsets", "axis1"], ["offset_column"]),
            node("Add", ["b1", "offset_column"], ["apart"]),
            node("Unsqueeze", ["apart", "axis0"], ["b3"]),
            node("Unsqueeze", ["s1", "axis0"], ["s2"]),
            node("Unsqueeze", ["s2", "axis0"], ["s3"]),
            node("NonMaxSuppression", ["b3", "s3", "most", "iou"], ["found"], "nms"),
            node("Gather", ["found", "column"], ["column2"], axis=1),
            node("Squeeze", ["column2", "axis1"], ["kept"]),
        ],
        "some",
        [],
        [helper.make_tensor_value_info("kept", TensorProto.INT64, ("k",))],
    )
    empty = numpy_helper.from_array(np.zeros(0, np.int64), "none")
    none = helper.make_graph(
        [node("Constant", [], ["none"], value=empty)],
        "none",
        [],
        [helper.make_tensor_value_info("none", TensorProto.INT64, (0,))],
    )
    nodes = [
        node("Gather", ["boxes", "two"], ["right"], axis=1),
        node("Gather", ["boxes", "zero"], ["left"], axis=1),
        node("Sub", ["right", "left"], ["width"]),
        node("GreaterOrEqual", ["width", "side"], ["mask0"]),
        *result,
        node("Size", ["b1"], ["size"]),
        node("Equal", ["size", "nothing"], ["is_empty"]),
        node("If", ["is_empty"], ["keep"], then_branch=none, else_branch=branch),
        node("Slice", ["keep", "axis0", "end", "axis0"], ["first"]),
        node("Gather", ["b1", "first"], ["found_boxes"]),
        node("Gather", ["s1", "first"], ["found_scores"]),
        node("Gather", ["l1", "first"], ["found_labels"]),
    ]
    for at, one in enumerate(nodes):
        one.name = one.name or f"node{at}"
    inputs = {
        "boxes": (TensorProto.FLOAT, (40, 4)),
        "scores": (TensorProto.FLOAT, (40,)),
        "labels": (TensorProto.INT64, (40,)),
    }
    outputs = {
        "found_boxes": (TensorProto.FLOAT, ("n", 4)),
        "found_scores": (TensorProto.FLOAT, ("n",)),
        "found_labels": (TensorProto.INT64, ("n",)),
    }
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info(n, *kind) for n, kind in inputs.items()],
        [helper.make_tensor_value_info(n, *kind) for n, kind in outputs.items()],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def chain_feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "boxes": np.sort(some_boxes(rng, 1, 40)[0].reshape(40, 2, 2), axis=1).reshape(40, 4),
        "scores": rng.integers(0, 9, 40).astype(np.float32) / 8,
        "labels": rng.integers(0, 3, 40),
    }


@pytest.mark.parametrize(("most", "side"), [(5, 3.0), (40, 3.0), (40, 99.0)])
def test_dropped_boxes_suppress_none(most: int, side: float, rng: np.random.Generator) -> None:
    model, feeds = chain(most, side), chain_feeds(rng)
    graph = padded(model)
    kinds = [one.op_type for one in graph.graph.all_nodes()]
    assert not {"If", "NonZero", "NonMaxSuppression"} & set(kinds)
    expected = run_model(model, feeds)
    assert (len(expected["found_scores"]) == 0) == (side == 99.0)
    for name, values in run_model(ir.to_proto(graph), feeds).items():
        assert np.array_equal(values, expected[name]), name
    (*refused,) = ask_support(graph).refused
    by_name = {one.name: one for one in graph.graph}
    assert {by_name[name].op_type for name in refused} == {"Slice"}  # the numbers of results


@pytest.mark.parametrize(
    "change",
    [
        "scores of all",
        "boxes of all",
        "unlike branch",
        "unlike condition",
        "other rows",
        "swapped",
        "column",
    ],
)
def test_other_graphs_stay_as_they_are(change: str) -> None:
    model = chain(5)
    nodes = {one.name or one.output[0]: one for one in model.graph.node}
    outer = next(one for one in model.graph.node if one.op_type == "If")
    if change == "unlike condition":
        nothing = next(one for one in model.graph.initializer if one.name == "nothing")
        nothing.CopyFrom(numpy_helper.from_array(np.array(3), "nothing"))
    elif change == "other rows":
        next(one for one in nodes.values() if "size" in one.output).input[0] = "b0"
    elif change == "column":  # of places: what is gathered by it has one more dimension
        at = list(model.graph.node).index(next(n for n in nodes.values() if "b0" in n.output))
        model.graph.node[at].input[1], model.graph.node[at].output[0] = "column0", "column_boxes"
        model.graph.node.insert(at, node("Transpose", ["at0"], ["column0"], "t0"))
        squeeze = node("Squeeze", ["column_boxes", "axis1"], ["b0"], "squeezed")
        model.graph.node.insert(at + 2, squeeze)
    elif change == "swapped":
        for branch in outer.attribute:
            branch.name = {"then_branch": "else_branch"}.get(branch.name, "then_branch")
    elif change == "unlike branch":
        none = next(one.g for one in outer.attribute if one.name == "then_branch")
        some = numpy_helper.from_array(np.zeros(1, np.int64), "none")
        none.node[0].attribute[0].t.CopyFrom(some)
        none.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    else:
        taken = {"scores of all": "found_scores", "boxes of all": "found_boxes"}[change]
        gather = next(one for one in nodes.values() if taken in one.output)
        gather.input[0] = {"found_scores": "scores", "found_boxes": "boxes"}[taken]
    graph, _ = run_passes(ir.from_proto(model))
    constants = set(graph.graph.initializers)
    assert "NonMaxSuppression" not in give_bounds(graph)
    assert set(graph.graph.initializers) <= constants
    assert any(one.op_type == "NonMaxSuppression" for one in graph.graph.all_nodes())


def test_what_whole_results_point_at_is_padded_with_them(rng: np.random.Generator) -> None:
    model = suppressing((1, 1, 30), 30)
    table = numpy_helper.from_array(rng.random((30, 2), np.float32), "table")
    model.graph.initializer.extend([table, numpy_helper.from_array(np.array([2]), "two")])
    model.graph.node.extend(
        [
            node("Gather", ["table", "chosen"], ["numbers"], "numbers"),
            node("Cast", ["chosen"], ["real"], "real", to=TensorProto.FLOAT),
            node("Unsqueeze", ["real", "two"], ["column"], "column"),
            node("Add", ["numbers", "column"], ["y"], "sum"),
        ]
    )
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 3, 2))
    )
    feeds = {"boxes": some_boxes(rng, 1, 30), "scores": rng.random((1, 1, 30), np.float32)}
    graph = padded(model)
    assert np.array_equal(run_model(ir.to_proto(graph), feeds)["y"], run_model(model, feeds)["y"])


@pytest.mark.parametrize("kind", [TensorProto.INT64, TensorProto.INT32])
def test_the_first_boxes_as_many_as_a_number_says(kind: int, rng: np.random.Generator) -> None:
    """Kernels count in INT64; other numbers of boxes stay as they are."""
    model = suppressing((1, 2, 30), 30)
    constants = {"zero": [0], "axis_boxes": [1], "axis_scores": [2]}
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    for name, values in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), name))
    for name, number in {"axis": 1, "column": 2}.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
    for at, name in enumerate(("boxes", "scores")):
        model.graph.node[-1].input[at] = f"first_{name}"
        cut = node("Slice", [name, "zero", "number", f"axis_{name}"], [f"first_{name}"], name)
        model.graph.node.insert(0, cut)
    model.graph.node.extend(
        [
            node("Gather", ["chosen", "column"], ["places"], "places", axis=1),
            node("Squeeze", ["places", "axis"], ["row"], "row"),
            node("Gather", ["first_boxes", "row"], ["found"], "found", axis=1),
        ]
    )
    model.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("found", TensorProto.FLOAT, (1, "n", 4))
    )
    model.graph.input.append(helper.make_tensor_value_info("number", kind, (1,)))
    feeds = {"boxes": some_boxes(rng, 1, 30), "scores": rng.random((1, 2, 30), np.float32)}
    graph, _ = run_passes(ir.from_proto(model))
    assert ("NonMaxSuppression" in give_bounds(graph)) == (kind == TensorProto.INT64)
    for number in (0, 1, 17, 30, 99, -1, -29, -30, -99):
        feeds["number"] = np.array([number], dtype)
        expected = run_model(model, feeds)["found"]
        assert np.array_equal(run_model(ir.to_proto(graph), feeds)["found"], expected)


@pytest.fixture
def kernels_whatever_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a suppression is not worth copies to the GPU and back: a plan leaves it on the CPU."""
    monkeypatch.setattr("toolkit.partition.planning.portable._pays", lambda *_: True)


@pytest.mark.usefixtures("kernels_whatever_crosses")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_engine_suppresses_on_the_gpu(
    precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx.save(chain(40), tmp_path / "m.onnx")
    with cuda_double.installed(), cuda_double.interpreted_cubins():
        options = BuildOptions(precision=precision)
        result = build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "m.engine", options)
        rows = [row for row in result.manifest.plan if row.op == PADDED]
        segments = {segment.name: segment for segment in result.manifest.segments}
        assert [segments[row.segment].processor for row in rows] == ["gpu"]
        with open_session(result.path) as session:
            assert "cuda" in [report.implementation for report in session.reports]
            for _ in range(2):
                feeds = chain_feeds(rng)
                expected, actual = run_model(chain(40), feeds), session.infer(feeds)
                for name, values in expected.items():
                    assert np.array_equal(actual[name], values), name


@pytest.mark.gpu
@pytest.mark.usefixtures("kernels_whatever_crosses")
@pytest.mark.parametrize(
    ("shape", "most", "iou"),
    [((1, 1, 60), 60, 0.5), ((1, 1, 4800), 1000, 0.7), ((2, 3, 300), 50, 0.3)],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_gives_the_boxes_of_onnxruntime(
    shape: tuple[int, int, int], most: int, iou: float, precision: str, tmp_path: Path
) -> None:
    """Threads of a block wait for each other there; the interpreter has one."""
    if cuda.why_not() is not None or not has_compiler():
        pytest.skip(str(cuda.why_not() or "Triton is not installed"))
    model, rng = suppressing(shape, most, iou), np.random.default_rng(7)
    onnx.save(model, tmp_path / "m.onnx")
    options = BuildOptions(precision=precision)
    result = build_engine(tmp_path / "m.onnx", "h200", tmp_path / "m.engine", options)
    with open_session(result.path) as session:
        assert "cuda" in [report.implementation for report in session.reports]
        for _ in range(20):
            scores = rng.integers(0, 99, shape).astype(np.float32) / 128  # many are equal
            boxes = some_boxes(rng, shape[0], shape[2])
            feeds = {"boxes": boxes * np.float32(16), "scores": scores}
            expected = run_model(model, feeds)["chosen"]
            np.testing.assert_array_equal(session.infer(feeds)["chosen"], expected)
