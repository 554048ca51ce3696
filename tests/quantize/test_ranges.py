"""From data to a table: what is measured, what is chosen, what is refused."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cli_fixtures import invoke, output_of, status_of
from click.testing import CliRunner
from model_fixtures import classification_of_convnet, small_convnet

import configs
from calibration import threshold
from calibration.budget import parse_budget
from calibration.errors import CalibrationError
from calibration.observer import Histogram
from calibration.table import read_table
from calibration.trt_cache import amax_of, decode_cache
from device.engine.file import open_engine
from device.engine.manifest import UNCALIBRATED
from toolkit.cli.main import tandem as command_line
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, measure_ranges
from toolkit.quantize.ranges.report_html import ranges_html
from toolkit.quantize.ranges.report_text import ranges_builtins, ranges_text
from toolkit.quantize.trials.fit import AUTO_METHODS


def samples(rng: np.random.Generator, count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.normal(size=(1, 3, 32, 32)).astype(np.float32)} for _ in range(count)]


def measure(path: Path, data: list[dict[str, np.ndarray]], options: RangeOptions) -> Ranges:
    imported = import_model(path)
    graph, _ = run_passes(imported.model)
    return measure_ranges(graph, data, imported.sha256, options, lambda step, share: None)


def test_one_method_takes_all_samples(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    data = samples(rng, 9)
    result = measure(path, data, RangeOptions("minmax"))
    assert result.samples == 9
    assert (result.judgement.basis, result.judgement.samples) == ("held out", 4)
    assert result.table.tensors["x"] == pytest.approx(max(np.abs(s["x"]).max() for s in data))
    assert result.sqnr_db["y"] > 15


def test_one_method_makes_one_runner_and_no_range_that_nothing_is_judged_with(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are those of all samples, and for the judgement of all but the held-out ones."""
    runners, fitted = [], []

    class Runner(ActivationRunner):
        def __init__(self, *arguments: Any) -> None:
            runners.append(self)
            super().__init__(*arguments)

    def amax_by_method(histograms: Mapping[str, Histogram], methods: Sequence[str]) -> Any:
        if tuple(methods) == ("entropy",):
            fitted.append(histograms["x"].elements)
        return threshold.amax_by_method(histograms, methods)

    monkeypatch.setattr("toolkit.quantize.observe.ActivationRunner", Runner)
    monkeypatch.setattr("toolkit.quantize.trials.fit.amax_by_method", amax_by_method)
    data = samples(rng, 16)
    measure(small_convnet(tmp_path / "m.onnx", rng), data, RangeOptions("entropy"))
    assert len(runners) == 1
    assert fitted == [16 * data[0]["x"].size, 8 * data[0]["x"].size]


def test_auto_judges_on_samples_that_its_ranges_did_not_see(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    gains_db = []
    for _ in range(3):
        path = small_convnet(tmp_path / "m.onnx", rng)
        data = samples(rng, 24)
        data[3]["x"][0, 0, 0, 0] = 300.0  # what min-max falls for
        result = measure(path, data, RangeOptions("auto"))
        assert result.judgement.basis == "held out"
        assert result.samples == 24  # those that judged the choice join the ranges
        assert result.auto is not None
        if set(result.auto.gain_db) == {"minmax"}:
            # Rare: no sample has a certain class, or the choice spent more of a limit than min-max.
            assert set(result.table.methods.values()) == {"minmax"}
            continue
        assert set(result.auto.gain_db) == set(AUTO_METHODS)
        assert result.auto.gain_db[result.auto.start] >= 0
        gains_db.append(result.auto.gain_db["minmax"])
        assert set(result.table.methods.values()) <= set(AUTO_METHODS)
    assert max(gains_db, default=0.0) > 0  # 1 to 13 dB; one network in forty has none


@pytest.mark.usefixtures("without_kernels")
def test_a_budget_keeps_what_int8_ruins_in_float_and_off_the_dla(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    data = samples(rng, 16)
    plain = measure(path, data, RangeOptions("minmax"))
    budget = parse_budget(f"sqnr:{plain.sqnr_db['y'] + 8:.2f}")
    actual = measure(path, data, RangeOptions("minmax", budget=budget))
    assert actual.budget is not None
    assert actual.table.keep_float
    # Other samples judge than those that spend the budget, and differ by a few dB.
    assert actual.sqnr_db["y"] > plain.sqnr_db["y"] + 3
    out = tmp_path / "m.engine"
    result = build_engine(path, "agx-orin-64gb", out, BuildOptions(table=actual.table))
    float_rows = [row for row in result.manifest.plan if row.node in actual.table.keep_float]
    assert float_rows
    assert all(row.processor == "gpu" and row.rule == "K1" for row in float_rows)


def test_reports_hold_every_tensor_and_the_reason(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    result = measure(path, samples(rng, 12), RangeOptions("auto"))
    text = ranges_text(result)
    assert "output y:" in text
    assert result.auto is not None
    assert all(f" dB over {name}" in text for name in result.auto.gain_db)
    assert json.loads(json.dumps(ranges_builtins(result)))["tensors"].keys() == (
        result.histograms.keys()
    )
    page = ranges_html(result, "m.onnx")
    assert page.count("<svg") == len(result.histograms)


def test_an_unknown_metric_is_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    with pytest.raises(
        CalibrationError, match="no metric 'beauty' for a budget: take one of cosine, "
    ):
        measure(path, samples(rng, 8), RangeOptions(budget=parse_budget("beauty:-1")))


def test_nan_activations_name_the_tensor_and_the_sample(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    data = samples(rng, 3)
    data[1]["x"][0, 0, 0, 0] = np.nan
    with pytest.raises(CalibrationError, match="sample 1"):
        measure(path, data, RangeOptions())


@pytest.fixture
def data_folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for index, sample in enumerate(samples(rng, 8)):
        np.save(folder / f"{index}.npy", sample["x"])
    return folder


def test_the_command_writes_every_form(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    table, cache = tmp_path / "m.json", tmp_path / "m.cache"
    qdq, page = tmp_path / "m.qdq.onnx", tmp_path / "m.html"
    printed = output_of(
        "calibrate", model, "--data", data_folder, "-o", table,
        "--cache", cache, "--qdq", qdq, "--html", page, "--json",
    )  # fmt: skip
    read = read_table(table)
    assert json.loads(printed)["tensors"]["x"]["amax"] == read.tensors["x"]
    assert cache.read_text().startswith("TRT-100300-EntropyCalibration2\n")
    assert amax_of(decode_cache(cache.read_text(), str(cache))) == pytest.approx(
        read.tensors, rel=1e-6
    )
    x = rng.normal(size=(1, 3, 32, 32)).astype(np.float32)
    session = ort.InferenceSession(str(qdq), providers=["CPUExecutionProvider"])
    plain = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (ours,), (exact,) = session.run(None, {"x": x}), plain.run(None, {"x": x})
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.1
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(qdq).graph.node)
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("method", ["percentile:99.9", "mse", "auto"])
def test_methods_are_named_on_the_command_line(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path, method: str
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    output_of("calibrate", model, "--data", data_folder, "--method", method)
    assert read_table(tmp_path / "m.calib.json").method == method


@pytest.mark.parametrize("method", ["magic", "minmax:3", "percentile:200"])
def test_an_unknown_method_is_a_usage_error(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path, method: str
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    done = invoke("calibrate", model, "--data", data_folder, "--method", method)
    assert status_of(done) == 2
    assert not (tmp_path / "m.calib.json").exists()


def test_a_killed_calibration_resumes_with_the_same_result(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng, channels=48)
    data = tmp_path / "many"
    data.mkdir()
    np.save(data / "all.npy", rng.normal(size=(600, 3, 32, 32)).astype(np.float32))
    state, table = tmp_path / "state", tmp_path / "resumed.json"
    command = [sys.executable, "-m", "toolkit.cli", "calibrate", str(model), "--data", str(data)]
    resumed = [*command, "--resume", str(state), "-o", str(table)]
    killed = subprocess.Popen(resumed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert state.exists()
    assert not table.exists()
    straight = tmp_path / "straight.json"
    for words in (resumed, [*command, "-o", str(straight)]):
        done = CliRunner().invoke(command_line, words[3:])
        assert done.exit_code == 0, done.output
    assert table.read_bytes() == straight.read_bytes()


def test_dummy_ranges_are_said_loudly(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    assert UNCALIBRATED in output_of("build", model, "--dummy-ranges", "--precision", "int8")
    assert UNCALIBRATED in output_of("inspect", tmp_path / "m.engine")
    with open_engine(tmp_path / "m.engine") as engine:
        assert engine.manifest.uncalibrated
    pipeline = classification_of_convnet(tmp_path)
    parts = ("--pipeline", pipeline, "--labels", tmp_path / "labels.txt")
    bundled = invoke("bundle", tmp_path / "m.engine", *parts, "-o", tmp_path / "m.bundle")
    assert bundled.exit_code == 0, bundled.output
    assert UNCALIBRATED in bundled.stderr
    ran = invoke("run", tmp_path / "m.engine", *parts)  # there is no video: it ends there
    assert UNCALIBRATED.split(":")[0] in ran.stderr


@pytest.mark.usefixtures("without_kernels")
def test_ranges_that_the_dla_ties_together_are_equal_in_the_engine(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    options = BuildOptions(
        data=[{"images": rng.uniform(size=(1, 3, 320, 320)).astype(np.float32)}],
        ranges=RangeOptions("minmax"),
    )
    model = configs.ROOT / "models" / "robot-objects.onnx"
    result = build_engine(model, "agx-orin-64gb", tmp_path / "m.engine", options)
    assert any("share a scale because of DLA rules" in note for note in result.notes)
    assert result.calibration is not None
    amax = result.calibration.table.tensors
    with open_engine(result.path) as engine:
        (dla,) = [s for s in engine.manifest.segments if s.processor == "dla0"]
        proto = onnx.load_model_from_string(engine.entry(dla.implementations[-1].model).tobytes())
    scales = {t.name: float(onnx.numpy_helper.to_array(t)) for t in proto.graph.initializer
              if t.name.endswith("_scale") and not t.dims}  # fmt: skip
    adds = [node for node in import_model(model).model.graph if node.op_type == "Add"]
    assert adds
    for node in adds:
        names = [str(value.name) for value in node.inputs if value is not None]
        results = {scales[f"{name}_scale"] for name in names}
        assert len(results) == 1
        assert results.pop() == pytest.approx(max(amax[name] for name in names) / 127, rel=1e-6)


def test_nodes_named_by_the_user_stay_in_floating_point(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = small_convnet(tmp_path / "m.onnx", rng)
    graph, _ = run_passes(import_model(path).model)
    # The last layer: behind it no rounding can hide what the float node changes.
    name = next(str(node.name) for node in graph.graph if node.op_type == "Gemm")
    data = samples(rng, 8)
    plain = measure(path, data, RangeOptions("minmax"))
    float_nodes = measure(path, data, RangeOptions("minmax", keep_float=frozenset({name})))
    assert float_nodes.table.keep_float == (name,)
    assert float_nodes.sqnr_db["y"] != plain.sqnr_db["y"]
    with pytest.raises(CalibrationError, match=f"did you mean '{name}'"):
        measure(path, data, RangeOptions(keep_float=frozenset({name + "x"})))


@pytest.mark.usefixtures("without_kernels")
def test_ranges_for_a_profile_cover_what_its_rewrites_make(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    on_dla = {}
    for name, flags in (("plain", ()), ("rewritten", ("--profile", "agx-orin-64gb"))):
        table = tmp_path / f"{name}.json"
        words = ["calibrate", str(model), "--data", str(data_folder), "-o", str(table), *flags]
        done = CliRunner().invoke(command_line, [*words, "--method", "minmax"])
        assert done.exit_code == 0, done.output
        options = BuildOptions(table=read_table(table), plan=PlanOptions(objective="gpu-relief"))
        result = build_engine(model, "agx-orin-64gb", tmp_path / f"{name}.engine", options)
        rows = result.manifest.plan
        on_dla[name] = sum(row.processor == "dla0" for row in rows)
        assert not [row for row in rows if row.rule == "S1"]
    assert on_dla["rewritten"] >= on_dla["plain"]


def test_ranges_of_a_rewritten_graph_go_elsewhere_only_with_the_graph(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path
) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    arguments = ("calibrate", model, "--data", data_folder, "--profile", "agx-orin-64gb")
    arguments = (*arguments, "--method", "minmax")
    done = invoke(*arguments, "--cache", tmp_path / "m.cache")
    assert status_of(done) == 2
    assert "--adjusted-model" in done.stderr
    assert not (tmp_path / "m.cache").exists()


def test_a_quantized_model_is_not_calibrated_again(
    tmp_path: Path, rng: np.random.Generator, data_folder: Path
) -> None:
    model, qdq = small_convnet(tmp_path / "m.onnx", rng), tmp_path / "m.qdq.onnx"
    quick = ("--method", "minmax")
    output_of("calibrate", model, "--data", data_folder, *quick, "--qdq", qdq)
    done = invoke("calibrate", qdq, "--data", data_folder)
    assert status_of(done) == 1
    assert "quantized already" in str(done.exception)
