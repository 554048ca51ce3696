"""`tandem build-all`: a matrix of builds is the single builds, whatever is shared or goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_fixtures import small_convnet

import configs
from toolkit.cache import entries
from toolkit.cli.actions import build_all
from toolkit.cli.main import tandem as command_line
from toolkit.errors import WorkersError
from toolkit.quantize.ranges import measure
from toolkit.workers import Workers

MATRIX = """
profiles = ["orin-nano-4gb", "orin-nano-8gb"]
precisions = ["fp32", "int8"]
calibration = ["--method", "minmax", "--accept-loss"]

[[models]]
path = "a.onnx"
data = "d.npy"

[[models]]
path = "b.onnx"
data = "d.npy"
"""


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TANDEM_REBUILD")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("toolkit.gpu.segments.has_compiler", lambda: False)
    for name in "ab":
        small_convnet(tmp_path / f"{name}.onnx", rng)
    np.save(tmp_path / "d.npy", rng.normal(size=(8, 3, 32, 32)).astype(np.float32))
    (tmp_path / "matrix.toml").write_text(MATRIX)
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_all, "open_workers", lambda _: Workers(lambda: ThreadPoolExecutor(1)))


def run(folder: Path, *words: str, status: int = 0) -> dict[str, Any]:
    command = ["build-all", str(folder / "matrix.toml"), "--json", *words]
    done = CliRunner().invoke(command_line, command)
    assert done.exit_code == status, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.usefixtures("in_this_process")
def test_engines_are_those_of_single_builds_and_share_calibrations(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = measure.measure_ranges

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr("toolkit.engine.int8_ranges.measure_ranges", counted)
    report = run(folder, "--html", str(folder / "all.html"))
    assert (report["built"], report["cached"], report["failed"]) == (8, 0, 0)
    assert len(calls) == 2  # a graph for both profiles, which have no DLA
    assert "a.orin-nano-4gb.int8.engine" in (folder / "all.html").read_text()
    monkeypatch.setenv("TANDEM_REBUILD", "1")
    for name in ("a.orin-nano-4gb.fp32", "b.orin-nano-8gb.int8"):
        model, profile, precision = name.split(".")
        words = ["build", str(folder / f"{model}.onnx"), "--profile", profile]
        words += ["--precision", precision, "-o", str(folder / "single.engine")]
        if precision == "int8":
            words += ["--data", str(folder / "d.npy"), "--method", "minmax", "--accept-loss"]
        assert CliRunner().invoke(command_line, words).exit_code == 0
        engine = folder / "engines" / f"{name}.engine"
        assert engine.read_bytes() == (folder / "single.engine").read_bytes()


@pytest.mark.usefixtures("in_this_process")
def test_a_second_run_takes_all_from_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(folder)
    (folder / "engines" / "a.orin-nano-4gb.fp32.engine").unlink()
    monkeypatch.setattr(build_all, "build_group", None)  # nothing is left for it
    second = run(folder)
    assert (second["built"], second["cached"]) == (0, 8)
    assert [row["bytes"] for row in second["engines"]] == [row["bytes"] for row in first["engines"]]


@pytest.mark.usefixtures("in_this_process")
def test_builds_that_fail_are_named_and_do_not_stop_the_others(folder: Path) -> None:
    (folder / "b.onnx").write_bytes(b"no model")
    report = run(folder, status=1)
    assert (report["built"], report["failed"]) == (4, 4)
    problems = {row["problem"] for row in report["engines"] if row["how"] == "failed"}
    assert all("b.onnx is not a complete ONNX file" in problem for problem in problems)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no 'models'"),
        (MATRIX.replace('"b.onnx"', '"x/a.onnx"'), "two models called 'a'"),
        (MATRIX.replace("orin-nano-4gb", "x/orin-nano-8gb.toml"), "two profiles called 'orin-"),
        (MATRIX + "\ndat = 1\n", "dat"),
    ],
)
def test_a_matrix_that_cannot_be_meant_is_refused(folder: Path, text: str, problem: str) -> None:
    (folder / "matrix.toml").write_text(text)
    done = CliRunner().invoke(command_line, ["build-all", str(folder / "matrix.toml")])
    assert done.exit_code != 0
    assert problem in str(done.exception)


SMALL = """
profiles = ["mine.toml"]
precisions = ["fp32"]
models = [{path = "a.onnx"}, {path = "b.onnx"}]
"""


@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_crashes_is_named_and_the_other_one_is_built_for_the_profile_beside_the_matrix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "matrix.toml").write_text(SMALL)
    shutil.copy(configs.ROOT / "profiles" / "orin-nano-4gb.toml", folder / "mine.toml")
    real = build_all.build_cached

    def crash(options: Any, *rest: Any) -> Any:
        if options.model.name == "b.onnx":
            raise RecursionError("too deep")
        return real(options, *rest)

    monkeypatch.setattr(build_all, "build_cached", crash)
    report = run(folder, status=1)
    assert [row["how"] for row in report["engines"]] == ["built", "failed"]
    assert report["engines"][1]["problem"] == "RecursionError: too deep"


def test_models_that_end_their_workers_do_not_lose_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(Workers):
        def run(self, *_: Any, **__: Any) -> Any:
            raise WorkersError("a worker ended")

    (folder / "matrix.toml").write_text(SMALL.replace("mine.toml", "laptop"))
    monkeypatch.setattr(build_all, "open_workers", lambda _: Lost(ThreadPoolExecutor))
    report = run(folder, status=1)
    assert {row["problem"] for row in report["engines"]} == {"a worker ended"}


def test_a_killed_run_goes_on_where_it_was(folder: Path) -> None:
    quick = MATRIX.replace('"orin-nano-4gb", "orin-nano-8gb"', '"laptop"')  # nothing to compile
    (folder / "matrix.toml").write_text(quick)
    command = [sys.executable, "-m", "toolkit.cli", "build-all", str(folder / "matrix.toml")]
    command += ["--json", "--workers", "1"]

    def built() -> int:
        return sum(entry.kind == "engines" for entry in entries(folder / "cache"))

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path.cwd()) as process:
        deadline = time.monotonic() + 120
        while not built() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    rows = built()
    assert rows
    done = subprocess.run(command, capture_output=True, check=True)
    report = json.loads(done.stdout)
    assert report["cached"] >= rows
    assert report["built"] + report["cached"] == 4
