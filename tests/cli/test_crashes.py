"""A command whose native code crashes, or which is killed, says so in a sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.cli.crashes import GUARDED, crash_text
from toolkit.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PLUGIN = """
import os, pathlib, signal, time

pathlib.Path("started").write_text(str(os.getpid()))
if {number}:
    os.kill(os.getpid(), {number})
try:
    time.sleep(60)
except BaseException as end:
    pathlib.Path("ended").write_text(type(end).__name__)
    raise
"""


def command(folder: Path, number: int, *words: str) -> "subprocess.Popen[str]":
    """Start a command that reads a plugin, in which the signal `number` comes."""
    (folder / "model.onnx").write_bytes(b"")
    (folder / "plugin.py").write_text(PLUGIN.format(number=int(number)))
    words = words or ("plan", "model.onnx", "--profile", "laptop")
    return subprocess.Popen(
        [sys.executable, "-m", "toolkit.cli", *words, "--plugin", "plugin.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def started(folder: Path) -> int:
    """Wait until the plugin runs; return its process."""
    until_s = time.monotonic() + 60
    while not (folder / "started").exists() or not (folder / "started").read_text():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return int((folder / "started").read_text())


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_is_a_sentence_that_names_the_command(number: signal.Signals, tmp_path) -> None:
    process = command(tmp_path, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: ")
    assert number.name in err
    assert "`tandem plan model.onnx --profile laptop --plugin plugin.py`" in err
    assert err.count("\n") == 1


def test_a_crash_is_json_where_it_is_asked_for(tmp_path) -> None:
    words = ("plan", "model.onnx", "--profile", "laptop", "--json")
    process = command(tmp_path, signal.SIGSEGV, *words)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "SIGSEGV" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("number", "status", "exception"),
    [(signal.SIGTERM, 143, "SystemExit"), (signal.SIGINT, 130, "KeyboardInterrupt")],
)
@pytest.mark.usefixtures("ctrl_c")
def test_a_signal_to_the_command_ends_what_it_does(
    number: signal.Signals, status: int, exception: str, tmp_path
) -> None:
    process = command(tmp_path, 0)
    started(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert (tmp_path / "ended").read_text() == exception
    assert process.returncode in {status, 1}  # 1: click says that it was aborted


def test_a_command_that_is_killed_leaves_nothing_that_runs(tmp_path) -> None:
    process = command(tmp_path, 0)
    child = started(tmp_path)
    assert child != process.pid
    process.kill()
    process.communicate(timeout=60)
    until_s = time.monotonic() + 60
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)


STACK = """Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x2 (most recent call first):
  File "{file}", line 406 in run
  File "/venv/lib/python3.11/site-packages/click/core.py", line 6 in main
"""


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/venv/lib/python3.11/site-packages/onnxruntime/capi/one.py", "onnxruntime crashed in"),
        ("/usr/lib/python3/dist-packages/cv2/__init__.py", "cv2 crashed in"),
        ("/home/me/tandem/toolkit/one.py", "a native library crashed in"),
    ],
)
def test_the_library_that_crashed_is_named(file: str, library: str) -> None:
    message = crash_text(["infer", "my net.onnx"], signal.SIGSEGV, STACK.format(file=file))
    assert message.startswith(f"{library} `tandem infer 'my net.onnx'` (SIGSEGV): ")
    assert crash_text(["infer", "a\nb"], signal.SIGBUS, "").isprintable()


def test_commands_that_read_models_are_guarded() -> None:
    assert COMMANDS.keys() >= GUARDED
