"""Engines whose kernels store BF16: of models in BF16, and by `--precision bf16`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_double
import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from cli_fixtures import invoke, output_of
from golden_fixtures import packed
from gpu_graphs import Case, node, normal
from model_fixtures import small_convnet
from onnx import TensorProto, helper, numpy_helper

from calibration.table import CalibrationTable
from device.engine.arithmetic import FLOAT8_STEP, arithmetic_of, arithmetic_title
from device.engine.file import open_engine
from device.runtime.session import open_session
from toolkit.cli.pages.engine_nodes import read_nodes
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.errors import BuildError
from toolkit.evaluate.infer.onnx_runner import OnnxRunner
from toolkit.fleet.web.pages.release import _read_engine_rows
from toolkit.gpu.beyond_half import beyond_bfloat16
from toolkit.graph.passes import run_passes
from toolkit.graph.widen import widen
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.rounded import HalfModel, judge_bfloat16

BF16 = int(TensorProto.BFLOAT16)
TABLE = CalibrationTable(
    method="minmax", samples=1, data_sha256="0" * 64, model_sha256="0" * 64, tensors={"x": 1.0}
)


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture
def case(rng: np.random.Generator) -> Case:
    """A convolution, which a DLA takes, a mean and a Gemm, of weights that BF16 has."""
    weights = {"w": normal(rng, 24, 8, 3, 3), "g": normal(rng, 12, 24), "b": normal(rng, 24)}
    nodes = [
        node("Conv", "x w b", "c", pads=[1] * 4),
        node("Relu", "c", "r"),
        node("ReduceMean", "r axes", "m", keepdims=0),
        node("Gemm", "m g", "y", transB=1),
    ]
    axes = {"axes": np.array([2, 3], np.int64)}
    return Case(nodes, {"x": (2, 8, 9, 11)}, {n: rounded(w) for n, w in weights.items()} | axes)


def in_bfloat16(model: onnx.ModelProto, *, ports: bool) -> onnx.ModelProto:
    """Type the tensors of a model in BF16; without `ports` between a Cast and another."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    graph = typed.graph
    del graph.value_info[:]
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            narrow = numpy_helper.to_array(tensor).astype(ml_dtypes.bfloat16)
            tensor.CopyFrom(
                helper.make_tensor(tensor.name, BF16, narrow.shape, narrow.tobytes(), raw=True)
            )
    if ports:
        for value in (*graph.input, *graph.output):
            value.type.tensor_type.elem_type = BF16
        return typed
    for one in graph.node:
        one.input[:] = ["x16" if name == "x" else name for name in one.input]
        one.output[:] = ["y16" if name == "y" else name for name in one.output]
    graph.node.insert(0, helper.make_node("Cast", ["x"], ["x16"], name="in", to=BF16))
    graph.node.append(helper.make_node("Cast", ["y16"], ["y"], name="out", to=TensorProto.FLOAT))
    return typed


def build(
    model: onnx.ModelProto, folder: Path, profile: str = "orin-nx-16gb", **options: Any
) -> BuildResult:
    onnx.save(model, folder / "m.onnx")
    chosen = BuildOptions(**{"kernels": False, **options})
    return build_engine(folder / "m.onnx", profile, folder / "e", chosen)


@pytest.mark.parametrize("ports", [True, False])
def test_a_model_in_bf16_is_computed_in_fp32_on_a_cpu(
    ports: bool, case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    result = build(in_bfloat16(case.model(), ports=ports), tmp_path)
    provenance = result.manifest.provenance
    assert (provenance.precision, arithmetic_of(result.manifest)) == ("fp16", "bf16")
    assert {tensor.dtype for tensor in result.manifest.tensors} == {"float32"}
    assert result.report.startswith("plan for orin-nx-16gb, bf16, ")
    for words in ("read as FP32", "kernels store BF16", "loses is not measured", "BF16 is for the"):
        assert words in result.report, words
    feeds = case.feeds(rng)
    with open_session(tmp_path / "e") as session:
        (y,) = session.infer(feeds).values()
    np.testing.assert_allclose(y, case.truth(feeds)["y"], rtol=1e-5, atol=1e-6)
    assert "for orin-nx-16gb, bf16, from m.onnx" in output_of("inspect", tmp_path / "e")


def test_kernels_of_an_engine_store_bf16(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    feeds = case.feeds(rng)
    with cuda_double.interpreted_cubins():
        result = build(case.model(), tmp_path, precision="bf16", kernels=True)
    assert {row.processor for row in result.manifest.segments} == {"gpu"}
    assert "BF16 is for values beyond FP16, but nodes whose values FP16" in result.report
    with cuda_double.installed(), open_session(tmp_path / "e") as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        (y,) = session.infer(feeds).values()
    truth = case.truth({"x": rounded(feeds["x"])})["y"].astype(np.float64)
    error = np.linalg.norm(y - truth) / np.linalg.norm(truth)
    assert 2.0**-12 < error < 2.0**-8  # only what is between kernels is rounded


@pytest.mark.parametrize(
    ("profile", "options", "precision", "words"),
    [
        ("agx-xavier-32gb", {}, "fp32", "FP32, not BF16: GPUs from SM 80 on compute it; that of"),
        ("laptop", {}, "fp32", "GPUs from SM 80 on compute it; laptop has none"),
        ("orin-nx-16gb", {"gpu_backend": "tensorrt"}, "fp32", "the form for TensorRT has none"),
        ("orin-nx-16gb", {"precision": "fp16"}, "fp16", "read as FP32"),
        ("orin-nx-16gb", {"dummy_ranges": True}, "int8", "read as FP32"),
    ],
)  # fmt: skip
def test_what_a_model_in_bf16_becomes_else(
    profile: str, options: dict[str, Any], precision: str, words: str, case: Case, tmp_path: Path
) -> None:
    result = build(in_bfloat16(case.model(), ports=False), tmp_path, profile, **options)
    assert arithmetic_of(result.manifest) == precision
    assert any(words in note for note in result.notes), result.notes


@pytest.mark.parametrize(
    ("profile", "options", "words"),
    [
        ("agx-xavier-32gb", {}, "GPUs from SM 80 on compute it; that of agx-xavier-32gb has SM 72. "
         "Build with --precision fp32, or with fp16"),
        ("laptop", {}, "laptop has none"),
        ("agx-orin-64gb", {"gpu_backend": "auto"}, "of which TensorRT gets none"),
        ("agx-orin-64gb", {"table": TABLE}, "BF16 has no ranges"),
        ("agx-orin-64gb", {"dummy_ranges": True}, "BF16 has no ranges"),
        ("agx-orin-64gb", {"int4_weights": 128}, "not of bf16"),
    ],
)  # fmt: skip
def test_what_bf16_does_not_go_with(
    profile: str, options: dict[str, Any], words: str, case: Case, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=re.escape(words)):
        build(case.model(), tmp_path, profile, precision="bf16", **options)


def test_a_model_with_qdq_is_refused(tmp_path: Path) -> None:
    scales = {"s": np.float32(0.1), "z": np.int8(0)}
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    model = Case(nodes, {"x": (4,)}, scales).model()
    with pytest.raises(BuildError, match="holds Q/DQ, beside which engines have FP16, not BF16"):
        build(model, tmp_path, precision="bf16")


def test_the_loss_is_measured_by_rounding_every_tensor(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = [case.feeds(rng) for _ in range(9)]
    result = build(case.model(), tmp_path, precision="bf16", data=data)
    (note,) = [note for note in result.notes if note.startswith("BF16: ")]
    assert re.fullmatch(r"BF16: output y: SQNR .* dB .* on 8 samples with every .* than .*", note)
    graph = run_passes(import_model(tmp_path / "m.onnx").model)[0]
    judgement = judge_bfloat16(graph, data, frozenset())
    (decibel,) = map(float, re.findall(r"SQNR ([\d.]+)", note))
    assert judgement.losses[0].value == pytest.approx(decibel, abs=0.05)
    assert 45 < decibel < 60  # FP16 has 18 dB more
    y = HalfModel(graph, half=ir.DataType.BFLOAT16)(data[0])["y"]
    assert np.array_equal(y, rounded(y))


def test_a_model_that_loses_too_much_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    """256 and more have steps of 2 and more in BF16."""
    nodes = [node("Add", "x one", "sum"), node("Sub", "sum one", "y")]
    case = Case(nodes, {"x": (2, 16)}, {"one": np.float32([2048.0])})
    data = [case.feeds(rng)]
    with pytest.raises(BuildError, match=r"BF16 loses too much of m\.onnx: output y: .*fp16"):
        build(case.model(), tmp_path, precision="bf16", data=data)
    result = build(case.model(), tmp_path, precision="bf16", data=data, accept_loss=True)
    assert any(note.startswith("BF16: output y: ") for note in result.notes)
    with pytest.raises(BuildError, match="the data hold none"):
        judge_bfloat16(ir.from_proto(case.model()), [], frozenset())


def test_fp16_engines_say_that_bf16_holds_what_fp16_does_not(case: Case, tmp_path: Path) -> None:
    large = replace(case, weights={**case.weights, "b": np.full(24, 1e5, np.float32)})
    advice = "`tandem build --precision bf16` stores all in BF16, of 8 significant bits"

    def notes(**options: Any) -> str:
        return " ".join(build(large.model(), tmp_path, **options).notes)

    assert advice in notes(precision="fp16")
    assert advice not in notes(precision="fp16", profile="agx-xavier-32gb")
    assert "FP16" not in notes(precision="bf16")


def test_options_of_the_command(case: Case, tmp_path: Path, rng: np.random.Generator) -> None:
    onnx.save(case.model(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rng.normal(size=(4, 8, 9, 11)).astype(np.float32))
    words = ("build", tmp_path / "m.onnx", "--profile", "agx-orin-64gb", "--precision", "bf16")
    for more, refusal in (
        (("--table", tmp_path / "x.npy"), "--precision bf16 has no use for it"),
        (("--data", tmp_path / "x.npy", "--keep", "none"), "--precision bf16 has none"),
        (("--data", tmp_path / "x.npy", "--save-table", tmp_path / "t.json"), "bf16 has none"),
    ):
        done = invoke(*words, *more)
        assert done.exit_code, more
        assert refusal in f"{done.output} {done.exception}", more


def test_all_that_names_the_precision_of_an_engine_says_bf16(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    model = small_convnet(folder / "m.onnx", rng)
    options = BuildOptions(precision="bf16", kernels=False)
    engine = build_engine(model, "orin-nx-16gb", folder / "e", options).path
    report = json.loads(output_of("compare", model, engine, "--random", "1", "--json"))
    assert report["precisions"] == ["fp32", "bf16"]
    np.save(folder / "x.npy", rng.random((1, 3, 32, 32), np.float32))
    words = ("compare", engine, "--model", model, "--data", folder / "x.npy", "--json")
    beside = json.loads(output_of(*words))
    assert (beside["precision"], beside["graph"]) == ("bf16", "GPU BF16")
    times = output_of("bench", engine, "--iterations", "1", "--warmup", "0", "--json")
    assert json.loads(times)["precision"] == "bf16"
    bundle = packed(folder, engine, "b.bundle")
    (view,) = json.loads(output_of("bundle", "inspect", bundle, "--json"))["engines"]
    assert view["precision"] == "bf16"
    assert '"tandem:precision", "value": "bf16"' in " ".join(
        output_of("bundle", "sbom", bundle).split()
    )
    assert [row.precision for row in _read_engine_rows(bundle)] == ["bf16"]


def test_a_plan_in_bf16_is_that_of_the_build(case: Case, tmp_path: Path) -> None:
    built = build(case.model(), tmp_path, precision="bf16").plan
    words = ("plan", tmp_path / "m.onnx", "--profile")
    text = output_of(*words, "orin-nx-16gb", "--precision", "bf16", "--json")
    (plan,) = json.loads(text)["plans"]
    assert (plan["precision"], built.arithmetic) == ("bf16", "bf16")
    assert [row["processor"] for row in plan["segments"]] == ["gpu"]
    assert [segment.processor for segment in built.segments] == ["gpu"]
    assert [row["predicted_us"] for row in plan["segments"]] == [
        pytest.approx(cost.predicted_us) for cost in built.costs
    ]
    options = ("--profile", "orin-nx-16gb", "--precision", "bf16")
    inspected = json.loads(output_of("inspect", tmp_path / "m.onnx", *options, "--json"))["plan"]
    assert inspected["precision"] == "bf16"
    assert [row["predicted_us"] for row in inspected["segments"]] == [
        row["predicted_us"] for row in plan["segments"]
    ]
    assert "for orin-nx-16gb, bf16 (" in output_of("inspect", tmp_path / "m.onnx", *options)
    title = output_of(*words, "orin-nx-16gb", "--precision", "bf16").splitlines()[0]
    assert title.startswith("plan for orin-nx-16gb, bf16, ")
    for more, refusal in (
        (("agx-xavier-32gb",), "BF16 is not supported: GPUs from SM 80 on compute it; that of "
         "agx-xavier-32gb has SM 72. Build with --precision fp32, or with fp16"),
        (("orin-nx-16gb", "--explain", "c"), "BF16 runs nothing on the DLA"),
        (("orin-nx-16gb", "--table", tmp_path / "t.json"), "--precision bf16 has no use for it"),
    ):  # fmt: skip
        done = invoke(*words, *more, "--precision", "bf16")
        assert done.exit_code, more
        assert refusal in f"{done.output} {done.exception}", more


def test_counts_stay_in_fp32(tmp_path: Path) -> None:
    """Above 256 BF16 has no odd numbers. What rearranges counts has them in FP32, too."""
    nodes = [
        node("CumSum", "x axis", "sums"),
        node("Transpose", "sums", "turned", perm=[1, 0]),
        node("Relu", "turned", "y"),
    ]
    model = Case(nodes, {"x": (1, 512)}, {"axis": np.array(1, np.int64)}).model()
    assert (
        "CumSum:sums (CumSum, BF16 has no odd numbers above 256)"
        in build(model, tmp_path, precision="bf16").report
    )
    graph = run_passes(import_model(tmp_path / "m.onnx").model)[0]
    assert beyond_bfloat16(graph).keys() == {"sums", "turned"}


def test_folded_constants_are_not_rounded_where_only_element_wise_operators_read_them(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """A Range that is folded, and a table of sines of it; weights of products are rounded."""
    nodes = [
        node("Range", "zero end one", "places"),
        node("Mul", "places step", "angles"),
        node("Sin", "angles", "sines"),
        node("Mul", "x sines", "turned"),
        node("Add", "turned places", "moved"),
        node("Add", "w w", "doubled"),
        node("Mul", "doubled third", "weight"),
        node("MatMul", "moved weight", "y"),
    ]
    scalars = {"zero": 0, "end": 512, "one": 1, "third": rounded(np.float32(1 / 3))}
    weights = {name: np.array(value, np.float32) for name, value in scalars.items()}
    weights |= {"step": rounded(np.array([0.01], np.float32)), "w": normal(rng, 512, 16)}
    case = Case(nodes, {"x": (4, 512)}, weights)
    onnx.save(in_bfloat16(case.model(), ports=True), tmp_path / "m.onnx")
    imported = import_model(tmp_path / "m.onnx")
    graph = run_passes(imported.model)[0]
    reasons = {
        node.op_type: [str(value.name) for value in node.inputs if value and value.const_value]
        for node in graph.graph
    }
    rows = beyond_bfloat16(graph, from_bfloat16=imported.bfloat16)
    wide = {name: row.reason for name, row in rows.items()}
    assert [wide[name] for name in reasons["Mul"]] == ["folded in FP32"]
    assert [wide[name] for name in reasons["Add"]] == ["BF16 has no odd numbers above 256"]
    assert not wide.keys() & set(reasons["MatMul"])
    assert list(beyond_bfloat16(graph)) == reasons["Add"]
    assert "(folded in FP32)" in build(onnx.load(tmp_path / "m.onnx"), tmp_path).report


def test_kernels_count_beyond_256(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    nodes = [node("CumSum", "x axis", "sums"), node("MatMul", "sums last", "y")]
    last = np.eye(272, 16, -256, dtype=np.float32)
    weights = {"axis": np.array(1, np.int64), "last": last}
    with cuda_double.interpreted_cubins():
        build(Case(nodes, {"x": (1, 272)}, weights).model(), tmp_path,
              precision="bf16", kernels=True)  # fmt: skip
    with cuda_double.installed(), open_session(tmp_path / "e") as session:
        (y,) = session.infer({"x": np.ones((1, 272), np.float32)}).values()
    assert np.array_equal(y[0], np.arange(257, 273, dtype=np.float32))


def test_kernels_read_folded_counts_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    nodes = [node("Range", "zero end one", "places"), node("Add", "x places", "y")]
    scalars = {"zero": np.float32(0), "end": np.float32(512), "one": np.float32(1)}
    with cuda_double.interpreted_cubins():
        build(Case(nodes, {"x": (1, 512)}, scalars).model(), tmp_path,
              precision="bf16", kernels=True)  # fmt: skip
    with cuda_double.installed(), open_session(tmp_path / "e") as session:
        (y,) = session.infer({"x": np.zeros((1, 512), np.float32)}).values()
    assert np.array_equal(y[0], np.arange(512, dtype=np.float32))


def test_an_export_of_bf16_is_refused_with_what_to_do(case: Case, tmp_path: Path) -> None:
    build(case.model(), tmp_path, "agx-orin-64gb", precision="bf16")
    done = invoke("export", tmp_path / "e", "--to", "trtexec", "-o", tmp_path / "out")
    text = f"{done.output} {done.exception}"
    assert "computes in BF16, of which no files for TensorRT are written" in text
    assert "export an engine of `tandem build --precision fp32`" in text
    assert done.exit_code
    assert not (tmp_path / "out").exists()
    shown = output_of("export", tmp_path / "e", "--to", "triton", "-o", tmp_path / "repository")
    assert "no scripts for TensorRT" in shown
    assert "computes in BF16" in shown


def test_nodes_of_kernels_are_named_bf16(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with cuda_double.interpreted_cubins():
        built = build(case.model(), tmp_path, precision="bf16", kernels=True)
    with open_engine(built.path) as engine:
        nodes = read_nodes(engine)
    assert {(node.precision, node.computes) for node in nodes} == {("fp16", "BF16")}


def test_an_engine_of_two_narrow_types_is_called_by_both(case: Case, tmp_path: Path) -> None:
    manifest = build(case.model(), tmp_path, precision="bf16").manifest
    provenance = msgspec.structs.replace(
        manifest.provenance, passes=(FLOAT8_STEP, *manifest.provenance.passes)
    )
    both = msgspec.structs.replace(manifest, provenance=provenance)
    assert (arithmetic_of(both), arithmetic_title(both)) == ("bf16+fp8", "BF16+FP8")


def test_other_commands_read_models_in_bf16(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    build(in_bfloat16(case.model(), ports=True), tmp_path)
    np.savez(tmp_path / "x.npz", **case.feeds(rng))
    data = ("--data", tmp_path / "x.npz")
    assert "A and B agree" in output_of("compare", tmp_path / "m.onnx", tmp_path / "e", *data)


def test_the_import_says_that_casts_to_bf16_round_no_more(
    case: Case, tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], name="narrow", to=BF16),
        helper.make_node("Cast", ["b"], ["f"], name="wide", to=TensorProto.FLOAT),
        node("Relu", "f", "y"),
    ]
    x = np.abs(normal(rng, 4))
    onnx.save(Case(nodes, {"x": (4,)}, {}).model(), tmp_path / "m.onnx")
    imported = import_model(tmp_path / "m.onnx")
    assert [node.op_type for node in imported.model.graph] == ["Relu"]
    (y,) = OnnxRunner(imported.model, "m").run({"x": x}).values()
    assert np.array_equal(y, x)
    assert not np.array_equal(y, rounded(x))
    (note,) = imported.notes
    assert note.endswith("read as FP32, which holds their numbers; Casts to BF16 do not round: 1")
    onnx.save(in_bfloat16(case.model(), ports=True), tmp_path / "m.onnx")
    (note,) = import_model(tmp_path / "m.onnx").notes
    assert note.endswith("which holds their numbers")


def test_constants_attributes_and_branches_become_fp32() -> None:
    def constant(name: str, value: float) -> onnx.NodeProto:
        array = np.array([value], ml_dtypes.bfloat16)
        tensor = helper.make_tensor(name, BF16, [1], array.tobytes(), raw=True)
        return helper.make_node("Constant", [], [name], name=f"make {name}", value=tensor)

    branch = helper.make_graph(
        [constant("k", 1.5)], "branch", [], [helper.make_tensor_value_info("k", BF16, [1])]
    )
    else_branch = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["j"], name="cast", to=BF16)],
        "other", [], [helper.make_tensor_value_info("j", BF16, [1])],
    )  # fmt: skip
    nodes = [
        helper.make_node(
            "If", ["c"], ["i"], name="if", then_branch=branch, else_branch=else_branch
        ),
        constant("z", 0.25),
        helper.make_node("Add", ["i", "z"], ["y"], name="add"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
              helper.make_tensor_value_info("c", TensorProto.BOOL, [])]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", BF16, [1])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]))
    assert widen(model, ir.DataType.BFLOAT16)
    assert not widen(model, ir.DataType.BFLOAT16)
    proto = ir.to_proto(model)
    assert "data_type: 16" not in str(proto)
    assert "elem_type: 16" not in str(proto)
    onnx.checker.check_model(proto, full_check=True)


def test_a_state_that_a_loop_only_passes_on_becomes_fp32() -> None:
    one, dim = helper.make_tensor_value_info, [2]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"])], "body",
        [one("i", TensorProto.INT64, []), one("go", TensorProto.BOOL, []), one("s", BF16, dim)],
        [one("on", TensorProto.BOOL, []), one("s", BF16, dim)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    count = helper.make_tensor("n", TensorProto.INT64, [], [3])
    graph = helper.make_graph([loop], "g", [one("x", BF16, dim)], [one("y", BF16, dim)], [count])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert widen(model, ir.DataType.BFLOAT16)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    assert "BFLOAT16" not in onnx.printer.to_text(proto).upper()
