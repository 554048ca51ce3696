"""Cross-layer equalisation: exact in float, equal ranges by the formulas, and less INT8 noise."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from array_error import sqnr_db
from depthwise_fixtures import INPUT, depthwise_net
from model_fixtures import prepared, save
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common as ir_passes

from toolkit.quantize.corrections.channel_links import find_links
from toolkit.quantize.corrections.equalise import channel_ranges, equalise, link_tensors
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors, quantize


def noise(
    rng: np.random.Generator, shape: Sequence[int], count: int
) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=shape).astype(np.float32)} for _ in range(count)]


def outputs(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    clean = model.clone()
    ir_passes.RemoveUnusedNodesPass()(clean)
    run = ActivationRunner(clean, ["y"])
    return np.concatenate([run(sample)["y"] for sample in samples])


def reference(model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    evaluator = ReferenceEvaluator(ir.to_proto(model))
    return np.concatenate([evaluator.run(None, dict(sample))[0] for sample in samples])


def ranges_of(
    model: ir.Model, samples: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    tensors = link_tensors(model)
    return channel_ranges(ActivationRunner(model, tensors), samples, tensors)


def constant(model: ir.Model, name: str) -> np.ndarray:
    result = model.graph.initializers[name].const_value
    assert result is not None
    array: np.ndarray = result.numpy()
    return array


def pair(
    path: Path,
    rng: np.random.Generator,
    between: Sequence[onnx.NodeProto],
    *,
    groups: tuple[int, int] = (1, 1),
    constants: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """x [2,4,9,9] -> Conv "first" -> m -> the nodes between -> h -> Conv "second" -> y."""
    rows = 10 ** rng.uniform(-2, 2, (8, 1, 1, 1))
    weights = {
        "w1": rng.normal(size=(8, 4 // groups[0], 3, 3)) * rows,
        "b1": rng.normal(size=8) * rows.reshape(-1),
        "w2": rng.normal(size=(6, 8 // groups[1], 3, 3)),
        "b2": rng.normal(size=6),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["m"], name="first", group=groups[0]),
        *between,
        helper.make_node(
            "Conv", ["h", "w2", "b2"], ["y"], name="second", group=groups[1], pads=[1] * 4
        ),
    ]
    stored = {name: array.astype(np.float32) for name, array in weights.items()}
    stored |= constants or {}
    return save(path, nodes, {"x": [2, 4, 9, 9]}, {"y": [2, 6, None, None]}, stored)


def relu() -> list[onnx.NodeProto]:
    return [helper.make_node("Relu", ["m"], ["h"], name="act")]


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(
    ("op", "attributes", "operands"),
    [
        ("Relu", {}, []),
        ("LeakyRelu", {"alpha": 0.2}, []),
        ("PRelu", {}, ["slope"]),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}, []),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, []),
    ],
)
def test_outputs_stay_the_same_in_float(
    tmp_path: Path,
    rng: np.random.Generator,
    groups: tuple[int, int],
    op: str,
    attributes: Mapping[str, object],
    operands: Sequence[str],
) -> None:
    slope = rng.normal(size=(8, 1, 1)).astype(np.float32)
    node = helper.make_node(op, ["m", *operands], ["h"], name="act", **attributes)
    path = pair(tmp_path / "m.onnx", rng, [node], groups=groups, constants={"slope": slope})
    model = prepared(path)
    samples = noise(rng, (2, 4, 9, 9), 2)
    result = equalise(model, ranges_of(model, samples))
    assert result.factors
    expected = ReferenceEvaluator(onnx.load(path)).run(None, dict(samples[0]))[0]
    actual = reference(result.model, samples[:1])
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(constant(result.model, "w1") - constant(model, "w1")).max() > 0


@pytest.mark.parametrize("activation", ["Relu", "PRelu"])
def test_a_depthwise_network_stays_the_same_in_float(
    tmp_path: Path, rng: np.random.Generator, activation: str
) -> None:
    model = prepared(depthwise_net(tmp_path / "m.onnx", rng, activation))
    samples = noise(rng, INPUT, 3)
    result = equalise(model, ranges_of(model, samples))
    assert len(result.factors) > 5
    fresh = noise(rng, INPUT, 3)
    before = outputs(model, fresh)
    assert np.abs(outputs(result.model, fresh) - before).max() <= 1e-4 * np.abs(before).max()


@pytest.mark.parametrize("trans_b", [0, 1])
def test_a_classifier_behind_global_pooling_takes_part(
    tmp_path: Path, rng: np.random.Generator, trans_b: int
) -> None:
    weight = rng.normal(size=(8, 5)).astype(np.float32)
    constants = {
        "w": (rng.normal(size=(8, 4, 3, 3)) * 10 ** rng.uniform(-1, 1, (8, 1, 1, 1))),
        "fc": weight.T.copy() if trans_b else weight,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("GlobalAveragePool", ["b"], ["c"], name="pool"),
        helper.make_node("Flatten", ["c"], ["d"], name="flatten"),
        helper.make_node("Gemm", ["d", "fc"], ["y"], name="classify", transB=trans_b),
    ]
    stored = {name: array.astype(np.float32) for name, array in constants.items()}
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 4, 9, 9]}, {"y": [2, 5]}, stored)
    model, samples = prepared(path), noise(rng, (2, 4, 9, 9), 2)
    result = equalise(model, ranges_of(model, samples))
    assert result.factors
    before = reference(model, samples)
    assert np.abs(reference(result.model, samples) - before).max() <= 1e-4 * np.abs(before).max()


def test_features_that_are_not_channels_are_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    constants = {
        "w": rng.normal(size=(8, 4, 3, 3)).astype(np.float32),
        "fc": rng.normal(size=(32, 5)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("Flatten", ["a"], ["b"], name="flatten"),
        helper.make_node("Gemm", ["b", "fc"], ["y"], name="classify"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4, 4, 4]}, {"y": [1, 5]}, constants)
    _, (refusal,) = find_links(prepared(path).graph)
    assert refusal.reason == "it leads to Flatten 'flatten', which does not commute with scaling"


def test_balanced_activations_all_reach_the_same_range_before_a_depthwise_layer(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(depthwise_net(tmp_path / "m.onnx", rng))
    samples = noise(rng, INPUT, 4)
    before = ranges_of(model, samples)
    after = ranges_of(equalise(model, before).model, samples)
    depthwise = [
        link.tensor
        for link in find_links(model.graph)[0]
        if link.consumer.attributes.get_int("group", 1) > 1
    ]
    assert len(depthwise) == 5
    for name in depthwise:
        alive = before[name] > 1e-3 * before[name].max()
        assert before[name][alive].max() / before[name][alive].min() > 10
        assert after[name][alive].max() / after[name][alive].min() < 1.01


def int8_sqnr(
    model: ir.Model,
    samples: Sequence[Mapping[str, np.ndarray]],
    fresh: Sequence[Mapping[str, np.ndarray]],
    expected: np.ndarray,
) -> float:
    tensors = calibrated_tensors(model)
    run = ActivationRunner(model, tensors)
    amax = dict.fromkeys(tensors, 1e-9)
    for sample in samples:
        for name, array in run(sample).items():
            amax[name] = max(amax[name], float(np.abs(array).max()))
    segments = {str(node.name): "cpu.0" for node in model.graph}
    return sqnr_db(expected, outputs(quantize(model, amax, segments, frozenset()).model, fresh))


def test_int8_of_a_depthwise_network_gains_clearly(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(depthwise_net(tmp_path / "m.onnx", rng))
    samples, fresh = noise(rng, INPUT, 8), noise(rng, INPUT, 8)
    expected = outputs(model, fresh)
    before = int8_sqnr(model, samples, fresh, expected)
    changed = equalise(model, ranges_of(model, samples)).model
    assert int8_sqnr(changed, samples, fresh, expected) > before + 6.0


def test_a_mul_evens_the_channels_that_a_function_hands_to_a_depthwise_layer(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    spread = 10 ** rng.uniform(-1, 1, 16)
    wide = rng.normal(size=(16, 3, 1, 1)) * spread.reshape(-1, 1, 1, 1)
    depthwise = rng.normal(size=(16, 1, 3, 3)) / spread.reshape(-1, 1, 1, 1)
    weights = {"w": wide.astype(np.float32), "d": depthwise.astype(np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("HardSwish", ["c"], ["h"]),
        helper.make_node("Conv", ["h", "d"], ["y"], group=16),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": INPUT}, {"y": [1, 16, 30, 30]}, weights)
    model = prepared(path)
    samples, fresh = noise(rng, INPUT, 8), noise(rng, INPUT, 8)
    expected, observed = outputs(model, fresh), ranges_of(model, samples)
    changed = equalise(model, observed).model
    evened = channel_ranges(ActivationRunner(changed, ["h_equalised"]), samples, ["h_equalised"])[
        "h_equalised"
    ]
    assert observed["h"].max() / observed["h"].min() > 10
    assert evened.max() / evened.min() < 1.0001
    np.testing.assert_allclose(outputs(changed, fresh), expected, rtol=1e-3, atol=1e-4)
    before = int8_sqnr(model, samples, fresh, expected)
    assert int8_sqnr(changed, samples, fresh, expected) > before + 6.0


def test_a_mul_takes_a_name_that_no_tensor_and_no_node_has(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("HardSwish", ["x"], ["h_equalised"]),
        helper.make_node("HardSwish", ["h_equalised"], ["h"], name="h_equalised_1"),
        helper.make_node("Conv", ["h", "w"], ["y"], group=4),
    ]
    weight, shape = rng.normal(size=(4, 1, 1, 1)).astype(np.float32), [1, 4, 5, 5]
    model = prepared(save(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape}, {"w": weight}))
    result = equalise(model, {"h": np.array([1, 1, 1, 100], np.float32)}).model
    assert [node.name for node in result.graph if node.op_type == "Mul"] == ["h_equalised_2"]
    samples = noise(rng, shape, 2)
    np.testing.assert_allclose(outputs(result, samples), outputs(model, samples), rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_a_mul_is_put_in_where_the_depthwise_layer_is_the_only_reader(
    tmp_path: Path, rng: np.random.Generator, shared: bool
) -> None:
    nodes = [helper.make_node("HardSwish", ["x"], ["h"])]
    nodes.append(helper.make_node("Conv", ["h", "w"], ["c"], group=4))
    nodes.append(helper.make_node("Add", ["c", "h"] if shared else ["c", "c"], ["y"]))
    weight = rng.normal(size=(4, 1, 1, 1)).astype(np.float32)
    shape = [1, 4, 5, 5]
    model = prepared(save(tmp_path / "m.onnx", nodes, {"x": shape}, {"y": shape}, {"w": weight}))
    assert link_tensors(model) == (() if shared else ("h",))
    even = {"h": np.ones(4, np.float32)}
    assert not equalise(model, even).factors  # a Mul would bring nothing


@pytest.mark.parametrize(
    ("op", "constants", "reason"),
    [
        ("Sigmoid", [], "leads to Sigmoid 'act', which does not commute"),
        ("Clip", ["low", "high"], ""),
        ("Clip", ["minus", "high"], "leads to Clip 'act', which does not commute"),
        ("Add", ["ones"], "leads to Add 'act'"),
    ],
)
def test_what_does_not_commute_is_refused_with_its_reason(
    tmp_path: Path, rng: np.random.Generator, op: str, constants: Sequence[str], reason: str
) -> None:
    bounds = {"low": 0.0, "high": 6.0, "minus": -1.0, "ones": 1.0}
    arrays = {name: np.array(value, np.float32) for name, value in bounds.items()}
    node = helper.make_node(op, ["m", *constants], ["h"], name="act")
    model = prepared(pair(tmp_path / "m.onnx", rng, [node], constants=arrays))
    result = equalise(model, {"m": np.ones(8), "h": np.ones(8)} if op != "Clip" else {})
    assert not result.factors
    refusals = {entry.node: entry.reason for entry in find_links(model.graph)[1]}
    assert reason in refusals.get("first", "")
    np.testing.assert_array_equal(constant(result.model, "w1"), constant(model, "w1"))


def test_a_tensor_with_two_readers_or_that_is_an_output_is_refused(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Relu", ["m"], ["r"], name="act"),
        helper.make_node("Neg", ["r"], ["n"], name="neg"),
        helper.make_node("Add", ["r", "n"], ["h"], name="add"),
    ]
    _, refusals = find_links(prepared(pair(tmp_path / "m.onnx", rng, nodes)).graph)
    reasons = {entry.node: entry.reason for entry in refusals}
    assert reasons["first"] == "tensor 'r' has 2 readers, but a link needs exactly 1"
    assert reasons["second"] == "tensor 'y' has 1 readers, but a link needs exactly 1"


def clipped_pair(path: Path, rng: np.random.Generator, high: float) -> ir.Model:
    constants = {"low": np.array(0, np.float32), "high": np.array(high, np.float32)}
    node = helper.make_node("Clip", ["m", "low", "high"], ["h"], name="act")
    return prepared(pair(path, rng, [node], constants=constants))


def test_clip_lets_channels_pass_that_stay_below_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = clipped_pair(tmp_path / "m.onnx", rng, 50.0)
    samples = noise(rng, (2, 4, 9, 9), 3)
    observed = ranges_of(model, samples)
    result = equalise(model, observed)
    held = observed["h"] >= 0.9 * 50
    before, after = reference(model, samples), reference(result.model, samples)
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()
    same = np.isclose(constant(model, "w1"), constant(result.model, "w1"), rtol=1e-6)
    assert same.all(axis=(1, 2, 3))[held].all()
    assert ranges_of(result.model, samples)["h"][~held].max() <= 0.9 * 50 * 1.001


def test_clip_that_cuts_every_channel_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    model = clipped_pair(tmp_path / "m.onnx", rng, 1e-3)
    observed = {name: np.full(8, 1e-3) for name in ("m", "h")}
    assert "h" not in equalise(model, observed).factors


def test_channels_that_are_switched_off_are_left_alone(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(pair(tmp_path / "m.onnx", rng, relu()))
    for name in ("w1", "b1"):
        array = constant(model, name).copy()
        array[3] = 0
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    result = equalise(model, ranges_of(model, noise(rng, (2, 4, 9, 9), 2))).model
    assert (constant(result, "w2")[:, :3] != constant(model, "w2")[:, :3]).any()
    np.testing.assert_array_equal(constant(result, "w2")[:, 3], constant(model, "w2")[:, 3])


def test_other_readers_of_a_weight_and_the_model_given_keep_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weight = rng.normal(size=(4, 4, 1, 1)).astype(np.float32)
    weight *= 10 ** rng.uniform(-1, 0, (4, 1, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["b"], name="r1"),
        helper.make_node("Conv", ["b", "w"], ["c"], name="two"),
        helper.make_node("Sigmoid", ["c"], ["d"], name="s"),
        helper.make_node("Conv", ["d", "w"], ["y"], name="three"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4, 5, 5]}, {"y": [1, 4, 5, 5]}, {"w": weight})
    model = prepared(path)
    before = ir.to_proto(model).SerializeToString()
    result = equalise(model, ranges_of(model, noise(rng, (1, 4, 5, 5), 2))).model
    assert ir.to_proto(model).SerializeToString() == before
    reads = {str(node.name): node.inputs[1] for node in result.graph if node.op_type == "Conv"}
    third = reads["three"]
    assert third is not None
    assert third.const_value is not None
    np.testing.assert_array_equal(third.const_value.numpy(), weight)
    samples = noise(rng, (1, 4, 5, 5), 1)
    np.testing.assert_allclose(
        reference(result, samples), reference(model, samples), rtol=1e-4, atol=1e-5
    )


def test_activation_balance_without_ranges_is_refused_by_tensor(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = equalise(prepared(pair(tmp_path / "m.onnx", rng, relu())), {})
    assert not result.factors
