"""`--precision fp8` of plain models: scales, what stays in FP16 and why, refusals, exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from cli_fixtures import invoke, output_of
from float8_graphs import quantized
from gpu_graphs import Case, node, normal
from ml_dtypes import float8_e4m3fn
from msgspec.structs import replace
from onnx import numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph

from calibration.table import Adjustments, CalibrationTable, read_table, write_table
from device.engine.file import open_engine
from device.profile import load_profile
from device.runtime.session import open_session
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.errors import BuildError, ImportModelError
from toolkit.graph.node_view import views
from toolkit.graph.passes import run_passes
from toolkit.importers.source import model_sha256
from toolkit.partition.costs.model import CostModel
from toolkit.quantize.float8.graph import with_float8
from toolkit.quantize.float8.model import float8_by_table, quantize_float8
from toolkit.quantize.float8.products import float8_products, round_weight
from toolkit.quantize.float8.table import for_float8
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.qdq.export import FLOAT8_FORM, export_form
from toolkit.quantize.qdq.importer import check_narrow_floats
from toolkit.quantize.ranges.table_file import read_ranges

CHANNELS = 32


@pytest.fixture
def case(rng: np.random.Generator) -> Case:
    """A dense convolution, a depthwise one, a mean, a Gemm and a product of two activations."""
    weights = {
        "w": normal(rng, 48, CHANNELS, 3, 3),
        "b": rng.normal(size=48).astype(np.float32),
        "d": normal(rng, 48, 1, 3, 3),
        "axes": np.array([2, 3], np.int64),
        "g": normal(rng, 24, 48),
        "shape": np.array([2, 24, 1], np.int64),
    }
    nodes = [
        node("Conv", "x w b", "c", pads=[1] * 4),
        node("Relu", "c", "r"),
        node("Conv", "r d", "e", group=48),
        node("ReduceMean", "e axes", "m", keepdims=0),
        node("Gemm", "m g", "f", transB=1),
        node("Reshape", "f shape", "column"),
        node("Transpose", "column", "row", perm=[0, 2, 1]),
        node("MatMul", "column row", "y"),
    ]
    return Case(nodes, {"x": (2, CHANNELS, 9, 9)}, weights)


def graph(case: Case) -> ir.Model:
    return run_passes(ir.from_proto(case.model()))[0]


def observed(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    names = [str(value.name) for n in model.graph for value in (*n.inputs, *n.outputs) if value]
    floats = [n for n in dict.fromkeys(names) if n not in model.graph.initializers]
    return {n: float(np.abs(a).max()) for n, a in ActivationRunner(model, floats)(feeds).items()}


def table_of(amax: dict[str, float], **more: Any) -> CalibrationTable:
    return CalibrationTable(
        method="minmax",
        samples=1,
        data_sha256="0" * 64,
        model_sha256="0" * 64,
        tensors=amax,
        **more,
    )


def real_weight(weight: np.ndarray) -> np.ndarray:
    """By its rows, as ml_dtypes rounds them."""
    scales = np.abs(weight).reshape(len(weight), -1).max(1) / np.float32(448)
    along = scales.reshape(-1, *[1] * (weight.ndim - 1))
    steps = np.clip(weight / along, -448, 448).astype(float8_e4m3fn)
    return np.asarray(steps.astype(np.float32) * along)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FP8 gain time at any product: large ones take long here."""
    monkeypatch.setattr("toolkit.engine.frontend.no_gain_of_float8", lambda *_: {})


def build(case: Case, folder: Path, profile: str = "agx-thor", **options: Any) -> BuildResult:
    onnx.save(case.model(), folder / "m.onnx")
    chosen = BuildOptions(precision="fp8", kernels=False, **options)
    return build_engine(folder / "m.onnx", profile, folder / "e", chosen)


@pytest.mark.usefixtures("fast")
def test_the_engine_computes_what_ml_dtypes_makes_of_operands_by_the_table(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    feeds = case.feeds(rng)
    amax = observed(graph(case), feeds)
    result = build(case, tmp_path, table=table_of(amax))
    assert result.manifest.provenance.precision == "fp16"  # as engines have been written
    assert result.report.startswith("plan for agx-thor, fp8, ")
    assert output_of("inspect", str(tmp_path / "e")).startswith("engine for agx-thor, fp8, ")
    (note,) = [text for text in result.notes if text.startswith("FP8")]
    assert "2 of 2 products" in note
    assert any("measured on another model file" in text for text in result.notes)
    assert "not measured: a table has no samples" in note
    rounded = {**case.weights, **{name: real_weight(case.weights[name]) for name in "wg"}}
    relu = Case(case.nodes[:4], case.inputs, rounded, outputs=("m",))
    m = relu.truth({"x": quantized(feeds["x"], amax["x"] / 448)})["m"]
    f = (quantized(m, amax["m"] / 448).astype(np.float64) @ rounded["g"].T)[..., None]
    with open_session(tmp_path / "e") as session:
        y = session.infer(feeds)["y"]
    expected = f @ f.transpose(0, 2, 1)
    assert np.linalg.norm(y - expected) < 2e-3 * np.linalg.norm(expected)
    plain = case.truth(feeds)["y"]
    assert 1e-3 < np.linalg.norm(y - plain) / np.linalg.norm(plain) < 0.1


def test_scales_are_the_ranges_and_channels_over_448(case: Case, rng: np.random.Generator) -> None:
    model = graph(case)
    amax = observed(model, case.feeds(rng))
    written = float8_by_table(model, amax, {}).model
    constants = {str(n): v.const_value.numpy() for n, v in written.graph.initializers.items()
                 if v.const_value is not None}  # fmt: skip
    assert constants["x_scale"] == np.float32(amax["x"] / 448)
    largest = np.abs(case.weights["w"]).max((1, 2, 3))
    np.testing.assert_array_equal(constants["w_scales"], (largest / 448.0).astype(np.float32))
    assert constants["w_fp8"].dtype == float8_e4m3fn
    assert "w" not in constants
    assert check_narrow_floats(written, None) == 2
    onnx.checker.check_model(ir.to_proto(written), full_check=True)


def test_a_channel_without_weights_has_a_scale_with_a_reciprocal(
    case: Case, rng: np.random.Generator
) -> None:
    case.weights["w"][3] = 0.0  # type: ignore[index]
    (conv, _) = float8_products(graph(case))
    weight = round_weight(conv)
    assert not weight.stored[3].astype(np.float32).any()
    assert np.isfinite(1 / (weight.scales * np.float32(2.0**-80))).all()


def test_a_product_that_loses_too_much_stays_in_fp16_and_is_named(rng: np.random.Generator) -> None:
    """A channel that its weights ignore is a million times as large as the others."""
    weight = normal(rng, 64, 64)
    weight[5] = 0.0
    nodes = [node("MatMul", "x v", "h"), node("MatMul", "z w", "k"), node("Add", "h k", "y")]
    case = Case(nodes, {"x": (8, 64), "z": (8, 64)}, {"v": normal(rng, 64, 64), "w": weight})
    samples = [case.feeds(rng) for _ in range(8)]
    for sample in samples:
        sample["z"] *= 0.02
        sample["z"][:, 5] = 1e4  # FP8 has steps of 0.04 then
    model = graph(case)
    result = quantize_float8(model, samples, ActivationRunner, {})
    assert (result.products, result.candidates) == (1, 2)
    assert list(result.floats) == ["MatMul:k"]
    assert "its results differ by" in result.floats["MatMul:k"]
    assert any(note.startswith("MatMul:k stays FP16: its results differ") for note in result.notes)
    assert result.judgement is not None
    assert result.judgement.basis == "held out"
    assert result.judgement.samples == 2
    assert result.amax["x"] == max(float(np.abs(one["x"]).max()) for one in samples)
    accepted = quantize_float8(model, samples, ActivationRunner, {}, accept_loss=True)
    assert accepted.products == 2
    assert "as accepted: MatMul:k" in accepted.remarks[0]


def test_products_stay_in_fp16_until_outputs_reach_their_targets(
    rng: np.random.Generator,
) -> None:
    """The difference of two nearly equal products is what the output sees of FP8's error."""
    v = normal(rng, 64, 64)
    nodes = [
        node("MatMul", "x v", "h"), node("MatMul", "x w", "k"), node("Sub", "h k", "y"),
        node("MatMul", "x u", "z"),
    ]  # fmt: skip
    weights = {"v": v, "w": v + normal(rng, 64, 64) / 100, "u": normal(rng, 64, 64)}
    case = Case(nodes, {"x": (8, 64)}, weights, outputs=("y", "z"))
    samples = [case.feeds(rng) for _ in range(8)]
    result = quantize_float8(graph(case), samples, ActivationRunner, {})
    assert set(result.floats) == {"MatMul:h", "MatMul:k"}
    assert all("and with it output y: SQNR" in why for why in result.floats.values())
    assert result.judgement is not None
    assert not result.judgement.broken


@pytest.mark.usefixtures("fast")
def test_a_relu_before_fp8_is_computed_by_judges_and_engines(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """An optimizer of onnxruntime drops the Relu, as before a QuantizeLinear to UINT8."""
    nodes = [
        node("MatMul", "x w", "h"), node("Add", "h b", "a"), node("Relu", "a", "r"),
        node("MatMul", "r v", "y"),
    ]  # fmt: skip
    weights = {"w": normal(rng, 64, 64), "v": normal(rng, 64, 64)}
    weights["b"] = rng.normal(size=64).astype(np.float32)
    case = Case(nodes, {"x": (2, 8, 64)}, weights)
    samples = [case.feeds(rng) for _ in range(8)]
    result = quantize_float8(graph(case), samples, ActivationRunner, {})
    assert result.products == 2
    assert result.judgement is not None
    assert min(loss.value for loss in result.judgement.losses) > 20  # dB
    build(case, tmp_path, table=table_of(dict(result.amax)))
    with open_session(tmp_path / "e") as session:
        y = session.infer(samples[0])["y"]
    plain = case.truth(samples[0])["y"]
    assert np.linalg.norm(y - plain) < 0.1 * np.linalg.norm(plain)


def test_products_of_fp8_run_in_float_where_onnxruntime_fuses_them_as_integers(
    case: Case, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """onnxruntime 1.30 then refuses its own MatMulIntegerToFloat as an invalid graph."""
    model = graph(case)
    feeds = case.feeds(rng)
    written = float8_by_table(model, observed(model, feeds), {}).model
    refused = []

    class Session(ort.InferenceSession):  # type: ignore[misc]  # it has no types
        def __init__(self, model: bytes, options: Any, **more: Any) -> None:
            try:
                options.get_session_config_entry("session.disable_quant_qdq")
            except RuntimeError:  # it is not set
                refused.append(model)
                text = "Type 'tensor(float8e4m3fn)' of MatMulIntegerToFloat is invalid"
                raise InvalidGraph(text) from None
            super().__init__(model, options, **more)

    expected = ActivationRunner(written, ["y"])(feeds)["y"]
    monkeypatch.setattr(ort, "InferenceSession", Session)
    actual = ActivationRunner(written, ["y"])(feeds)["y"]
    assert len(refused) == 1
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_result_beyond_fp16_is_no_product_of_fp8(rng: np.random.Generator) -> None:
    case = Case([node("MatMul", "x w", "y")], {"x": (4, 64)}, {"w": normal(rng, 64, 64)})
    result = float8_by_table(graph(case), {"x": 3.0, "y": 1e5}, {})
    assert result.floats == {"MatMul:y": "'y' reaches 1e+05, beyond FP16"}


def test_what_gains_no_time_stays_in_fp16_with_its_times(case: Case, tmp_path: Path) -> None:
    amax = dict.fromkeys(("x", "c", "r", "e", "m", "f", "column", "row", "y"), 4.0)
    result = build(case, tmp_path, table=table_of(amax))
    notes = result.notes
    assert any(text.startswith("FP8 (E4M3): 1 of 2 products") for text in notes)
    (gemm,) = [text for text in notes if text.startswith("Gemm:f stays FP16: FP8 saves")]
    assert "us to convert, FP16" in gemm
    gains = {row.node: row for row in result.gains}
    assert [row.form for row in gains.values()] == ["FP8", "FP8"]
    assert gains["Conv:c"].kept == ""
    assert gains["Conv:c"].int8_us < gains["Conv:c"].half_us
    assert gains["Gemm:f"].kept in gemm
    with open_engine(tmp_path / "e") as engine:
        facts = engine_facts(engine)
    page = engine_page(facts, gains=result.gains)
    forms = {node.row.node: node.computes for node in facts.nodes}
    assert [name for name, form in forms.items() if form == "FP8"] == ["Conv:c"]
    assert "What FP8 gains and loses" in page
    assert "FP8 us" in page


def test_large_products_gain_by_the_cost_model(rng: np.random.Generator) -> None:
    nodes = [node("MatMul", "x v", "h"), node("Relu", "h", "r"), node("MatMul", "r w", "y")]
    weights = {name: normal(rng, 2048, 2048) for name in "vw"}
    model = graph(Case(nodes, {"x": (4096, 2048)}, weights))
    written = with_float8(model, {"x": 4.0, "r": 4.0})

    def costs(one: ir.Model) -> CostModel:
        return CostModel(views(one.graph), load_profile("agx-thor"), precision="fp16")

    half, float8 = costs(model), costs(written)
    for name in ("MatMul:h", "MatMul:y"):
        before, after = half.node(name, "gpu"), float8.node(name, "gpu")
        assert 0.4 < after.time_us / before.time_us < 0.7
        assert after.energy_mj < before.energy_mj
        assert after.read_bytes < 0.6 * before.read_bytes
    free = [str(n.name) for n in written.graph if n.op_type == "DequantizeLinear"]
    assert len(free) == 4
    assert all(float8.node(name, "gpu").time_us == 0.0 for name in free)


@pytest.mark.usefixtures("fast")
def test_a_table_keeps_nodes_and_the_measured_one_gives_the_same_products(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    np.save(tmp_path / "x.npy", rng.normal(size=(8, *case.inputs["x"][1:])).astype(np.float32))
    case = Case(case.nodes, {"x": (1, *case.inputs["x"][1:])}, case.weights | {
        "shape": np.array([1, 24, 1], np.int64)})  # fmt: skip
    options = {"data": tmp_path / "x.npy", "save_table": tmp_path / "t.json"}
    measured = build(case, tmp_path, **options)
    assert any("2 of 2 products" in note and "held out" in note for note in measured.notes)
    size, table = measured.path.stat().st_size, read_ranges(tmp_path / "t.json").table
    assert table.method == "minmax"
    by_table = build(case, tmp_path, table=table)
    assert any("2 of 2 products" in note for note in by_table.notes)
    assert (by_table.path.stat().st_size, by_table.manifest.segments) == (
        size,
        measured.manifest.segments,
    )
    with_float_node = build(case, tmp_path, table=table_of(table.tensors, keep_float=("Gemm:f",)))
    assert "Gemm:f stays FP16: the calibration table keeps it so" in with_float_node.notes


def test_corrections_of_int8_are_left_out_of_fp8() -> None:
    equalised = {"r": (1.0, 2.0)}
    adjusted = Adjustments(equalised=equalised, biases={"n": (0.5,)}, rounded={"n": "abc"})
    table = for_float8(table_of({"x": 1.0}, adjusted=adjusted, format=5))
    assert table.adjusted == Adjustments(equalised=equalised)
    assert for_float8(
        table_of({"x": 1.0}, adjusted=Adjustments(biases={"n": (0.5,)}), format=2)
    ) == (table_of({"x": 1.0}))


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("orin-nx-16gb", "from SM 89 on compute; that of orin-nx-16gb has SM 87"),
        ("laptop", "from SM 89 on compute; laptop has none"),
    ],
)
def test_boards_without_fp8_refuse_it_by_name(
    profile: str, words: str, case: Case, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=words):
        build(case, tmp_path, profile, table=table_of({"x": 1.0}))


@pytest.mark.usefixtures("fast")
def test_refusals_say_what_is_missing(case: Case, tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(BuildError, match="FP8 needs activation ranges"):
        build(case, tmp_path)
    with pytest.raises(BuildError, match="FP8 has no dummy ranges"):
        build(case, tmp_path, dummy_ranges=True)
    with pytest.raises(BuildError, match=r"'m', read by node 'Gemm:f' \(Gemm\), has no range"):
        build(case, tmp_path, table=table_of({"x": 1.0, "c": 1.0}))
    adds = Case([node("Add", "x x", "y")], {"x": (4, 4)}, {})
    with pytest.raises(BuildError, match="FP8 needs a MatMul or Gemm"):
        build(adds, tmp_path, table=table_of({"x": 1.0, "y": 1.0}))
    refused = table_of(observed(graph(case), case.feeds(rng)), refused=("y: 3 dB",), format=4)
    with pytest.raises(BuildError, match="lost too much when it was measured: y: 3 dB"):
        build(case, tmp_path, table=refused)
    old = graph(case)
    old.graph.opset_imports[""] = 17
    with pytest.raises(BuildError, match="opset 17, but Q/DQ of FP8 need 19"):
        float8_by_table(old, {"x": 1.0}, {})


def test_a_model_of_half_precision_is_refused_as_for_int8(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = {"w": normal(rng, 32, 16).astype(np.float16)}
    half = Case([node("MatMul", "x w", "y")], {"x": (4, 32)}, weights).model()
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(half, tmp_path / "m.onnx")
    options = BuildOptions(precision="fp8", table=table_of({"x": 1.0}), kernels=False)
    with pytest.raises(BuildError, match=r"computes in FLOAT16 .* but FP8 is made from float32"):
        build_engine(tmp_path / "m.onnx", "agx-thor", tmp_path / "e", options)


def test_a_model_with_qdq_is_not_quantized_again(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = graph(case)
    amax = observed(model, case.feeds(rng))
    for form, words in (
        ("tensorrt-gpu", "holds Q/DQ of integers, of which no FP8 is made"),
        (FLOAT8_FORM, "holds Q/DQ of FP8, with scales of its own"),
    ):
        ir.save(export_form(model, amax, form), tmp_path / "q.onnx")
        options = BuildOptions(precision="fp8", table=table_of(amax), kernels=False)
        with pytest.raises((BuildError, ImportModelError), match=words):
            build_engine(tmp_path / "q.onnx", "agx-thor", tmp_path / "e", options)


@pytest.mark.usefixtures("fast")
def test_the_exported_model_builds_as_the_plain_one_with_its_table(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    """`tandem ranges --qdq-for tensorrt-fp8`: the Q/DQ that the importer and TensorRT read."""
    onnx.save(case.model(), tmp_path / "m.onnx")
    feeds = case.feeds(rng)
    table = table_of(observed(graph(case), feeds), keep_float=("Gemm:f",))
    write_table(tmp_path / "t.json", table)
    words = ("ranges", str(tmp_path / "t.json"), "--model", str(tmp_path / "m.onnx"))
    out = ("--qdq", str(tmp_path / "q.onnx"), "--qdq-for", "tensorrt-fp8", "--json")
    assert json.loads(output_of(*words, *out))["wrote"] == [str(tmp_path / "q.onnx")]
    proto = onnx.load(tmp_path / "q.onnx")
    types = {numpy_helper.to_array(one).dtype for one in proto.graph.initializer}
    assert np.dtype(float8_e4m3fn) in types
    assert sum(one.op_type == "QuantizeLinear" for one in proto.graph.node) == 1
    results = []
    for file, options in (("m", {"table": table}), ("q", {})):
        chosen = BuildOptions(precision="fp8", kernels=False, **options)  # type: ignore[arg-type]
        build_engine(tmp_path / f"{file}.onnx", "agx-thor", tmp_path / f"{file}.engine", chosen)
        with open_session(tmp_path / f"{file}.engine") as session:
            results.append(session.infer(feeds)["y"])
    np.testing.assert_array_equal(*results)


def test_the_exported_model_has_no_corrections_of_int8(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx.save(case.model(), tmp_path / "m.onnx")
    amax, sha256 = observed(graph(case), case.feeds(rng)), model_sha256(tmp_path / "m.onnx")
    corrected = Adjustments(biases={"Conv:c": (9.0,) * 48})
    plain = replace(table_of(amax), model_sha256=sha256)
    tables = {"plain": plain, "corrected": replace(plain, adjusted=corrected, format=2)}
    for file, table in tables.items():
        write_table(tmp_path / f"{file}.json", table)
        words = ("ranges", str(tmp_path / f"{file}.json"), "--model", str(tmp_path / "m.onnx"))
        out = ("--qdq", str(tmp_path / f"{file}.onnx"), "--qdq-for", FLOAT8_FORM)
        output_of(*words, *out)
    assert (tmp_path / "corrected.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()


def test_the_command_refuses_what_is_about_int8(case: Case, tmp_path: Path) -> None:
    onnx.save(case.model(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.zeros((2, *case.inputs["x"][1:]), np.float32))
    words = ("build", str(tmp_path / "m.onnx"), "--profile", "agx-thor", "--precision", "fp8")
    done = invoke(*words, "--data", str(tmp_path / "x.npy"), "--method", "entropy")
    assert done.exit_code == 2
    assert "--precision fp8 takes the largest magnitudes" in done.output


def test_a_calibration_for_fp8_makes_no_corrections_of_int8(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx.save(case.model(), tmp_path / "m.onnx")
    samples = rng.normal(size=(8, *case.inputs["x"][1:])).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    words = ("calibrate", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "x.npy"),
             "--qdq", str(tmp_path / "q.onnx"), "--qdq-for", FLOAT8_FORM, "--accept-loss",
             "--json")  # fmt: skip
    notes = json.loads(output_of(*words))["notes"]
    assert any("left out for FP8" in note for note in notes)
    adjusted = read_table(tmp_path / "m.calib.json").adjusted
    assert not adjusted or not (adjusted.biases or adjusted.rounded)
    done = invoke(*words, "--bias-correction", "on")
    assert done.exit_code == 2
    assert "--bias-correction on makes up for errors of INT8" in done.output
