"""What a child of a preparation may print and start beside its answer, and what its end is called.

Scripts stand for the modules that build with TensorRT.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from device.runtime.prepare import children
from device.runtime.prepare.children import BUILD, Ended, Limits, Watch, run_child

ANSWER = b'{"tensorrt":"10.3.0"}'
PRINT = f"import os; os.write(1, {ANSWER + bytes(1)!r}[:-1] + b'\\n')\n"


def run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 60.0) -> Ended:
    monkeypatch.setattr(children, "module_command", lambda *_: (sys.executable, "-c", code))
    watch = Watch(Limits(seconds), None, lambda _seconds: None)
    return run_child(BUILD, tmp_path / "request.json", tmp_path / "log", watch)


@pytest.mark.parametrize("noise", [b'{"tensorrt":"\xff"}', b"\xff\xfe", b"{}", b"[" * 10**5])
def test_an_answer_is_read_behind_lines_that_are_none(
    noise: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os; os.write(1, {noise[:20]!r} * {-(-len(noise) // 20)} + b'\\n')\n{PRINT}"
    assert run(code, tmp_path, monkeypatch) == Ended(answer=ANSWER)


def test_a_half_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os; os.write(1, {ANSWER!r})"
    assert run(code, tmp_path, monkeypatch).problem == "the build gave no answer"


def test_the_last_line_of_a_child_that_fails_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('first\\nno memory \\n\\n', file=sys.stderr); sys.exit(3)"
    assert run(code, tmp_path, monkeypatch) == Ended(
        problem="the build failed: no memory", passing=True
    )
    assert run("raise SystemExit(3)", tmp_path, monkeypatch).problem == (
        "the build failed: exit status 3"
    )


def test_a_limit_ends_what_a_child_has_started_and_keeps_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import pathlib, subprocess, time\n{PRINT}child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\ntime.sleep(600)"
    )
    ended = run(code, tmp_path, monkeypatch, seconds=5.0)
    assert ended.answer == ANSWER
    assert ended.late.startswith("the build took longer than 5 s; give more")
    state = Path("/proc", pid.read_text(), "stat")
    until_s = time.monotonic() + 10.0
    while state.exists() and ") Z " not in state.read_text():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_process_that_cannot_be_started_costs_this_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert run("", tmp_path, monkeypatch) == Ended(
        problem="the build failed: no process can be started: Resource temporarily unavailable",
        passing=True,
    )
