"""The benchmark of calibration runs both sides on the same arrays, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from scripts.bench_calibration import measure_commands, measure_process


def test_commands_are_measured_from_start_to_end(tmp_path: Path, rng: np.random.Generator) -> None:
    model = small_convnet(tmp_path / "m.onnx", rng)
    rows = measure_commands(model, ["minmax"], 8)
    assert [row["who"] for row in rows] == ["onnxruntime", "tandem calibrate"]
    for row in rows:
        assert (row["method"], row["images"]) == ("minmax", 8)
        assert row["cpu_s"] > 0.1  # imports alone take longer
        assert row["peak_mb"] > 30


def test_processor_time_and_memory_of_children_count() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], check=True)"
    work = "import time; held = b'x' * (150 << 20); end = time.process_time() + 0.3\n"
    work += "while time.process_time() < end: pass"
    measured = measure_process(["-c", code.format(work)])
    assert measured["cpu_s"] >= 0.3
    assert measured["peak_mb"] > 100
    with pytest.raises(SystemExit, match="ended with status 3"):
        measure_process(["-c", "raise SystemExit(3)"])


def test_commands_are_measured_with_their_bytecode_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "module_of_a_command.py").write_text("")
    measure_process(["-c", "import module_of_a_command as m; open(m.__cached__)"])


def test_the_help_names_the_options() -> None:
    command = [sys.executable, "-m", "scripts.bench_calibration", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--peer-images" in done.stdout
