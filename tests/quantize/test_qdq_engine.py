"""Exported Q/DQ models against the engine: the same bits, or a step apart from equal operands.

One rounding that tips over tips others after it, so that the outputs of two graphs that round the
same numbers in another order drift apart; hence the comparison tensor by tensor.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from array_error import sqnr_db
from model_fixtures import prepared, save, small_convnet
from onnx import helper
from qdq_fixtures import by_onnxruntime, int8_operands, run_onnx, steps_apart

import configs
from calibration.table import CalibrationTable
from device.runtime.exact_products import exact_session
from device.runtime.session import open_session
from pipelines.config import load_model
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.engine.plan_models import PlanMember, PlanRequest, make_plan
from toolkit.importers.onnx import ModelBytes
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.export import PORTABLE, TARGETS, export_form
from toolkit.quantize.quantize import (
    calibrated_tensors,
    quantize,
    rectified_operands,
    with_operands,
)
from toolkit.quantize.ranges.data import input_specs, open_data

DETECTOR = configs.ROOT / "models" / "robot-objects.onnx"


def deep_convnet(path: Path, rng: np.random.Generator) -> Path:
    """Twelve convolutions with every kind of neighbour that INT8 knows."""
    c, nodes, weights, x = 12, [], {}, "x"
    for i in range(12):
        depth = 3 if i == 0 else c
        weights[f"w{i}"] = (rng.normal(size=(c, depth, 3, 3)) / np.sqrt(9 * depth)).astype("f4")
        weights[f"b{i}"] = rng.normal(size=c).astype("f4") * np.float32(0.1)
        bias, pads = f"b{i}", [1] * 4
        nodes.append(helper.make_node("Conv", [x, f"w{i}", bias], [f"c{i}"], f"conv{i}", pads=pads))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"relu{i}"))
        x = f"r{i}"
        if i % 3 == 2:
            nodes.append(helper.make_node("Add", [f"r{i - 1}", f"r{i}"], [f"a{i}"], f"add{i}"))
            x = f"a{i}"
    nodes.append(helper.make_node("Concat", [x, "r4"], ["k"], "concat", axis=1))
    nodes.append(helper.make_node("MaxPool", ["k"], ["m"], "pool", kernel_shape=[2, 2]))
    weights["wt"] = rng.normal(size=(2 * c, 4, 2, 2)).astype("f4") * np.float32(0.1)
    nodes.append(helper.make_node("ConvTranspose", ["m", "wt"], ["y"], "up"))
    return save(path, nodes, {"x": [1, 3, 20, 20]}, {"y": [1, 4, 20, 20]}, weights)


def observed(graph: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, float]:
    seen = ActivationRunner(graph, calibrated_tensors(graph))(feeds)
    # Not below 0.01: kernels of Sigmoid differ by 1e-7, which is to be little beside a step.
    results = {name: max(float(np.abs(array).max()) * 0.9, 0.01) for name, array in seen.items()}
    return with_operands(graph, results)


def engine_run(
    path: Path, amax: dict[str, float], feeds: Mapping[str, np.ndarray], out: Path
) -> dict[str, np.ndarray]:
    table = CalibrationTable(
        method="minmax", samples=1, data_sha256="0" * 64, model_sha256="0" * 64, tensors=amax
    )
    result = build_engine(path, "laptop", out, BuildOptions(precision="int8", table=table))
    with open_session(result.path) as session:
        return session.infer(dict(feeds))


def case(name: str, tmp_path: Path, rng: np.random.Generator) -> tuple[Path, dict[str, np.ndarray]]:
    """A model and a sample for it."""
    if name == "detector":
        preprocess = load_model(DETECTOR.with_suffix(".toml")).preprocess
        image_folder = configs.ROOT / "scenes" / "heldout"
        specs = input_specs(prepared(DETECTOR))
        samples = list(open_data(image_folder, specs, preprocess, 20))
        return DETECTOR, dict(samples[int(rng.integers(len(samples)))])
    make = deep_convnet if name == "deep" else small_convnet
    path = make(tmp_path / "m.onnx", rng)
    size = 20 if name == "deep" else 32
    return path, {"x": rng.normal(size=(1, 3, size, size)).astype(np.float32)}


CASES = ("small", "deep", "detector")


@pytest.mark.parametrize("name", CASES)
def test_the_form_for_onnxruntime_has_the_bits_of_the_engine(
    tmp_path: Path, rng: np.random.Generator, name: str
) -> None:
    path, feeds = case(name, tmp_path, rng)
    graph = prepared(path)
    amax = observed(graph, feeds)
    engine = engine_run(path, amax, feeds, tmp_path / "m.engine")
    proto = ir.to_proto(export_form(graph, amax, PORTABLE))
    session = exact_session(proto.SerializeToString(), ort.SessionOptions())
    for output, array in zip(engine, session.run(list(engine), feeds), strict=True):
        np.testing.assert_array_equal(array, engine[output])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", [*TARGETS, PORTABLE])
def test_every_tensor_is_within_a_step_of_the_engine_from_the_same_operands(
    tmp_path: Path, rng: np.random.Generator, name: str, form: str
) -> None:
    path, feeds = case(name, tmp_path, rng)
    graph = prepared(path)
    amax = observed(graph, feeds)
    segments = {str(node.name): "cpu.0" for node in graph.graph}
    engine = quantize(graph, amax, segments, frozenset()).model
    exported = export_form(graph, amax, form)
    apart = steps_apart(engine, exported, amax, feeds)
    count = len(apart)
    # The forms of TensorRT round in other places, too: one operand of some Adds fewer, or what
    # nodes read that have no INT8. What such nodes make has other operands.
    same = rectified_operands(graph)
    ours, theirs = int8_operands(engine, same), int8_operands(exported, same)
    apart = {name: steps for name, steps in apart.items() if ours[name] == theirs[name]}
    assert len(apart) >= count * (1.0 if form == PORTABLE else 0.6)
    assert max(float(steps.max()) for steps in apart.values()) < 1.001
    differing = sum(int((steps > 0.5).sum()) for steps in apart.values())
    assert differing <= sum(steps.size for steps in apart.values()) / 1000


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "detector")) for name in CASES]
)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_end_to_end_the_forms_of_tensorrt_are_as_near_to_the_engine_as_to_float(
    tmp_path: Path, rng: np.random.Generator, name: str, target: str
) -> None:
    path, feeds = case(name, tmp_path, rng)
    graph = prepared(path)
    amax = observed(graph, feeds)
    engine = engine_run(path, amax, feeds, tmp_path / "m.engine")
    exact = run_onnx(graph, feeds)
    outputs = run_onnx(export_form(graph, amax, target), feeds)
    for output, array in engine.items():
        # Two independent roundings of one signal lie 3 dB further apart than each from it.
        assert sqnr_db(array, outputs[output]) > sqnr_db(exact[output], array) - 4.5, output


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("profile", ["laptop", "agx-orin-64gb", "orin-nano-8gb", "agx-xavier-32gb"])
def test_a_qdq_model_becomes_int8_with_its_own_ranges(
    profile: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    samples = [rng.normal(size=(1, 3, 32, 32)).astype(np.float32) for _ in range(4)]
    by_onnxruntime(path, samples, symmetric=True)
    result = build_engine(path.with_suffix(".qdq.onnx"), profile, tmp_path / "m.engine")
    assert result.manifest.provenance.precision == "int8"
    assert any("ranges of the model's own Q/DQ" in note for note in result.notes)
    exact = run_onnx(onnx.load(path), {"x": samples[0]})["y"]
    with open_session(tmp_path / "m.engine") as session:
        quantized = session.infer({"x": samples[0]})["y"]
    error = np.linalg.norm(quantized - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.1


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("profile", ["laptop", "agx-orin-64gb"])
def test_a_qdq_model_that_int8_cannot_take_says_why(
    profile: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    samples = [rng.uniform(0, 1, (1, 3, 32, 32)).astype(np.float32)]
    by_onnxruntime(path, samples, symmetric=False)
    result = build_engine(path.with_suffix(".qdq.onnx"), profile, tmp_path / "m.engine")
    (note,) = (note for note in result.notes if "Q/DQ" in note)
    assert "do not make the engine INT8" in note
    assert "zero point" in note


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("precision", [None, "best"])
def test_a_qdq_model_saturates_also_where_int8_saves_no_time(
    precision: Literal["best"] | None, tmp_path: Path
) -> None:
    """Trained with ranges that clip: FP16 without its Q/DQ would compute something else."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "dequantize"),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["v"], "weights"),
        helper.make_node("Conv", ["d", "v"], ["y"], "conv"),
    ]
    weights = {
        "scale": np.float32(1.0 / 127),
        "zero": np.int8(0),
        "w": np.full((4, 3, 3, 3), 127, np.int8),
    }
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, weights)
    options = BuildOptions(precision)
    result = build_engine(path, "jetson-nano", tmp_path / "m.engine", options)
    assert result.kept == {}
    assert any("FP16 would not clip" in note for note in result.notes)
    with open_session(tmp_path / "m.engine") as session:
        y = session.infer({"x": np.full((1, 3, 8, 8), 5.0, np.float32)})["y"]
    np.testing.assert_allclose(y, 27.0, rtol=1e-5)


@pytest.mark.parametrize("zero", [-128, -30])
def test_zero_points_become_symmetric_ranges_only_where_int8_is_asked_for(
    tmp_path: Path, zero: int
) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "dequantize"),
        helper.make_node("Conv", ["d", "w"], ["y"], "conv"),
    ]
    weights = {
        "scale": np.float32(0.02),
        "zero": np.int8(zero),
        "w": np.ones((4, 3, 3, 3), np.float32),
    }
    path = save(tmp_path / "m.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 6, 6]}, weights)
    model = ModelBytes("net.tflite", path.read_bytes())
    engine = build_engine(model, "laptop", tmp_path / "e", BuildOptions(precision="int8"))
    growth = (127 - zero) / 127
    words = f"steps up to {growth:.2f} times as large"
    assert any(words in note for note in engine.notes)
    assert make_plan(PlanRequest((PlanMember("net", model),), "agx-orin-64gb"))
    by_default = build_engine(model, "laptop", tmp_path / "e")
    assert by_default.manifest.provenance.precision == "fp32"
    assert any(f"zero point {zero} in INT8" in note for note in by_default.notes)
