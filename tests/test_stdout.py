"""Standard output belongs to the result, whatever native libraries print."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from model_fixtures import small_convnet

from toolkit.partition.solver.milp import Program

# Prints as native code does, past sys.stdout, when a library of this process is imported.
NOISE = """
import os, sys

class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name in ("cv2", "highspy", "numpy", "onnx", "onnxruntime", "triton"):
            os.write(1, f"{name} says hello\\n".encode())

sys.meta_path.insert(0, Noisy())
"""
COMMANDS = {
    "plan": ("plan", "net.onnx", "--profile", "agx-orin-64gb", "--seconds", "1", "--json"),
    "build": ("build", "net.onnx", "--profile", "agx-orin-64gb", "-o", "built.engine", "--json"),
    "calibrate": ("calibrate", "net.onnx", "--data", "samples.npy", "-o", "t.json", "--json"),
    "inspect": ("inspect", "net.onnx", "--json"),
    "infer": ("infer", "net.onnx", "--random", "1", "--json"),
    "compare": ("compare", "net.onnx", "net.onnx", "--json"),
    "doctor": ("doctor", "--json"),
    "profiles": ("profiles", "--json"),
    "explain": ("explain", "--json"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stdout")
    model = small_convnet(made / "net.onnx", np.random.default_rng(0))
    shape = [d.dim_value for d in onnx.load(model).graph.input[0].type.tensor_type.shape.dim]
    np.save(made / "samples.npy", np.random.default_rng(1).random((4, *shape[1:]), np.float32))
    (made / "noise").mkdir()
    (made / "noise" / "sitecustomize.py").write_text(NOISE)
    return made


def start(folder: Path, *words: str, **streams: object) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(folder / "noise"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *words],
        cwd=folder, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )  # fmt: skip


QUICK = ("plan", "build", "infer", "profiles")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in COMMANDS]
)
def test_what_is_printed_with_json_is_json(folder: Path, name: str) -> None:
    done = start(folder, *COMMANDS[name])
    assert json.loads(done.stdout), (done.returncode, done.stderr)
    assert "says hello" in done.stderr or name in ("explain", "profiles")


def test_streams_that_are_closed_or_full_change_no_more_than_they_did(folder: Path) -> None:
    words = COMMANDS["profiles"]
    shell = 'exec "$@" {}'.format
    command = [sys.executable, "-m", "toolkit.cli", *words]
    closed = subprocess.run(
        ["sh", "-c", shell("2>&-"), "sh", *command], cwd=folder, capture_output=True, check=False
    )
    assert (closed.returncode, bool(json.loads(closed.stdout))) == (0, True)
    without = subprocess.run(
        ["sh", "-c", shell(">&-"), "sh", *command], cwd=folder, capture_output=True, check=False
    )
    assert (without.returncode, without.stdout) == (0, b"")
    with open("/dev/full", "w") as full:
        assert start(folder, *words, stdout=full).returncode != 0


def test_the_solver_prints_nothing_into_any_thread_of_a_program(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Run as a library there is no descriptor of the result: HiGHS is silent itself."""

    def solve() -> None:
        program = Program()
        x = program.binary()
        program.at_least(x, 1.0)
        assert program.minimise(x, 1.0).values is not None
        assert program.relaxed(x) is not None

    threads = [threading.Thread(target=solve) for _ in range(4)]
    for thread in threads:
        thread.start()
        os.write(1, b"mine\n")
    for thread in threads:
        thread.join()
    assert capfd.readouterr().out == "mine\n" * 4
