"""Weights rounded for the sums that they enter: less error, the same scales, kept in the table."""

import tracemalloc
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from model_fixtures import save
from onnx import helper

from calibration.table import Adjustments, CalibrationTable, decode_table, encode_table
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections.adjust import adjust
from toolkit.quantize.corrections.rounding import (
    Int8,
    apply_steps,
    decode_steps,
    encode_steps,
    round_weights,
)
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges
from toolkit.quantize.trials.trial import TrialModel
from toolkit.quantize.weights import constant_of, quantize_weight

Samples = list[dict[str, np.ndarray]]
CONVOLUTIONS = {
    "plain": {"pads": [1, 1, 1, 1]},
    "strided": {"strides": [2, 2], "pads": [1, 1, 1, 1]},
    "dilated": {"dilations": [2, 2]},
    "grouped": {"group": 2, "pads": [0, 1, 2, 1]},
    "same": {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
}


def layer(path: Path, attributes: dict, rng: np.random.Generator) -> ir.Model:
    """x [1,8,13,13] -> y: one convolution of 8 channels."""
    weight = rng.normal(size=(8, 8 // attributes.get("group", 1), 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv", **attributes)]
    return graph_of(save(path, nodes, {"x": [1, 8, 13, 13]}, {"y": None}, {"w": weight}))


def graph_of(path: Path) -> ir.Model:
    return run_passes(import_model(path).model)[0]


def positive(rng: np.random.Generator, count: int, shape: tuple[int, ...]) -> Samples:
    """As behind a ReLU: channels of different strength that go together, and noise."""
    gains = rng.uniform(0.2, 2.0, (1, shape[1], 1, 1))
    arrays = []
    for _ in range(count):
        common = rng.uniform(0.5, 1.0, (1, 1, *shape[2:]))
        arrays.append(np.maximum(gains * common + 0.05 * rng.normal(size=shape), 0.0))
    return [{"x": array.astype(np.float32)} for array in arrays]


def error_of(exact: ir.Model, changed: ir.Model, samples: Samples) -> float:
    """Of INT8 weights alone, at the output y."""
    plain, trial = TrialModel(exact), TrialModel(changed)
    return sum(
        float(np.sum((trial({}, one)["y"] - plain({}, one, frozenset(plain.nodes))["y"]) ** 2))
        for one in samples
    )


@pytest.mark.parametrize("attributes", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_weights_lose_less_on_other_samples_at_the_same_scales(
    attributes: dict, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    graph = layer(tmp_path / "m.onnx", attributes, rng)
    data = positive(rng, 10, (1, 8, 13, 13))
    ranges = {"x": max(float(one["x"].max()) for one in data)}
    changed = apply_steps(graph, round_weights(graph, Int8(ranges), data[:6]))
    assert error_of(graph, changed, data[6:]) < 0.25 * error_of(graph, graph, data[6:])
    before, after = (quantize_weight(_weight(g), None, 0, None) for g in (graph, changed))
    assert np.allclose(before.scale, after.scale, rtol=1e-6, atol=0)
    assert np.abs(_weight(changed) - after.restored()).max() < 1e-6


def test_channels_whose_scale_is_that_of_the_bias_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    weight = rng.normal(size=(2, 8, 3, 3)).astype(np.float32)
    weight[0] *= 1e-9  # as batch normalisation switches channels off
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv")]
    weights = {"w": weight, "b": np.float32([3.0, 3.0])}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 8, 13, 13]}, {"y": None}, weights)
    graph = graph_of(path)
    steps = round_weights(graph, Int8({"x": 2.0}), positive(rng, 4, (1, 8, 13, 13)))
    off, on = decode_steps(steps["conv"], weight.size).reshape(2, -1)
    assert on.any()
    assert not off.any()
    assert np.array_equal(_weight(apply_steps(graph, steps))[0], weight[0])


def _weight(graph: ir.Model) -> np.ndarray:
    weight = constant_of(next(node for node in graph.graph if node.op_type == "Conv"), 1)
    assert weight is not None
    return weight


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
def test_matrices_are_rounded_along_their_sums(op: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(24, 10)).astype(np.float32)
    transposed = {"transB": 1} if "transposed" in op else {}
    stored = weight.T.copy() if transposed else weight
    nodes = [helper.make_node(op.split(maxsplit=1)[0], ["x", "w"], ["y"], "matrix", **transposed)]
    path = save(tmp_path / "m.onnx", nodes, {"x": [6, 24]}, {"y": [6, 10]}, {"w": stored})
    graph = graph_of(path)
    data = [{"x": one["x"].reshape(6, 24)} for one in positive(rng, 60, (6, 24, 1, 1))]
    ranges = {"x": max(float(one["x"].max()) for one in data)}
    changed = apply_steps(graph, round_weights(graph, Int8(ranges), data[:40]))
    assert error_of(graph, changed, data[40:]) < 0.5 * error_of(graph, graph, data[40:])


def biased(path: Path, rng: np.random.Generator) -> Path:
    """x [1,8,12,12] -> y, where the output is a small difference of large sums."""
    first, last = rng.normal(size=(16, 8, 3, 3)), rng.normal(size=(2, 16, 1, 1))
    first += 1.0
    last -= last.mean(axis=1, keepdims=True)
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w1"], ["y"], "head"),
    ]
    weights = {"w0": first.astype(np.float32), "w1": last.astype(np.float32)}
    return save(path, nodes, {"x": [1, 8, 12, 12]}, {"y": [1, 2, 12, 12]}, weights)


def test_a_calibration_rounds_where_it_helps_and_its_table_makes_the_same_model(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(3)
    imported = import_model(biased(tmp_path / "m.onnx", rng))
    graph = run_passes(imported.model)[0]
    data = positive(rng, 12, (1, 8, 12, 12))
    plain, rounded = (
        measure_ranges(
            graph, data, imported.sha256, RangeOptions("minmax", round_weights=switch),
            lambda step, share: None,
        )
        for switch in ("off", "on")
    )  # fmt: skip
    (outcome,) = rounded.corrections
    assert outcome.applied
    assert outcome.worst is not None
    assert outcome.worst.gain > 0.5
    assert rounded.sqnr_db["y"] == pytest.approx(outcome.worst.after)
    assert plain.sqnr_db["y"] == pytest.approx(outcome.worst.before)
    table = decode_table(encode_table(rounded.table), "here")
    assert table.format == 5
    assert table.adjusted
    again = adjust(graph, table.adjusted)
    for node, second in zip(again.graph, rounded.model.graph, strict=True):
        if node.op_type == "Conv":
            ours, theirs = constant_of(node, 1), constant_of(second, 1)
            assert ours is not None
            assert theirs is not None
            assert np.array_equal(ours, theirs)


def test_weights_of_nodes_in_floating_point_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    imported = import_model(biased(tmp_path / "m.onnx", rng))
    graph = run_passes(imported.model)[0]
    options = RangeOptions("minmax", round_weights="on", keep_float=frozenset({"stem"}))
    data = positive(rng, 12, (1, 8, 12, 12))
    ranges = measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)
    assert ranges.table.adjusted
    assert set(ranges.table.adjusted.rounded or {}) == {"head"}


def test_no_weight_is_rounded_where_every_output_meets_its_target(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    imported = import_model(biased(tmp_path / "m.onnx", rng))
    graph = run_passes(imported.model)[0]
    options = RangeOptions("minmax", keep="none", round_weights="auto")
    data = positive(rng, 12, (1, 8, 12, 12))
    ranges = measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)
    assert ranges.judgement.target_spent <= 1.0
    assert not ranges.corrections


def test_damaged_or_foreign_steps_are_refused(tmp_path: Path) -> None:
    graph = layer(tmp_path / "m.onnx", {}, np.random.default_rng(6))
    few = encode_steps(np.zeros(5, np.int8))
    assert decode_steps(few, 5).tolist() == [0] * 5
    with pytest.raises(BuildError, match="5 weights of node 'conv', but this model has 576 weigh"):
        apply_steps(graph, {"conv": few})
    bomb = encode_steps(np.zeros(1 << 24, np.int8))
    tracemalloc.start()
    with pytest.raises(BuildError, match="more than 576 weights of node 'conv'"):
        apply_steps(graph, {"conv": bomb})
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    with pytest.raises(BuildError, match="'other', but this model has no such weight"):
        apply_steps(graph, {"other": few})
    with pytest.raises(BuildError, match="cannot be read"):
        apply_steps(graph, {"conv": few[:-4]})
    with pytest.raises(BuildError, match="cannot be read"):
        apply_steps(graph, {"conv": "no text of base64"})


def test_only_format_5_holds_rounded_weights() -> None:
    adjusted = Adjustments(rounded={"conv": "text"})
    values = {"method": "minmax", "samples": 1, "data_sha256": "0" * 64, "model_sha256": "0" * 64}
    with pytest.raises(Exception, match="5: rounded weights"):
        CalibrationTable(format=2, tensors={"x": 1.0}, adjusted=adjusted, **values)
    CalibrationTable(format=5, tensors={"x": 1.0}, adjusted=adjusted, **values)
