"""The Q/DQ graph against onnx.reference and against the formulas of INT8."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from model_fixtures import prepared, save, small_convnet
from onnx import helper
from onnx.reference import ReferenceEvaluator
from qdq_fixtures import run_onnx

from toolkit.errors import BuildError
from toolkit.graph.extract import extract_segments, serialize_segment
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors, quantize, rectified_operands


def observed_amax(model: ir.Model, x: np.ndarray) -> dict[str, float]:
    tensors = calibrated_tensors(model)
    activations = ActivationRunner(model, tensors)({"x": x})
    return {name: float(np.abs(array).max()) or 1.0 for name, array in activations.items()}


def one_segment(model: ir.Model, name: str = "cpu.0") -> dict[str, str]:
    return {str(node.name): name for node in model.graph}


def test_int8_stays_close_to_float(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model = prepared(path)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    quantized = quantize(model, observed_amax(model, x), one_segment(model), frozenset())
    expected = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0]
    actual = ReferenceEvaluator(ir.to_proto(quantized.model)).run(None, {"x": x})[0]
    noise = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 0 < noise < 0.05


def test_onnxruntime_and_reference_agree_within_one_step(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    amax = observed_amax(model, x)
    proto = ir.to_proto(quantize(model, amax, one_segment(model), frozenset()).model)
    (actual,) = run_onnx(proto, {"x": x}).values()
    expected = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    step = amax["f"] / 127 if "f" in amax else amax["g"] / 127
    weights = 0.3 * 5 * np.sqrt(16)  # a step of the pooled features, through the last layer
    assert np.abs(actual - expected).max() <= step * weights


def test_convolutions_run_on_integers_in_onnxruntime(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    quantized = quantize(model, observed_amax(model, x), one_segment(model), frozenset())
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(
        ir.to_proto(quantized.model).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
    ops = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert ops["QLinearConv"] == 2
    assert ops["Conv"] == 0


def test_a_rectifier_keeps_the_scale_of_its_operand(rng: np.random.Generator) -> None:
    x = rng.normal(size=10_000).astype(np.float32) * 5
    scale = np.float32(2.0 / 127)

    def q(v: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(v / scale), -128, 127) * scale

    np.testing.assert_array_equal(np.maximum(q(x), 0), q(np.maximum(x, 0)))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one number"])
def test_the_bounds_of_a_clip_may_be_scalars_or_arrays_of_one_number(
    shape: tuple[int, ...], tmp_path: Path, rng: np.random.Generator
) -> None:
    bounds = {"low": np.zeros(shape, np.float32), "high": np.full(shape, 6, np.float32)}
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"]),
        helper.make_node("Clip", ["a", "low", "high"], ["y"]),
    ]
    size = (1, 4)
    save(tmp_path / "m.onnx", nodes, {"x": size}, {"y": size}, bounds)
    assert rectified_operands(prepared(tmp_path / "m.onnx")) == {"a": "y"}


def test_weights_are_per_channel_and_symmetric(tmp_path: Path, rng: np.random.Generator) -> None:
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32) * np.array(
        [0.01, 0.1, 1.0, 0.0], np.float32
    ).reshape(4, 1, 1, 1)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, {"w": weight})
    model = prepared(path)
    quantized = quantize(model, {"x": 1.0, "y": 1.0}, one_segment(model), frozenset())
    constants = {
        name: value.const_value.numpy()
        for name, value in quantized.model.graph.initializers.items()
        if value.const_value is not None
    }
    restored = constants["w_int8"] * constants["w_scale"].reshape(4, 1, 1, 1)
    step = constants["w_scale"].reshape(4, 1, 1, 1)
    assert (np.abs(restored - weight) <= step / 2 * 1.0001).all()
    assert np.abs(constants["w_int8"]).max(axis=(1, 2, 3)).tolist() == [127, 127, 127, 0]
    assert not constants["w_zero"].any()


@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_weights_follow_their_transposition(
    tmp_path: Path, rng: np.random.Generator, trans_b: int
) -> None:
    weight = rng.normal(size=(6, 5)).astype(np.float32) * np.geomspace(0.01, 10, 5)
    weight = weight.astype(np.float32)
    stored = weight.T.copy() if trans_b else weight
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=trans_b)]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 6]}, {"y": [2, 5]}, {"w": stored})
    model = prepared(path)
    x = rng.uniform(-1, 1, (2, 6)).astype(np.float32)
    quantized = quantize(model, {"x": 1.0, "y": 1.0}, one_segment(model), frozenset())
    scale = quantized.model.graph.initializers["w_scale"].const_value
    assert scale is not None
    np.testing.assert_allclose(scale.numpy(), np.abs(weight).max(axis=0) / 127, rtol=1e-6)
    actual = ReferenceEvaluator(ir.to_proto(quantized.model)).run(None, {"x": x})[0]
    np.testing.assert_allclose(actual, x @ weight, atol=np.abs(weight).max() * 0.1)


def int8_noise(path: Path, x: np.ndarray) -> float:
    """|INT8 - float| / |float| over the output, both run by onnxruntime."""
    model = prepared(path)
    quantized = quantize(model, observed_amax(model, x), one_segment(model), frozenset()).model

    (expected,) = run_onnx(onnx.load(path), {"x": x}).values()
    (actual,) = run_onnx(quantized, {"x": x}).values()
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("op", "attributes", "x", "y", "constants"),
    [
        ("Gemm", {"alpha": 2.0, "beta": 3.0}, (5, 6), (5, 5), {"w": (6, 5), "b": (5, 1)}),
        ("Gemm", {"transB": 1, "beta": 0.5}, (3, 6), (3, 5), {"w": (5, 6), "b": (1, 5)}),
        ("Gemm", {"transA": 1, "alpha": 0.5}, (6, 4), (4, 5), {"w": (6, 5), "b": (5,)}),
        ("Gemm", {}, (3, 6), (3, 5), {"w": (6, 5), "b": ()}),
        ("MatMul", {}, (64, 6), (64,), {"w": (6,)}),
        ("MatMul", {}, (3, 4, 6), (3, 4, 5), {"w": (6, 5)}),
        ("MatMul", {}, (3, 4, 6), (3, 4, 5), {"w": (3, 6, 5)}),
        ("Conv", {"group": 2}, (1, 8, 9, 9), (1, 6, 7, 7), {"w": (6, 4, 3, 3), "b": (6,)}),
        ("ConvTranspose", {}, (1, 4, 5, 5), (1, 6, 7, 7), {"w": (4, 6, 3, 3), "b": (6,)}),
        ("ConvTranspose", {"group": 2}, (1, 4, 5, 5), (1, 6, 7, 7), {"w": (4, 3, 3, 3), "b": (6,)}),
    ],
)
def test_every_form_of_a_layer_stays_close_to_float(
    tmp_path: Path,
    rng: np.random.Generator,
    op: str,
    attributes: dict[str, float],
    x: tuple[int, ...],
    y: tuple[int, ...],
    constants: dict[str, tuple[int, ...]],
) -> None:
    weights = {
        name: np.asarray(rng.normal(size=shape) * (5 if name == "b" else 1), np.float32)
        for name, shape in constants.items()
    }
    nodes = [helper.make_node(op, ["x", *weights], ["y"], name="layer", **attributes)]
    path = save(tmp_path / "m.onnx", nodes, {"x": x}, {"y": y}, weights)
    assert int8_noise(path, rng.normal(size=x).astype(np.float32)) < 0.02


@pytest.mark.parametrize("size", [1e-14, 1e-22, 1e-36, 1e-42, 0.0])
def test_a_channel_that_is_switched_off_keeps_its_bias(
    tmp_path: Path, rng: np.random.Generator, size: float
) -> None:
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    weight[2] *= size
    bias = np.array([0.1, -0.2, 50.0, 0.0], np.float32)
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv")]
    constants = {"w": weight, "b": bias}
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, constants)
    assert int8_noise(path, rng.normal(size=(1, 3, 8, 8)).astype(np.float32)) < 0.01


@pytest.mark.parametrize("masked", [-np.inf, np.finfo(np.float32).min])
def test_masked_scores_stay_in_float(
    tmp_path: Path, rng: np.random.Generator, masked: float
) -> None:
    constants = {
        "w": rng.normal(size=(16, 16)).astype(np.float32) * 0.3,
        "seen": np.tril(np.ones((1, 6, 6), bool)),
        "never": np.array(masked, np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], name="project"),
        helper.make_node("Transpose", ["q"], ["k"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "k"], ["scores"], name="compare"),
        helper.make_node("Where", ["seen", "scores", "never"], ["masked"], name="mask"),
        helper.make_node("Add", ["masked", "scores"], ["sum"], name="add"),
        helper.make_node("Softmax", ["sum"], ["p"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["p", "q"], ["y"], name="mix"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 6, 16]}, {"y": [1, 6, 16]}, constants)
    assert {"masked", "sum"}.isdisjoint(calibrated_tensors(prepared(path)))
    assert int8_noise(path, rng.normal(size=(1, 6, 16)).astype(np.float32)) < 0.05


def test_names_that_the_model_uses_already_are_left_to_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    constants = {
        "w": rng.normal(size=(3, 3, 3, 3)).astype(np.float32) * 0.1,
        "x_scale": np.full(1, 7.0, np.float32),
        "w_scale": rng.normal(size=(1, 3, 1, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["x_cpu.0"], name="a", pads=[1] * 4),
        helper.make_node("Mul", ["x_cpu.0", "x_scale"], ["x_cpu.0_uint8"], name="m"),
        helper.make_node("Conv", ["x_cpu.0_uint8", "w"], ["c"], name="b", pads=[1] * 4),
        helper.make_node("Mul", ["c", "w_scale"], ["y"], name="n"),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 3, 8, 8]}, constants)
    assert int8_noise(path, rng.normal(size=(1, 3, 8, 8)).astype(np.float32)) < 0.05


def test_a_tensor_without_a_range_is_refused_by_name(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    amax = dict.fromkeys(calibrated_tensors(model), 1.0)
    del amax["r0"]
    with pytest.raises(BuildError, match="Tensor 'r0', read by node"):
        quantize(model, amax, one_segment(model), frozenset())


def test_what_crosses_to_or_from_the_dla_is_int8(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    model = prepared(path)
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    nodes = [str(node.name) for node in model.graph]
    first_gpu = next(i for i, name in enumerate(nodes) if "pool" in name or "flatten" in name)
    segment_of = {
        name: "dla0.0" if index < first_gpu else "gpu.0" for index, name in enumerate(nodes)
    }
    quantized = quantize(model, observed_amax(model, x), segment_of, frozenset({"dla0.0"}))
    dla, gpu = extract_segments(quantized.model, quantized.segment_of, ["dla0.0", "gpu.0"])
    assert dla.inputs == ("x",)
    assert set(dla.outputs) == set(gpu.inputs)
    assert all(name in quantized.scales for name in dla.outputs)
    env: dict[str, np.ndarray] = {"x": x}
    for piece in (dla, gpu):
        options = ort.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", "1")
        if piece.weights:
            options.add_external_initializers(
                list(piece.weights),
                [ort.OrtValue.ortvalue_from_numpy(w) for w in piece.weights.values()],
            )
        session = ort.InferenceSession(
            serialize_segment(piece), options, providers=["CPUExecutionProvider"]
        )
        feeds = {name: env[name] for name in piece.inputs}
        env.update(zip(piece.outputs, session.run(list(piece.outputs), feeds), strict=True))
    assert all(env[name].dtype == np.int8 for name in dla.outputs)
    expected = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0]
    assert np.linalg.norm(env["y"] - expected) / np.linalg.norm(expected) < 0.05


def test_float_nodes_read_floats_and_keep_their_weights(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    amax = observed_amax(model, x)
    fused = next(n for n in model.graph if n.op_type == "Conv" and n.name != "conv0")
    float_nodes = frozenset({str(fused.name), "fc"})
    result = quantize(model, amax, one_segment(model), frozenset(), keep_float=float_nodes).model
    nodes = {str(node.name): node for node in result.graph}
    for name in float_nodes:
        before = next(node for node in model.graph if node.name == name)
        for index, value in enumerate(nodes[name].inputs):
            assert value is not None
            maker = value.producer()
            assert maker is None or maker.op_type != "DequantizeLinear"
            constant = before.inputs[index].const_value  # type: ignore[union-attr]
            if constant is not None:
                assert value.const_value is not None
                np.testing.assert_array_equal(value.const_value.numpy(), constant.numpy())
    # The second convolution reads what relu0 makes, so relu0's operand is not rounded for the Add.
    assert nodes["relu0"].inputs[0].producer().op_type == "Conv"  # type: ignore[union-attr]
    assert nodes["add1"].inputs[1].producer().op_type == "DequantizeLinear"  # type: ignore[union-attr]


def test_keeping_every_node_in_float_changes_nothing(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = prepared(small_convnet(tmp_path / "m.onnx", rng))
    names = frozenset(str(node.name) for node in model.graph)
    result = quantize(model, {}, one_segment(model), frozenset(), keep_float=names)
    assert [n.op_type for n in result.model.graph] == [n.op_type for n in model.graph]
    assert not result.scales


def test_an_average_that_a_float_layer_reads_is_rounded_on_the_dla(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A DLA's pooling writes INT8 at the scale of its input; a GPU's is fused with what follows."""
    nodes = [
        helper.make_node("AveragePool", ["x"], ["p"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Mul", ["p", "factor"], ["m"], "mul"),
        helper.make_node("Conv", ["m", "w"], ["y"], "conv"),
    ]
    weights = {
        "factor": np.full((1, 1, 1, 1), 3, np.float32),
        "w": rng.normal(size=(4, 4, 1, 1)).astype(np.float32),
    }
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 4, 8, 8]}, {"y": [1, 4, 7, 7]}, weights)
    model = prepared(path)
    x = rng.normal(size=(1, 4, 8, 8)).astype(np.float32)
    amax = {**observed_amax(model, x), "p": 4.0, "x": 4.0}
    for segment, int8, rounded in (("dla0.0", {"dla0.0"}, True), ("gpu.0", set(), False)):
        result = quantize(model, amax, one_segment(model, segment), frozenset(int8)).model
        (mul,) = [node for node in result.graph if node.op_type == "Mul"]
        reader = mul.inputs[0].producer()
        assert (reader is not None and reader.op_type == "DequantizeLinear") == rounded
    float_nodes = frozenset({"pool"})
    result = quantize(
        model, amax, one_segment(model, "d"), frozenset({"d"}), keep_float=float_nodes
    ).model
    (mul,) = [node for node in result.graph if node.op_type == "Mul"]
    assert mul.inputs[0].producer().op_type == "AveragePool"
