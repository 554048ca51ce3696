"""`tandem build --int4-weights`: which products get weights of 4 bits, and what that loses."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_double
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cli_fixtures import invoke
from onnx import helper, numpy_helper

from device.engine.file import open_engine
from device.runtime.session import open_session
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.cli.pages.engine_nodes import read_nodes
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.graph.block_weights import BlockTensor, BlockWeight
from toolkit.graph.passes import run_passes
from toolkit.quantize.int4.model import quantize_int4
from toolkit.quantize.int4.rounding import round_to_nearest
from toolkit.quantize.loss.metrics import SQNR
from toolkit.quantize.observe import ActivationRunner

SIZE = 256


@pytest.fixture(autouse=True)
def smallest_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small products have INT4 weights: large ones take long."""
    monkeypatch.setattr("toolkit.quantize.int4.products.MIN_SIDE", SIZE)


def _model(rng: np.random.Generator) -> onnx.ModelProto:
    """A normalization read by two products, a Gemm of what is no normalization, a small product.

    Some channels of the normalization are 30 times as large as the others.
    """
    gamma = np.where(np.arange(SIZE) % 64 == 5, 30, 1).astype(np.float32)
    constants: dict[str, np.ndarray] = {
        "gamma": gamma,
        "beta": rng.normal(size=SIZE).astype(np.float32) / 10,
        "q": _weights(rng, SIZE, SIZE),
        "k": _weights(rng, SIZE, SIZE),
        "g": _weights(rng, SIZE, SIZE),
        "b": rng.normal(size=SIZE).astype(np.float32),
        "small": _weights(rng, SIZE, 16),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gamma", "beta"], ["n"], "norm", axis=-1),
        helper.make_node("MatMul", ["n", "q"], ["nq"], "query"),
        helper.make_node("MatMul", ["n", "k"], ["nk"], "key"),
        helper.make_node("Mul", ["nq", "nk"], ["m"], "join"),
        helper.make_node("Gemm", ["m", "g", "b"], ["h"], "gemm", transB=1),
        helper.make_node("MatMul", ["h", "small"], ["y"], "last"),
    ]
    return _proto(nodes, constants, 16)


def _proto(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], columns: int
) -> onnx.ModelProto:
    """A model from x [4, SIZE] to y [4, columns]."""
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4, SIZE])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [4, columns])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.normal(size=shape) / shape[0] ** 0.5, np.float32)


def _graph(proto: onnx.ModelProto) -> ir.Model:
    return run_passes(ir.from_proto(proto))[0]


def _samples(rng: np.random.Generator, count: int = 6) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=(4, SIZE)).astype(np.float32)} for _ in range(count)]


def _error(model: ir.Model, truth: ir.Model, samples: list[dict[str, np.ndarray]]) -> float:
    def outputs(one: ir.Model) -> np.ndarray:
        run = ActivationRunner(one, ["y"])
        return np.concatenate([run(sample)["y"] for sample in samples])

    expected = outputs(truth)
    return float(np.linalg.norm(outputs(model) - expected) / np.linalg.norm(expected))


def _blocks(model: ir.Model) -> dict[str, BlockTensor]:
    tensors = ((node.name, node.inputs[1]) for node in model.graph if len(node.inputs) > 1)
    constants = ((str(name), value.const_value) for name, value in tensors if value is not None)
    return {name: tensor for name, tensor in constants if isinstance(tensor, BlockTensor)}


def test_scaled_channels_lose_less_than_plain_rounding(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _graph(_model(rng))
    samples, fresh = _samples(rng), _samples(rng)
    scaled = quantize_int4(model, samples, 32, ActivationRunner)
    monkeypatch.setattr("toolkit.quantize.int4.products.GRID", (0.0,))
    plain = quantize_int4(model, samples, 32, ActivationRunner)
    assert (scaled.products, plain.products, plain.scaled) == (3, 3, 0)
    assert scaled.scaled >= 2
    errors = [_error(one.model, model, fresh) for one in (scaled, plain)]
    assert errors[0] < 0.95 * errors[1]  # 0.54 to 0.81 as the weights are drawn
    judges = samples[3::4]
    assert scaled.losses["y"] == pytest.approx(_error(scaled.model, model, judges), rel=1e-3)
    assert set(_blocks(scaled.model)) == {"query", "key", "gemm"}
    assert _blocks(scaled.model)["gemm"].transposed
    # The normalization takes the factors of what only its products read: no node is added there.
    kinds = [node.op_type for node in scaled.model.graph]
    assert kinds[:3] == ["LayerNormalization", "MatMul", "MatMul"]
    half_bytes, scale_bytes = SIZE * SIZE // 2, 8 * SIZE * SIZE // 32
    assert scaled.bytes == 3 * (half_bytes + scale_bytes)
    assert scaled.plain_bytes == 3 * 2 * SIZE * SIZE


def test_factors_that_nothing_takes_are_a_product_of_their_own(rng: np.random.Generator) -> None:
    proto = _model(rng)
    proto.graph.output.append(helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, [4, SIZE]))
    model, samples = _graph(proto), _samples(rng)
    int4 = quantize_int4(model, samples, 32, ActivationRunner)
    kinds = [node.op_type for node in int4.model.graph]
    assert kinds[:4] == ["LayerNormalization", "Mul", "MatMul", "MatMul"]
    assert int4.losses["n"] == 0
    assert _error(int4.model, model, samples) < 0.2


def test_a_gemm_that_adds_its_operand_adds_it_unscaled(rng: np.random.Generator) -> None:
    constants = {
        "gamma": np.where(np.arange(SIZE) % 64 == 5, 30, 1).astype(np.float32),
        "w": _weights(rng, SIZE, SIZE),
    }
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gamma"], ["n"], "norm", axis=-1),
        helper.make_node("Gemm", ["n", "w", "n"], ["y"], "gemm"),
    ]
    int4 = quantize_int4(
        _graph(_proto(nodes, constants, SIZE)), _samples(rng), 32, ActivationRunner
    )
    assert int4.scaled == 1
    kinds = [node.op_type for node in int4.model.graph]
    assert kinds == ["LayerNormalization", "Mul", "Gemm"]
    assert int4.losses["y"] < 0.2


@pytest.mark.parametrize(
    "precision", [[], pytest.param(["--precision", "fp16"], marks=pytest.mark.slow)]
)
def test_an_engine_has_the_weights_and_says_what_they_lose(
    precision: list[str], tmp_path: Path, rng: np.random.Generator
) -> None:
    proto, data = _model(rng), tmp_path / "data.npz"
    onnx.save(proto, tmp_path / "m.onnx")
    samples = _samples(rng)
    np.savez(data, x=np.stack([sample["x"] for sample in samples]))
    arguments = ["build", str(tmp_path / "m.onnx"), "--profile", "orin-nano-8gb", "--json"]
    arguments += [
        "--data",
        str(data),
        "--int4-weights",
        "128",
        "-o",
        str(tmp_path / "e"),
        *precision,
    ]
    report: Mapping[str, Any] = json.loads(invoke(*arguments).stdout)
    assert report["manifest"]["provenance"]["precision"] == "fp16"
    assert any("INT4 weights of 3 products: " in note for note in report["notes"])
    with open_session(tmp_path / "e") as session:
        actual = session.infer(samples[0])["y"]
    expected = ActivationRunner(ir.from_proto(proto), ["y"])(samples[0])["y"]
    assert np.linalg.norm(actual - expected) < 0.2 * np.linalg.norm(expected)


def test_the_q_dq_of_a_model_stay_beside_the_weights(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """They clip what is beyond 1, so that an output without them is far away."""
    constants: dict[str, np.ndarray] = {
        "scale": np.asarray(1 / 127, np.float32),
        "zero": np.asarray(0, np.int8),
        "w": _weights(rng, SIZE, SIZE),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "dequantize"),
        helper.make_node("MatMul", ["d", "w"], ["y"], "product"),
    ]
    proto = _proto(nodes, constants, SIZE)
    onnx.save(proto, tmp_path / "m.onnx")
    samples = [{"x": 3 * sample["x"]} for sample in _samples(rng)]
    options = BuildOptions(int4_weights=128, data=samples, kernels=False)
    result = build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", options)
    assert any("Q/DQ of the model stay as they are, beside fp16" in note for note in result.notes)
    with open_session(tmp_path / "e") as session:
        actual = session.infer(samples[0])["y"]
    expected = ActivationRunner(ir.from_proto(proto), ["y"])(samples[0])["y"]
    assert np.linalg.norm(actual - expected) < 0.2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "int8"}, "INT4 weights are those of FP16 engines, not of int8"),
        ({"save_table": "t.json"}, "INT4 weights measure no ranges that a table could hold"),
        ({"data": None}, "INT4 weights are chosen by what the model computes on samples"),
    ],
)
def test_options_that_contradict_it_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx.save(_model(rng), tmp_path / "m.onnx")
    options = replace(BuildOptions(int4_weights=32, data=_samples(rng)), **change)
    with pytest.raises(BuildError, match=words):
        build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", options)


def _product(weight: np.ndarray, columns: int = SIZE) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    return _proto(nodes, {"w": weight}, columns)


def _hard(weight: np.ndarray, samples: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Make a number of each block so large that all others are rounded to 0; x is 0 there."""
    for sample in samples:
        sample["x"][:, ::128] = 0
    hard: np.ndarray = weight.copy()
    hard[::128] = 1e9
    return hard


def test_a_build_says_what_each_product_gains_and_loses(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = _weights(rng, SIZE, 8192)  # small ones take no time that is seen
    onnx.save(_product(weights, 8192), tmp_path / "m.onnx")
    options = BuildOptions(int4_weights=128, data=_samples(rng), kernels=False)
    result = build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "e", options)
    (gain,) = result.gains
    assert (gain.node, gain.form, gain.kept) == ("product", "INT4", "")
    assert gain.int8_us < gain.half_us
    assert gain.error is not None
    assert 0.0 < gain.error < 0.3
    with open_engine(tmp_path / "e") as engine:
        page = engine_page(engine_facts(engine), gains=result.gains)
    assert "What INT4 gains and loses" in page
    assert f"{gain.error:.1%}" in page


def test_layers_of_int4_weights_are_called_so(tmp_path: Path, rng: np.random.Generator) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    onnx.save(_model(rng), tmp_path / "m.onnx")
    options = BuildOptions(int4_weights=32, data=_samples(rng), accept_loss=True)
    with cuda_double.interpreted_cubins():
        build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "e", options)
    with open_engine(tmp_path / "e") as engine:
        forms = {node.row.node: node.computes for node in read_nodes(engine)}
    products = {name for name, form in forms.items() if form == "INT4 weights"}
    assert products == {"query", "key", "gemm"}
    assert {form for name, form in forms.items() if name not in products} == {"FP16"}


def test_a_loss_beyond_the_limit_is_refused_but_on_purpose(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    samples = _samples(rng)
    onnx.save(_product(_hard(_weights(rng, SIZE, SIZE), samples)), tmp_path / "m.onnx")
    options = BuildOptions(int4_weights=128, data=samples, kernels=False)
    words = r"INT4 weights lose too much of m.onnx: product: its results differ by .*limit 30%"
    with pytest.raises(BuildError, match=rf"{words}.*Try `tandem build --int4-weights 32`, or"):
        build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", options)
    assert not (tmp_path / "e").exists()
    options = replace(options, accept_loss=True)
    result = build_engine(tmp_path / "m.onnx", "laptop", tmp_path / "e", options)
    assert any("output 'y' differs by " in note for note in result.notes)
    (excess,) = [note for note in result.notes if "than their limits allow, as accepted" in note]
    assert "accepted: product: its results differ by" in excess
    assert "output y: SQNR" in excess
    with pytest.raises(BuildError, match=rf"{words}.*\. Leave them out"):
        quantize_int4(
            _graph(_product(_hard(_weights(rng, SIZE, SIZE), samples))),
            samples,
            32,
            ActivationRunner,
        ).check("m.onnx", 32)


def test_a_product_that_loses_too_much_stays_in_floating_point(rng: np.random.Generator) -> None:
    samples, easy = _samples(rng), _weights(rng, SIZE, SIZE)
    constants = {"easy": easy, "hard": _hard(_weights(rng, SIZE, SIZE), samples)}
    nodes = [
        helper.make_node("MatMul", ["x", "hard"], ["h"], "lossy"),
        helper.make_node("Tanh", ["x"], ["t"], "tanh"),
        helper.make_node("MatMul", ["t", "easy"], ["e"], "fine"),
        helper.make_node("Add", ["h", "e"], ["y"], "add"),
    ]
    model = _graph(_proto(nodes, constants, SIZE))
    int4 = quantize_int4(model, samples, 128, ActivationRunner)
    assert set(_blocks(int4.model)) == {"fine"}
    assert list(int4.floats) == ["lossy"]
    assert any("weights of lossy stay FP16: its results differ by" in note for note in int4.notes)
    int4.check("m.onnx", 128)
    everything = quantize_int4(model, samples, 128, ActivationRunner, accept_loss=True)
    assert set(_blocks(everything.model)) == {"lossy", "fine"}


@pytest.mark.parametrize("scale", [0.001, 1, 1000])
def test_products_of_one_operand_are_judged_apart(scale: float, rng: np.random.Generator) -> None:
    """Beside one of much larger results, and beside one of much smaller ones."""
    samples, fine = _samples(rng), scale * _weights(rng, SIZE, SIZE)
    hard = _hard(_weights(rng, SIZE, SIZE), samples)
    nodes = [
        helper.make_node("MatMul", ["x", "hard"], ["h"], "lossy"),
        helper.make_node("MatMul", ["x", "fine"], ["y"], "fine"),
    ]
    proto = _proto(nodes, {"fine": fine.astype(np.float32), "hard": hard}, SIZE)
    proto.graph.output.append(helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [4, SIZE]))
    int4 = quantize_int4(_graph(proto), samples, 128, ActivationRunner)
    assert set(_blocks(int4.model)) == {"fine"}
    assert int4.floats.keys() == {"lossy"}
    assert "its results differ by 100.0% (norm, limit 30%)" in int4.floats["lossy"]
    assert int4.losses["h"] == 0
    assert int4.losses["y"] < 0.2


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_judge_nothing_and_are_named(
    number: float, rng: np.random.Generator
) -> None:
    model, samples = _graph(_product(_weights(rng, SIZE, SIZE))), _samples(rng, 8)
    samples[2]["x"][0, 5] = samples[7]["x"][1, 2] = number
    int4 = quantize_int4(model, samples, 128, ActivationRunner)
    assert not int4.floats
    assert set(_blocks(int4.model)) == {"product"}
    assert int4.losses["y"] < 0.2
    (remark,) = int4.remarks
    assert "rows that are not finite in floating point neither choose nor judge" in remark
    assert "of 'x' on 2 of 8 samples" in remark
    samples[3]["x"][:, 5] = samples[7]["x"][:, 5] = number
    int4 = quantize_int4(model, samples, 128, ActivationRunner)
    assert int4.floats == {"product": "'x' is not finite on the samples that judge"}


def test_numbers_whose_squares_float32_does_not_hold_are_judged(rng: np.random.Generator) -> None:
    model, samples = _graph(_product(_weights(rng, SIZE, SIZE))), _samples(rng)
    small = quantize_int4(model, samples, 128, ActivationRunner)
    large = [{"x": np.float32(2**80) * sample["x"]} for sample in samples]
    int4 = quantize_int4(model, large, 128, ActivationRunner)
    assert not int4.floats
    assert int4.scaled == small.scaled
    assert int4.losses["y"] == pytest.approx(small.losses["y"], rel=1e-3)


def test_a_rounding_that_is_not_finite_is_never_the_best(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of GPTQ gives scales that are not finite."""

    def nan_scales(weight: np.ndarray, upper: np.ndarray, block: int) -> BlockWeight:
        rounded = round_to_nearest(weight, block)
        return replace(rounded, scales=np.full_like(rounded.scales, np.nan))

    monkeypatch.setattr("toolkit.quantize.int4.products.round_with_feedback", nan_scales)
    model = _graph(_product(_weights(rng, SIZE, SIZE)))
    int4 = quantize_int4(model, _samples(rng), 128, ActivationRunner)
    assert (int4.products, int4.feedback) == (1, 0)
    assert int4.losses["y"] < 0.2


def test_products_too_deep_for_gptq_are_counted(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = _graph(_product(_weights(rng, SIZE, SIZE))), _samples(rng)
    assert not quantize_int4(model, samples, 128, ActivationRunner).remarks
    for module in ("int4.model", "int4.rounding"):
        monkeypatch.setattr(f"toolkit.quantize.{module}.MAX_DEPTH", SIZE - 1)
    (remark,) = quantize_int4(model, samples, 128, ActivationRunner).remarks
    assert remark.startswith("GPTQ rounds weights up to a depth of 255: ")
    assert remark.endswith("which are rounded to nearest: 1")


def test_products_leave_int4_until_the_outputs_are_within_their_limits(
    rng: np.random.Generator,
) -> None:
    """The difference of two equal products is small, so that a tenth of each is far too much."""
    weight = _weights(rng, SIZE, SIZE)
    near = weight + _weights(rng, SIZE, SIZE) / 20
    constants = {"a": weight, "b": near, "c": _weights(rng, SIZE, SIZE)}
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"], "tanh"),
        helper.make_node("MatMul", ["x", "a"], ["xa"], "first"),
        helper.make_node("MatMul", ["x", "b"], ["xb"], "second"),
        helper.make_node("Sub", ["xa", "xb"], ["y"], "difference"),
        helper.make_node("MatMul", ["t", "c"], ["z"], "other"),
    ]
    proto = _proto(nodes, constants, SIZE)
    proto.graph.output.append(helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [4, SIZE]))
    int4 = quantize_int4(_graph(proto), _samples(rng), 128, ActivationRunner)
    assert set(int4.floats) == {"first", "second"}
    assert set(_blocks(int4.model)) == {"other"}
    assert all("output y: SQNR" in why for why in int4.floats.values())
    assert not int4.judgement.broken
    assert int4.judgement.losses[0].metric.limit == SQNR.target
    assert int4.losses["y"] == 0


def test_samples_that_judge_change_no_weight(rng: np.random.Generator) -> None:
    model, samples = _graph(_product(_weights(rng, SIZE, SIZE))), _samples(rng, 8)
    first = quantize_int4(model, samples, 128, ActivationRunner)
    for sample in samples[3::4]:
        sample["x"] = sample["x"] * 1.25
    second = quantize_int4(model, samples, 128, ActivationRunner)
    before, after = (_blocks(one.model)["product"].weight for one in (first, second))
    np.testing.assert_array_equal(before.integers, after.integers)
    assert first.judgement.basis == "int4"


def test_gptq_is_kept_only_where_samples_that_it_has_not_seen_gain(
    rng: np.random.Generator,
) -> None:
    """Samples of few directions say all of others like them, and nothing of white noise."""
    model, directions = _graph(_product(_weights(rng, SIZE, SIZE))), rng.normal(size=(8, SIZE))
    low = [{"x": (rng.normal(size=(4, 8)) @ directions).astype(np.float32)} for _ in range(16)]
    assert quantize_int4(model, low, 128, ActivationRunner).feedback == 1
    assert quantize_int4(model, _samples(rng, 16), 128, ActivationRunner).feedback == 0
    assert quantize_int4(model, low[:1], 128, ActivationRunner).feedback == 0


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused(number: float, rng: np.random.Generator) -> None:
    weight = _weights(rng, SIZE, SIZE)
    weight[3, 4] = number
    words = "1 numbers of 'w', the weight of node 'product', are not"
    with pytest.raises(BuildError, match=words):
        quantize_int4(_graph(_product(weight)), _samples(rng), 128, ActivationRunner)


def test_a_loss_that_is_not_finite_is_refused(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range of a block is larger than a float32 holds."""
    monkeypatch.setattr("toolkit.quantize.int4.products.GRID", (0.0,))
    weight, samples = _weights(rng, SIZE, SIZE), _samples(rng)
    weight[:2, 0] = 3e38, -3e38
    for sample in samples:
        sample["x"][:, :2] = 0
    model, words = _graph(_product(weight)), "Output 'y' is finite in floating point, but not with"
    with np.errstate(all="ignore"), pytest.raises(BuildError, match=words):
        quantize_int4(model, samples, 128, ActivationRunner, accept_loss=True)
    with np.errstate(all="ignore"):
        int4 = quantize_int4(model, samples, 128, ActivationRunner)
    assert list(int4.floats) == ["product"]


def test_a_model_without_large_products_is_refused(rng: np.random.Generator) -> None:
    model = _graph(_model(rng))
    for node in list(model.graph)[:5]:
        if node.op_type in ("MatMul", "Gemm"):
            node.op_type = "Custom"
    with pytest.raises(BuildError, match="weight of at least 256 x 256, and the model has none"):
        quantize_int4(model, _samples(rng), 32, ActivationRunner)
