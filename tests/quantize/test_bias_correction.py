"""Bias correction: channel means come back, layer after layer, and only where it pays."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from array_error import sqnr_db
from depthwise_fixtures import INPUT, depthwise_net
from model_fixtures import prepared, save, small_convnet
from onnx import helper
from onnx_ir.passes import common as ir_passes

from toolkit.errors import BuildError
from toolkit.quantize.corrections.bias import Run, channel_means, correct_biases, find_bias_layers
from toolkit.quantize.corrections.effect import Effect, worst_of
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors, quantize
from toolkit.quantize.weights import constant_of

Samples = Sequence[Mapping[str, np.ndarray]]


def noise(
    rng: np.random.Generator, shape: Sequence[int], count: int
) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=shape).astype(np.float32) + 0.5} for _ in range(count)]


def coarse(model: ir.Model) -> ir.Model:
    """The model with every row of weights rounded down to 31 levels: worse than INT8, and biased.

    Biases, which a quantized model holds in many bits, stay as they are.
    """
    changed = model.clone()
    ir_passes.RemoveUnusedNodesPass()(changed)
    for value in changed.graph.initializers.values():
        assert value.const_value is not None
        array = value.const_value.numpy()
        if array.ndim == 4 or (array.ndim == 2 and min(array.shape) > 1):
            step = np.abs(array).max(axis=tuple(range(1, array.ndim)), keepdims=True) / 15
            value.const_value = ir.tensor(np.floor(array / step) * step, name=value.name)
    return changed


def open_coarse(model: ir.Model, tensors: Sequence[str]) -> Run:
    return ActivationRunner(coarse(model), tensors)


def means(run: Run, samples: Samples, axes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Channel means, written anew: everything at once in float64."""
    results = [run(sample) for sample in samples]
    return {
        name: np.moveaxis(
            np.concatenate([np.asarray(one[name], np.float64) for one in results]), axis, 0
        )
        .reshape(results[0][name].shape[axis], -1)
        .mean(axis=1)
        for name, axis in axes.items()
    }


def offset(model: ir.Model, original: ir.Model, samples: Samples) -> float:
    """The largest difference of a channel mean, coarse to float, over all layers, in RMS of it."""
    axes = {layer.tensor: layer.axis for layer in find_bias_layers(original.graph)[0]}
    expected = means(ActivationRunner(original, tuple(axes)), samples, axes)
    result = means(open_coarse(model, tuple(axes)), samples, axes)
    return max(
        float(np.abs(result[name] - expected[name]).max() / np.sqrt(np.mean(expected[name] ** 2)))
        for name in axes
    )


def test_every_layer_gets_its_channel_means_back(tmp_path: Path, rng: np.random.Generator) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    samples = noise(rng, (1, 3, 32, 32), 3)
    result = correct_biases(model, samples, ActivationRunner, open_coarse)
    assert [layer.tensor for layer in result.layers] == ["c0", "n1", "y"]
    assert all(layer.largest > 0 for layer in result.layers)
    assert offset(model, model, samples) > 0.1
    assert offset(result.model, model, samples) < 1e-4


def test_means_hold_for_depthwise_layers_and_branches(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(depthwise_net(tmp_path / "m.onnx", rng, "PRelu"))
    samples = noise(rng, INPUT, 2)
    result = correct_biases(model, samples, ActivationRunner, open_coarse)
    assert len(result.layers) == len(find_bias_layers(model.graph)[0]) == 17
    assert offset(result.model, model, samples) < 1e-3 < offset(model, model, samples)


LAYERS = [
    ("Conv", {"group": 2}, (2, 4, 6, 6), {"w": (6, 2, 3, 3)}, 1),
    ("Conv", {}, (2, 4, 6, 6), {"w": (6, 4, 3, 3), "b": (6,)}, 1),
    ("ConvTranspose", {"group": 2}, (2, 4, 6, 6), {"w": (4, 3, 3, 3)}, 1),
    ("Gemm", {"beta": 0.25, "alpha": 3.0}, (7, 5), {"w": (5, 6), "b": (1, 6)}, 1),
    ("Gemm", {"transB": 1}, (7, 5), {"w": (6, 5), "b": (1,)}, 1),
    ("Gemm", {"beta": 2.0}, (7, 5), {"w": (5, 6)}, 1),
]


@pytest.mark.parametrize(("op", "attributes", "x", "weights", "axis"), LAYERS)
def test_each_kind_of_layer_can_be_corrected(
    tmp_path: Path,
    rng: np.random.Generator,
    op: str,
    attributes: Mapping[str, object],
    x: Sequence[int],
    weights: Mapping[str, Sequence[int]],
    axis: int,
) -> None:
    constants = {name: rng.normal(size=s).astype(np.float32) for name, s in weights.items()}
    nodes = [helper.make_node(op, ["x", *weights], ["y"], name="layer", **attributes)]
    path = save(tmp_path / "m.onnx", nodes, {"x": x}, {"y": [None] * len(x)}, constants)
    model, samples = prepared(path), noise(rng, x, 2)
    result = correct_biases(model, samples, ActivationRunner, open_coarse)
    expected = means(ActivationRunner(model, ["y"]), samples, {"y": axis})["y"]
    before = means(open_coarse(model, ["y"]), samples, {"y": axis})["y"]
    after = means(open_coarse(result.model, ["y"]), samples, {"y": axis})["y"]
    np.testing.assert_allclose(after, expected, atol=1e-4)
    assert np.abs(before - expected).max() > 1e-2
    onnx.checker.check_model(ir.to_proto(result.model))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_is_corrected_in_the_sum_behind_it(
    tmp_path: Path, rng: np.random.Generator, swapped: bool
) -> None:
    constants = {
        "w": rng.normal(size=(5, 6)).astype(np.float32),
        "b": rng.normal(size=(1, 6)).astype(np.float32),
    }
    operands = ["b", "p"] if swapped else ["p", "b"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("Add", operands, ["y"], name="bias"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 7, 5]}, {"y": [2, 7, 6]}, constants)
    model, samples = prepared(path), noise(rng, (2, 7, 5), 2)
    result = correct_biases(model, samples, ActivationRunner, open_coarse)
    expected = means(ActivationRunner(model, ["y"]), samples, {"y": 2})["y"]
    after = means(open_coarse(result.model, ["y"]), samples, {"y": 2})["y"]
    np.testing.assert_allclose(after, expected, atol=1e-4)
    assert result.model.graph.initializers["b"].shape == (1, 6)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([("MatMul", ["x", "x"], "y")], "its second operand is not a constant matrix"),
        ([("MatMul", ["x", "w"], "y")], "no Add of a bias follows it"),
        (
            [("MatMul", ["x", "w"], "p"), ("Add", ["p", "x"], "y")],
            "the Add that follows it does not add one constant to each output channel",
        ),
        ([("Gemm", ["x", "w", "column"], "y")], "its bias of shape [5, 1] is not one number"),
        ([("Gemm", ["x", "x"], "y")], "its weight is not a float32 constant"),
        ([("Gemm", ["x", "w", "x"], "y")], "its bias is not a float32 constant that counts"),
    ],
)
def test_layers_without_a_bias_to_correct_are_named(
    tmp_path: Path,
    rng: np.random.Generator,
    nodes: Sequence[tuple[str, Sequence[str], str]],
    reason: str,
) -> None:
    constants = {"w": np.eye(5, dtype=np.float32), "column": np.ones((5, 1), np.float32)}
    chain = [helper.make_node(op, i, [o], name=f"{op}_{o}") for op, i, o in nodes]
    model = prepared(save(tmp_path / "m.onnx", chain, {"x": [5, 5]}, {"y": [5, 5]}, constants))
    result = correct_biases(model, noise(rng, (5, 5), 1), ActivationRunner, open_coarse)
    assert result.layers == ()
    assert reason in result.refusals[0].reason


def test_a_shared_bias_and_the_model_given_stay_as_they_are(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    constants = {
        "w": rng.normal(size=(4, 4, 1, 1)).astype(np.float32),
        "b": rng.normal(size=4).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="one"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("PRelu", ["r", "slope"], ["p"], name="prelu"),
        helper.make_node("Conv", ["p", "w", "b"], ["y"], name="two"),
    ]
    constants["slope"] = np.ones((4, 1, 1), np.float32)
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4, 5, 5]}, {"y": [1, 4, 5, 5]}, constants)
    model, samples = prepared(path), noise(rng, (1, 4, 5, 5), 2)
    before = ir.to_proto(model).SerializeToString()
    result = correct_biases(model, samples, ActivationRunner, open_coarse).model
    assert ir.to_proto(model).SerializeToString() == before
    one, two = (constant_of(node, 2) for node in result.graph if node.op_type == "Conv")
    assert one is not None
    assert two is not None
    assert np.abs(one - two).max() > 1e-3
    assert offset(result, model, samples) < 1e-4


def test_a_biased_model_gains_on_other_samples(tmp_path: Path, rng: np.random.Generator) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    fresh = noise(rng, (1, 3, 32, 32), 4)
    run = ActivationRunner(model, ["y"])
    expected = np.concatenate([run(sample)["y"] for sample in fresh])

    def measure(changed: ir.Model) -> float:
        run = open_coarse(changed, ["y"])
        return sqnr_db(expected, np.concatenate([run(sample)["y"] for sample in fresh]))

    samples = noise(rng, (1, 3, 32, 32), 4)
    corrected = correct_biases(model, samples, ActivationRunner, open_coarse).model
    assert Effect(measure(model), measure(corrected)).gain > 6


def test_real_int8_gets_its_means_back(tmp_path: Path, rng: np.random.Generator) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    samples = noise(rng, (1, 3, 32, 32), 3)
    tensors = calibrated_tensors(model)
    seen = [ActivationRunner(model, tensors)(sample) for sample in samples]
    # Half the range: what clipping takes away shifts every mean.
    amax = {name: max(float(np.abs(one[name]).max()) for one in seen) / 2 for name in tensors}

    def open_int8(changed: ir.Model, tensors: Sequence[str]) -> Run:
        segments = {str(node.name): "cpu.0" for node in changed.graph}
        quantized = quantize(changed, amax, segments, frozenset()).model
        ir_passes.RemoveUnusedNodesPass()(quantized)
        return ActivationRunner(quantized, tensors)

    axes = {layer.tensor: layer.axis for layer in find_bias_layers(model.graph)[0]}
    expected = means(ActivationRunner(model, tuple(axes)), samples, axes)

    def largest(changed: ir.Model) -> float:
        result = means(open_int8(changed, tuple(axes)), samples, axes)
        return max(float(np.abs(result[name] - expected[name]).max()) for name in axes)

    corrected = correct_biases(model, samples, ActivationRunner, open_int8).model
    assert largest(corrected) < largest(model) / 10


@pytest.mark.parametrize(("after", "helps"), [(20.05, False), (20.2, True), (math.nan, False)])
def test_only_a_measured_gain_of_the_worst_output_helps(after: float, helps: bool) -> None:
    effects = {"a": Effect(20.0, after), "b": Effect(30.0, 25.0)}
    for order in (effects, dict(reversed(effects.items()))):
        assert worst_of(order).before == 20.0
        assert worst_of(order).helps() is helps
    assert Effect(math.inf, math.inf).gain == 0


def test_channel_means_name_the_tensor_that_is_not_finite(rng: np.random.Generator) -> None:
    array = rng.normal(size=(2, 3, 4))
    array[1, 2, 0] = np.nan
    with pytest.raises(BuildError, match=r"Tensor 'y' has no finite mean in 1 samples \(channel 2"):
        channel_means(lambda _: {"y": array}, [{}], {"y": 1})
    with pytest.raises(BuildError, match="no samples"):
        channel_means(lambda _: {"y": array}, [], {"y": 1})
