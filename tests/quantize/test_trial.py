"""Trials against the Q/DQ graph that they stand for, in onnxruntime without optimizations."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_fixtures import prepared, save, small_convnet
from onnx import TensorProto, helper, numpy_helper

import configs
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors, quantize
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges
from toolkit.quantize.trials.trial import TrialModel

Feeds = dict[str, np.ndarray]

UNKNOWN_RANK = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)


def ranges(model: ir.Model, feeds: Feeds, rng: np.random.Generator) -> dict[str, float]:
    """Ranges that clip some tensors and are too wide for others."""
    activations = ActivationRunner(model, tensors := calibrated_tensors(model))(feeds)
    largest = {name: float(np.abs(activations[name]).max()) or 1.0 for name in tensors}
    return {name: value * float(rng.uniform(0.4, 1.3)) for name, value in largest.items()}


def run_plainly(model: ir.Model, feeds: Feeds) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Packed weights are multiplied by other kernels, which round differently.
    options.add_session_config_entry("session.disable_prepacking", "1")
    model.ir_version = max(model.ir_version, 4)
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def quantized(
    model: ir.Model, amax: dict[str, float], keep_float: Collection[str] = ()
) -> ir.Model:
    segments = {str(node.name): "cpu.0" for node in model.graph}
    return quantize(model, amax, segments, frozenset(), keep_float=frozenset(keep_float)).model


def every_operator(path: Path, rng: np.random.Generator) -> Path:
    """All quantized operators, shared and rectified tensors, and a channel that is switched off."""
    shapes = {"w0": (8, 4, 3, 3), "w1": (8, 8, 1, 1), "wt": (8, 4, 2, 2), "wg": (6, 12)}
    weights = {
        name: rng.normal(size=shape).astype(np.float32) * np.float32(0.3)
        for name, shape in (shapes | {"wm": (16, 5), "wb": (2, 5, 3)}).items()
    }
    weights["w1"][2] = 1e-12  # so small that its bias would leave INT32
    weights |= {
        "b0": rng.normal(size=8).astype(np.float32),
        "b1": rng.normal(size=8).astype(np.float32),
        "bg": rng.normal(size=(1, 6)).astype(np.float32),
    }
    constants = {"rows": np.array([2, 16, 16], np.int64), "flat": np.array([1, 12], np.int64)}
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w0", "b0"], ["c0"], name="conv0", pads=[1] * 4),
        node("Relu", ["c0"], ["r0"], name="relu0"),  # read by a convolution, a sum and a sigmoid
        node("Conv", ["r0", "w1", "b1"], ["c1"], name="conv1"),
        node("Relu", ["c1"], ["r1"], name="relu1"),  # read by one pooling only
        node("MaxPool", ["r1"], ["p"], name="maxpool", kernel_shape=[1, 1]),
        node("Sigmoid", ["r0"], ["s"], name="sigmoid"),
        node("Add", ["p", "r0"], ["a"], name="add"),
        node("Sum", ["a", "s", "p"], ["u"], name="sum"),
        node("ConvTranspose", ["u", "wt"], ["t"], name="deconv", strides=[2, 2]),
        node("AveragePool", ["t"], ["v"], name="avgpool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["v", "x"], ["k"], name="concat", axis=1),
        node("Reshape", ["k", "rows"], ["m"], name="rows"),
        node("MatMul", ["m", "m"], ["mm"], name="both"),
        node("MatMul", ["mm", "wm"], ["mw"], name="matrix"),
        node("MatMul", ["mw", "wb"], ["mb"], name="batch"),
        node("GlobalAveragePool", ["k"], ["g"], name="pool"),
        node("Concat", ["g", "g4"], ["gg"], name="concat_pooled", axis=1),
        node("Reshape", ["gg", "flat"], ["f"], name="flatten"),
        node("Gemm", ["f", "wg", "bg"], ["y"], name="fc", transB=1),
    ]
    weights["g4"] = rng.normal(size=(1, 4, 1, 1)).astype(np.float32)
    inputs: dict[str, Sequence[int | str]] = {"x": [1, 4, 8, 8]}
    return save(path, nodes, inputs, {"y": None, "mb": None, "r0": None}, weights | constants)


@pytest.fixture
def both(tmp_path: Path, rng: np.random.Generator) -> tuple[ir.Model, Feeds, dict[str, float]]:
    model = prepared(every_operator(tmp_path / "m.onnx", rng))
    feeds = {"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)}
    return model, feeds, ranges(model, feeds, rng)


def assert_same(actual: Feeds, expected: Sequence[np.ndarray]) -> None:
    for (name, result), requested in zip(actual.items(), expected, strict=True):
        np.testing.assert_array_equal(result, requested, err_msg=name)


def test_everything_on_is_the_quantized_graph_bit_for_bit(
    both: tuple[ir.Model, Feeds, dict[str, float]],
) -> None:
    model, feeds, amax = both
    trial = TrialModel(model, optimize=False)
    graph = quantized(model, amax)
    assert_same(trial(amax, feeds), run_plainly(graph, feeds))
    assert set(trial.tensors) <= set(amax)


def test_everything_off_is_the_float_model(both: tuple[ir.Model, Feeds, dict[str, float]]) -> None:
    model, feeds, amax = both
    trial = TrialModel(model, optimize=False)
    expected = run_plainly(model, feeds)
    assert_same(trial(amax, feeds, frozenset(trial.nodes)), expected)
    assert_same(trial({}, feeds, frozenset(trial.nodes)), expected)


def test_any_float_nodes_are_the_quantized_graph_without_them(
    both: tuple[ir.Model, Feeds, dict[str, float]], rng: np.random.Generator
) -> None:
    model, feeds, amax = both
    trial = TrialModel(model, optimize=False)
    for share in (0.1, 0.5, 0.9):
        float_nodes = frozenset(name for name in trial.nodes if rng.random() < share)
        assert_same(
            trial(amax, feeds, float_nodes), run_plainly(quantized(model, amax, float_nodes), feeds)
        )


def test_a_trial_depends_on_nothing_that_was_tried_before(
    both: tuple[ir.Model, Feeds, dict[str, float]], rng: np.random.Generator
) -> None:
    model, feeds, amax = both
    trial, fresh = TrialModel(model), TrialModel(model)
    for _ in range(8):
        some = {n: a * rng.uniform(0.1, 2) for n, a in amax.items() if rng.random() < 0.7}
        float_nodes = frozenset(name for name in trial.nodes if rng.random() < 0.3)
        before = trial(some, {"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)}, float_nodes)
        copies = {name: array.copy() for name, array in before.items()}
        again = trial(amax, feeds)
        assert_same(again, list(fresh(amax, feeds).values()))
        assert_same(before, list(copies.values()))


def test_optimizations_change_float_rounding_only(
    both: tuple[ir.Model, Feeds, dict[str, float]],
) -> None:
    model, feeds, amax = both
    plain, quick = TrialModel(model, optimize=False), TrialModel(model)
    off = frozenset(plain.nodes)
    for name, array in quick(amax, feeds, off).items():
        np.testing.assert_allclose(array, plain(amax, feeds, off)[name], rtol=1e-4, atol=1e-4)


def test_one_tensor_alone_is_rounded_half_to_even_and_clipped(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [helper.make_node("MaxPool", ["x"], ["y"], name="p", kernel_shape=[1, 1])]
    model = prepared(save(tmp_path / "m.onnx", nodes, {"x": [1, 1, 20, 20]}, {"y": None}))
    x = rng.normal(size=(1, 1, 20, 20)).astype(np.float32) * 2
    x.flat[:8] = [0.5, 1.5, 2.5, -0.5, -1.5, 127.5, -200, 200]
    step = np.float32(1.0)
    expected = np.clip(np.rint(x / step), -128, 127) * step
    np.testing.assert_array_equal(TrialModel(model)({"x": 127.0}, {"x": x})["y"], expected)
    np.testing.assert_array_equal(TrialModel(model)({"x": None}, {"x": x})["y"], x)


def test_weights_alone_are_rounded_where_no_activation_has_a_range(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    feeds = {"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)}
    trial = TrialModel(model)
    exact = trial({}, feeds, frozenset(trial.nodes))["y"]
    off = np.linalg.norm(trial({}, feeds)["y"] - exact) / np.linalg.norm(exact)
    assert 0 < off < 0.02


@pytest.mark.parametrize("optimize", [False, True])
def test_the_shipped_detector_is_tried_exactly(rng: np.random.Generator, optimize: bool) -> None:
    model = prepared(configs.ROOT / "models" / "robot-objects.onnx")
    feeds = {"images": rng.random((1, 3, 320, 320), dtype=np.float32)}
    amax = ranges(model, feeds, rng)
    expected = run_plainly(quantized(model, amax), feeds)
    for actual, requested in zip(
        TrialModel(model, optimize=optimize)(amax, feeds).values(), expected, strict=True
    ):
        # Float sums in another order may tip a value over to the next step here and there.
        allowed = 0.0 if not optimize else 0.05 * float(np.abs(requested).max())
        assert np.abs(actual - requested).max() <= allowed


def test_the_light_models_are_tried_exactly(light_models: Path, rng: np.random.Generator) -> None:
    model = prepared(light_models / "light_squeezenet.onnx")
    (value,) = model.graph.inputs
    assert value.shape is not None
    shape = [int(size) for size in value.shape.numpy()]
    feeds = {str(value.name): rng.random(shape, dtype=np.float32)}
    amax = ranges(model, feeds, rng)
    assert_same(
        TrialModel(model, optimize=False)(amax, feeds), run_plainly(quantized(model, amax), feeds)
    )


def test_outputs_of_any_size_and_rank_are_returned_as_they_are(rng: np.random.Generator) -> None:
    """The positive elements of a convolution, and a result whose rank a condition decides."""
    rank = [
        helper.make_graph([helper.make_node(op, ["c"], ["r"], op)], op, [], [UNKNOWN_RANK])
        for op in ("Identity", "Flatten")
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("ReduceSum", ["c"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["above"], "above"),
        helper.make_node("If", ["above"], ["y"], "if", then_branch=rank[0], else_branch=rank[1]),
        helper.make_node("Reshape", ["c", "flat"], ["row"], "row"),
        helper.make_node("Greater", ["row", "zero"], ["positive"], "positive"),
        helper.make_node("Compress", ["row", "positive"], ["z"], "some"),
    ]
    weights = {
        "w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        "zero": np.float32(0.0),
        "flat": np.array([-1]),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["count"]),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    )
    x = rng.normal(size=(1, 3, 8, 8)).astype(np.float32)
    trial = TrialModel(model)
    for sample in (x, -x, x):
        exact = run_plainly(model, {"x": sample})
        outputs = trial({}, {"x": sample}, frozenset(trial.nodes))
        assert [array.shape for array in outputs.values()] == [array.shape for array in exact]


def test_a_model_whose_detections_are_fewer_in_int8_is_calibrated(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv"),
        helper.make_node("Reshape", ["c", "flat"], ["row"], "row"),
        helper.make_node("Greater", ["row", "zero"], ["positive"], "positive"),
        helper.make_node("Compress", ["row", "positive"], ["z"], "some"),
    ]
    weights = {
        "w": rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        "zero": np.zeros(1, np.float32),
        "flat": np.array([-1]),
    }
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"z": ["count"]}, weights)
    data = [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    imported = import_model(path)
    ranges = measure_ranges(
        run_passes(imported.model)[0], data, imported.sha256, RangeOptions(), lambda _, share: None
    )
    assert ranges.judgement.varying == ("z",)
    assert not ranges.judgement.broken
