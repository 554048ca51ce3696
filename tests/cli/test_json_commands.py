"""Every command with --json: its standard output is JSON and nothing else.

With -v; those that load libraries in a process of their own, where the libraries print and warn.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
from cli_fixtures import invoke, status_of
from model_fixtures import small_convnet
from wheel_fixtures import agent_wheel

from device.errors import TandemError
from toolkit.cli.main import tandem
from toolkit.fleet.boards.discovery import BoardAddress, ProbeResult, SearchOptions

ROOT = Path(__file__).parents[2]
# When a library of this process is imported, it prints as native code does, past sys.stdout, then a
# banner in Python, and warns.
NOISE = """
import os, sys, warnings

class Noisy:
    def find_spec(self, name, path=None, target=None):
        if name in ("cv2", "highspy", "numpy", "onnx", "onnxruntime", "triton"):
            os.write(1, f"{name} says hello\\n".encode())
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                print(f"welcome to {name}")
                warnings.warn(f"{name} will change", FutureWarning)

            spec.loader.exec_module = exec_module
            return spec

sys.meta_path.insert(0, Noisy())
"""
PROFILE = ("--profile", "laptop")
BUNDLE = ("bundle", "create", "net.engine", "--pipeline", "pipeline.toml", "--labels", "labels.txt")
NOWHERE = ("--broker", "127.0.0.1:1")
MATRIX = """
models = [{ path = "net.onnx" }]
profiles = ["laptop"]
precisions = ["fp32"]
"""
PIPELINE = """
name = "x"
[source]
uri = "pictures"
[preprocess]
width = 32
height = 32
[decode]
kind = "classification"
scores = "y"
"""


@dataclass(frozen=True)
class Row:
    """The words of a command, its exit status and what it prints: a JSON "value", or "nothing":
    its error is a sentence on standard error."""

    words: tuple[str, ...]
    status: int = 0
    prints: str = "value"


def row(*words: str, status: int = 0, prints: str = "value") -> Row:
    return Row(words, status, prints)


def fails(*words: str, status: int = 1, prints: str = "nothing") -> Row:
    return Row(words, status, prints)


ROWS = {
    "profiles": row("profiles"),
    "profiles show": row("profiles", "show", "agx-thor"),
    "plan": row("plan", "net.onnx", "--profile", "agx-orin-64gb", "--seconds", "1"),
    "explain": row("explain"),
    "explore": row("explore", "net.onnx", "--data", "samples.npy", *PROFILE),
    "build": row("build", "net.onnx", *PROFILE, "-o", "again.engine"),
    "build-all": row("build-all", "matrix.toml"),
    "cache info": row("cache", "info"),
    "cache trim": row("cache", "trim", "--to", "1000GiB"),
    "cache push": fails("cache", "push", "127.0.0.1:1/x:1"),
    "cache pull": fails("cache", "pull", "127.0.0.1:1/x:1"),
    "calibrate": row("calibrate", "net.onnx", "--data", "samples.npy", "-o", "t.json"),
    "ranges": row("ranges", "table.json"),
    "inspect": row("inspect", "net.engine"),
    "model guess": row("model", "guess", "net.onnx"),
    "infer": row("infer", "net.onnx", "--random", "1"),
    "compare": row("compare", "net.onnx", "net.onnx"),
    "surgeon extract": row("surgeon", "extract", "net.onnx", "--outputs", "y", "-o", "cut.onnx"),
    "surgeon reduce": fails("surgeon", "reduce", "net.onnx", "--check", "true", "-o", "r.onnx"),
    "surgeon pixels": row("surgeon", "pixels", "net.onnx", "-o", "bytes.onnx"),
    "bench": row("bench", "net.engine", "--iterations", "2"),
    "export": row("export", "board.engine", "-o", "exported"),
    "pipeline check": row("pipeline", "check", "pipeline.toml"),
    "import-triton": fails("import-triton", "pictures", *PROFILE, "-o", "repository"),
    "serve": fails("serve", ".", "--host", "0.0.0.0"),
    "run": row("run", "net.bundle", "--source", "pictures", "--frames", "2"),
    "record": row("record", "net.bundle", "a.mcap", "--source", "pictures", "--frames", "2"),
    "replay": fails("replay", "net.bundle", "missing.mcap"),
    "bundle agent": row("bundle", "agent", "--wheels", "wheels", "-o", "agent.bundle"),
    "bundle create": row(*BUNDLE, "-o", "again.bundle"),
    "bundle diff": row("bundle", "diff", "net.bundle", "net.bundle"),
    "bundle inspect": row("bundle", "inspect", "net.bundle"),
    "bundle verify": row("bundle", "verify", "net.bundle"),
    "bundle pull": fails("bundle", "pull", "127.0.0.1:1/x:1", "-o", "pulled.bundle"),
    "bundle push": fails("bundle", "push", "net.bundle", "127.0.0.1:1/x:1"),
    "deploy": fails("deploy", "net.bundle", "--device", "d", *NOWHERE),
    "flash": fails("flash", "nosuch.bundle", status=2, prints="value"),
    "board find": row("board", "find"),
    "board info": fails("board", "info", "usb://x", status=2, prints="value"),
    "board init": fails("board", "init", "ssh://host", prints="value"),
    "board logs": fails("board", "logs", "dir:///media/usb", status=2, prints="value"),
    "board power-mode": fails("board", "power-mode", "--to", "usb://x", status=2, prints="value"),
    "board provision": fails(
        "board", "provision", "--csv", "no", "--out", "o", status=2, prints="value"
    ),
    "board reboot": fails("board", "reboot", "dir:///media/usb", status=2, prints="value"),
    "fleet init": row("fleet", "init", "fleet2"),
    "fleet audit verify": row("fleet", "audit", "verify"),
    "fleet device clear": fails("fleet", "device", "clear", "d"),
    "fleet device run": fails("fleet", "device", "run", "d", "restart"),
    "fleet farm": fails("fleet", "farm", ".", "-o", "reports"),
    "fleet device show": fails("fleet", "device", "show", "d"),
    "fleet account list": row("fleet", "account", "list"),
    "fleet audit archive": row("fleet", "audit", "archive", "old.jsonl", "--keep", "90"),
    "fleet devices": row("fleet", "devices"),
    "fleet identity expect": row("fleet", "identity", "expect", "new"),
    "fleet identity issue": row("fleet", "identity", "issue", "one", "-o", "issued"),
    "fleet identity list": row("fleet", "identity", "list"),
    "fleet identity revoke": row("fleet", "identity", "revoke", "old"),
    "fleet keys rotate": row("fleet", "keys", "rotate", "targets"),
    "fleet logs": fails("fleet", "logs", "d"),
    "fleet publish": row("fleet", "publish", "net.bundle"),
    "fleet refresh": row("fleet", "refresh"),
    "fleet rollout start": fails("fleet", "rollout", "start", "--bundle", "net.bundle"),
    "fleet query list": row("fleet", "query", "list"),
    "fleet rollout status": row("fleet", "rollout", "status"),
    "fleet statement": row("fleet", "statement", "net.bundle", "--device", "d", "--out", "s"),
    "fleet status": row("fleet", "status"),
    "demo": fails("demo", "--out", "net.onnx", status=2),
    "doctor": row("doctor"),
}


# What loads libraries, and what writes its result past `sys.stdout`. The quick ones load most.
QUICK_PROCESSES = ("plan", "build", "run")
SLOW_PROCESSES = ("infer", "bench", "record", "doctor")


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The commands that have --json."""
    context = click.Context(command)
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, (*path, name))


def test_every_command_with_json_is_in_the_table() -> None:
    assert set(commands(tandem)) == set(ROWS)


def run(folder: Path, *words: str, **streams: object) -> "subprocess.CompletedProcess[str]":
    paths = [str(folder / "noise"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "toolkit.cli", *words],
        cwd=folder, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "always",
             "TANDEM_FLEET": "fleet"},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
    )  # fmt: skip


def look_beside(_: SearchOptions) -> ProbeResult:
    """Double of the searches: a board whose SSH refuses at once, whatever network is here."""
    return ProbeResult("USB network", "127.0.0.2 answers", (BoardAddress("ssh://127.0.0.2:1"),))


def here(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TANDEM_FLEET", "fleet")
        patch.setattr("toolkit.gpu.segments.has_compiler", lambda: False)  # it takes seconds
        patch.setattr("toolkit.fleet.boards.discovery.FINDERS", (look_beside,))
        done = invoke(*words)
    if isinstance(done.exception, TandemError):
        return subprocess.CompletedProcess(
            words, status_of(done), done.stdout, f"{done.stderr}error: {done.exception}"
        )
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    random = np.random.default_rng(0)
    small_convnet(folder / "net.onnx", random)
    np.save(folder / "samples.npy", random.random((4, 3, 32, 32), np.float32))
    (folder / "pipeline.toml").write_text(PIPELINE)
    (folder / "matrix.toml").write_text(MATRIX)
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(10)))
    (folder / "pictures").symlink_to(ROOT / "configs/scenes/heldout")
    (folder / "noise").mkdir()
    agent_wheel(folder / "wheels", "1.2")
    for words in (
        ("build", "net.onnx", *PROFILE, "-o", "net.engine"),
        ("build", "net.onnx", "--profile", "agx-orin-64gb", "--data", "samples.npy",
         "--save-table", "table.json", "-o", "board.engine", "--accept-loss"),
        (*BUNDLE, "-o", "net.bundle"),
        ("fleet", "init", "fleet", "--broker", "127.0.0.1:1"),
        ("fleet", "identity", "issue", "old", "-o", "issued"),
    ):  # fmt: skip
        done = here(folder, *words)
        assert done.returncode == 0, done.stderr
    (folder / "noise" / "sitecustomize.py").write_text(NOISE)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy for each test: what one command writes, no other finds."""
    return shutil.copytree(prepared, tmp_path / "json", symlinks=True)


def constant(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def parsed(text: str) -> object:
    """The one value of a text, strictly: no NaN, nothing before or behind it."""
    return json.loads(text, parse_constant=constant)


@pytest.mark.parametrize("name", ROWS)
def test_standard_output_is_json_whatever_is_said_beside_it(folder: Path, name: str) -> None:
    check_json(folder, name, run if name in QUICK_PROCESSES else here)


@pytest.mark.parametrize("name", SLOW_PROCESSES)
@pytest.mark.slow
def test_standard_output_is_json_whatever_libraries_say(folder: Path, name: str) -> None:
    check_json(folder, name, run)


def check_json(
    folder: Path, name: str, execute: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    expected = ROWS[name]
    done = execute(folder, "-v", *expected.words, "--json")
    assert done.returncode == expected.status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    if expected.prints == "nothing":
        assert done.stdout == ""
        assert "error: " in done.stderr.lower()
        return
    value = parsed(done.stdout)
    if execute is run and name in {*QUICK_PROCESSES, "infer", "bench"}:  # libraries said so
        for text in ("numpy says hello", "welcome to numpy", "FutureWarning: numpy will change"):
            assert text in done.stderr
    if expected.status and isinstance(value, dict):
        assert set(value) == {"error"}


def test_the_agents_commands_print_json_too(folder: Path) -> None:
    command = [sys.executable, "-m", "device.agent", "prepare", "net.engine", "--json"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONWARNINGS": "always"},
    )  # fmt: skip
    assert parsed(done.stdout) == []


WITH_VALUE = [name for name, each in ROWS.items() if each.prints == "value"]


@pytest.mark.parametrize("name", WITH_VALUE)
@pytest.mark.slow
def test_a_reader_that_goes_away_leaves_no_traceback(folder: Path, name: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(folder, *ROWS[name].words, "--json", stdout=writing)
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("name", WITH_VALUE)
@pytest.mark.slow
def test_a_full_disk_behind_standard_output_is_said_in_a_sentence(folder: Path, name: str) -> None:
    with open("/dev/full", "w") as full:
        done = run(folder, *ROWS[name].words, "--json", stdout=full)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode != 0
    assert done.stderr.count("error: standard output cannot be written: No space left") == 1
