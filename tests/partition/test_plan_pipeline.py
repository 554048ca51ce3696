"""A plan of several models becomes a pipeline: its engines are built as it says, and it runs."""

import asyncio
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import cuda_double
import pytest
from cli_fixtures import invoke
from msgspec import UNSET
from plan_pipeline_fixtures import classifier
from tensorrt_fixtures import install

import tandem as library
from calibration.table import write_table
from device.engine.file import open_engine
from device.protocol.messages import ChildMessage, Ready
from device.update.bundle import extract_bundle
from pipelines.config import load_pipeline
from pipelines.decode_config import Classification
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.repository import Repository, scan
from toolkit.errors import PlanError
from toolkit.importers.onnx import import_model
from toolkit.quantize.ranges.measure import dummy_table

PROFILE = "orin-nx-16gb"
SETTINGS = """
name = "shades"
file = "shades.onnx"
labels = "shades.txt"
[preprocess]
width = 64
height = 64
resize = "stretch"
[decode]
kind = "classification"
scores = "logits"
"""


def workload(folder: Path, *rows: str) -> Path:
    path = folder / "workload.toml"
    path.write_text("".join(f"[[model]]\n{row}\n" for row in rows))
    return path


def plan_to_pipeline(file: Path, out: Path) -> dict[str, Any]:
    """Plan for the DLA, write the pipeline and return the plan."""
    done = invoke(
        "plan", "--workload", file, "--profile", PROFILE, "--objective", "gpu-relief",
        "--seconds", 1, "--min-gain", 0, "--pipeline", out, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def test_a_workload_runs_where_its_plan_says(tmp_path: Path) -> None:
    rows = []
    for name, channels, rate_hz in (("slow", 16, 10), ("fast", 32, 30)):
        path = classifier(tmp_path / f"{name}.onnx", channels)
        imported = import_model(path)
        write_table(tmp_path / f"{name}.json", dummy_table(imported.model, imported.sha256))
        rows.append(
            f'path = "{name}.onnx"\nrate_hz = {rate_hz}\ntable = "{name}.json"\n'
            'settings = "shades.toml"'
        )
    (tmp_path / "shades.toml").write_text(SETTINGS)
    (tmp_path / "shades.txt").write_text("dark\nbright\n")
    file, out = workload(tmp_path, *rows), tmp_path / "board.toml"
    planned = plan_to_pipeline(file, out)
    config = load_pipeline(out)
    assert [one.name for one in config.models] == ["fast", "slow"]  # the faster one first
    assert [one.max_hz or None for one in config.models] == [None, 10.0]
    assert [Path(command[2]).stem for command in planned["build"]] == ["fast", "slow"]
    on_dla = 0
    for command in planned["build"]:
        with cuda_double.interpreted_cubins():  # nobody runs them
            assert invoke(*command[1:], "--no-fallback").exit_code == 0
        (plan,) = [one for one in planned["plans"] if one["model"] == Path(command[2]).stem]
        with open_engine(command[-1]) as engine:
            rows_built = {row.node: row.processor[:3] for row in engine.manifest.plan}
        assert rows_built == {row["node"]: row["processor"][:3] for row in plan["nodes"]}
        on_dla += sum(processor == "dla" for processor in rows_built.values())
    assert on_dla > 4
    run = invoke("run", out, "--frames", 4, "--json")
    assert run.exit_code == 0, run.output
    summary = json.loads(run.stdout)
    assert {one.split(":")[0] for one in summary["segments"]} == {"fast", "slow"}
    assert summary["stats"]["stage_p50_ms"]["slow"] > 0


def test_models_of_a_plan_run_as_one_release_on_the_processors_that_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From plan to results: two models on the DLA and one on the GPU, as one bundle.

    The double of TensorRT stands for the board's; GPU segments run as their form for any CPU.
    """
    models = (("lanes", 32, "Relu"), ("marks", 32, "Relu"), ("signs", 8, "Erf"))
    for name, channels, activation in models:
        imported = import_model(classifier(tmp_path / f"{name}.onnx", channels, activation))
        write_table(tmp_path / f"{name}.json", dummy_table(imported.model, imported.sha256))
    (tmp_path / "shades.toml").write_text(SETTINGS)
    (tmp_path / "shades.txt").write_text("dark\nbright\n")
    rows = [
        f'path = "{name}.onnx"\nrate_hz = {rate_hz}\ntable = "{name}.json"\n'
        'settings = "shades.toml"'
        for (name, *_), rate_hz in zip(models, (300, 200, 10), strict=True)
    ]
    file, out = workload(tmp_path, *rows), tmp_path / "board.toml"
    planned = plan_to_pipeline(file, out)
    chosen = {one.name: one.dla_core for one in load_pipeline(out).models}
    assert chosen == {"lanes": 0, "marks": 0, "signs": UNSET}
    cores = {"lanes": 0, "marks": 1}  # one core is enough for both; somebody moves the second
    lanes, marks = out.read_text().split('name = "marks"')
    out.write_text(f'{lanes}name = "marks"{marks.replace("dla_core = 0", "dla_core = 1", 1)}')
    # As on a host without Triton: the double of the driver runs no kernels.
    monkeypatch.setattr("toolkit.engine.build.find_backend", lambda *_, **__: None)
    for command in planned["build"]:
        built = invoke(*command[1:])
        assert built.exit_code == 0, built.output
    done = invoke("bundle", "--pipeline", out, "--portable", "--golden", 1, "-o", tmp_path / "b")
    assert done.exit_code == 0, done.output
    slot = tmp_path / "slot"
    info = extract_bundle(tmp_path / "b", slot)

    version, plans = install("10.3.0", tmp_path, monkeypatch), tmp_path / "plans"
    engines = [str(slot / one.engine) for one in info.runs]
    prepare = [sys.executable, "-m", "device.runtime.prepare", *engines, "--plans", str(plans)]
    prepared = subprocess.run([*prepare, "--json"], capture_output=True, check=False)
    assert prepared.returncode == 0, prepared.stderr
    segments = [row["segment"].partition(".")[0] for row in json.loads(prepared.stdout)]
    assert segments == ["lanes: dla0", "marks: dla0"]
    monkeypatch.setenv("TANDEM_PLANS", str(plans))
    messages: list[ChildMessage] = []
    with cuda_double.installed():
        results = list(library.Pipeline(slot).results(frames=6, on_message=messages.append))
    (ready,) = [one for one in messages if isinstance(one, Ready)]
    on_dla = {text.split(":")[0]: text for text in ready.segments if "(dla" in text}
    assert set(on_dla) == {"lanes", "marks"}
    for name, text in on_dla.items():
        assert f"TensorRT {version}, DLA core {cores[name]}" in text
    assert any(text.startswith("signs: gpu.0 (gpu)") for text in ready.segments)
    assert len(results) == 6
    assert results[0].event.detections[0].label in {"dark", "bright"}
    assert set(results[0].models) == {"marks", "signs"}
    assert set(results[0].event.processors) == {"dla0", "dla1", "cpu"}  # no GPU is here

    async def serve() -> dict[str, set[str]]:
        """Serve the release; all models answer at the same time."""
        models = Repository(partial(scan, tmp_path / "served"), "none")
        await models.load_all()
        assert models.reasons == {}
        networks = [models.find(name) for name in ("lanes", "marks", "signs")]
        requests = [one.sample() for one in networks if isinstance(one, QueuedModel)]
        await asyncio.gather(*(models.find(one.model).infer(one) for one in requests * 4))
        used = {
            one.name: {place for report in one.reports for place in report.runs_on}
            for one in networks
            if isinstance(one, QueuedModel)
        }
        await models.close()
        return used

    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "board").symlink_to(slot)
    with cuda_double.installed():
        used = asyncio.run(serve())
    assert used == {"lanes": {"dla0", "cpu"}, "marks": {"dla1", "cpu"}, "signs": {"cpu"}}


def test_the_commands_are_printed_as_a_shell_reads_them(tmp_path: Path) -> None:
    classifier(tmp_path / "a model.onnx", 8)
    (tmp_path / "shades.toml").write_text(SETTINGS)
    file = workload(tmp_path, 'path = "a model.onnx"\nsettings = "shades.toml"')
    out = tmp_path / "board.toml"
    options = ("--profile", PROFILE, "--precision", "fp16", "--seconds", 1)
    options += ("--objective", "latency")
    done = invoke("plan", "--workload", file, *options, "--pipeline", out)
    assert done.exit_code == 0, done.output
    lines = [shlex.split(line) for line in done.output.splitlines() if "tandem build" in line]
    assert [line[2:4] for line in lines] == [[str(tmp_path / "a model.onnx"), "--profile"]]
    assert lines[0][-4:] == ["--force-gpu", "all", "-o", str(tmp_path / "a_model.engine")]
    assert f"tandem run {out}" in done.output
    again = invoke("plan", "--workload", file, *options, "--pipeline", out)
    assert "is there already" in str(again.exception)


def test_a_model_is_guessed_and_its_labels_are_asked_for(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx", 8)
    out = tmp_path / "p.toml"
    file = workload(tmp_path, 'path = "m.onnx"')
    options = ("--profile", PROFILE, "--precision", "fp16", "--seconds", 1)
    done = invoke("plan", "--workload", file, *options, "--pipeline", out)
    assert done.exit_code == 0, done.output
    assert f"write {tmp_path}/m.labels.txt: the class names of m, one a line" in done.output
    assert load_pipeline(out).first.reading == Classification(scores="logits")


def test_names_that_are_alike_in_a_pipeline_are_refused(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx", 8)
    (tmp_path / "s.toml").write_text(SETTINGS)
    names = (f'path = "m.onnx"\nname = "{name}"\nsettings = "s.toml"' for name in ("a b", "a.b"))
    options = ("--profile", PROFILE, "--precision", "fp16", "--seconds", 1)
    out = tmp_path / "p.toml"
    done = invoke("plan", "--workload", workload(tmp_path, *names), *options, "--pipeline", out)
    assert isinstance(done.exception, PlanError)
    assert "give each a `name` of letters" in str(done.exception)
    assert not out.exists()


def test_a_pipeline_is_of_a_workload(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx", 8)
    done = invoke("plan", tmp_path / "m.onnx", "--profile", PROFILE, "--pipeline", tmp_path / "p")
    assert done.exit_code == 2
    assert "--pipeline is for the models of a --workload" in done.output
