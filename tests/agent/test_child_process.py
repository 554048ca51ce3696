"""A child of the agent: what it says is whole, its limits end it, and nothing of it stays."""

import os
import queue
import sys
import time
from pathlib import Path

import pytest

from device.agent.task_process import TaskEnded, start_task
from device.start.child_process import (
    MAX_RESULT_BYTES,
    NO_LIMITS,
    ChildExit,
    ChildLimits,
    ChildProcess,
)

WAIT_S = 60.0


class Child:
    """A child that runs Python, with what it said and how it ended."""

    def __init__(self, code: str, limits: ChildLimits = NO_LIMITS) -> None:
        self.lines: list[bytes] = []
        self._ends: queue.Queue[ChildExit] = queue.Queue()
        command = (sys.executable, "-c", code)
        self.process = ChildProcess(command, self.lines.append, self._ends.put, limits=limits)

    def end(self) -> ChildExit:
        return self._ends.get(timeout=WAIT_S)


def test_a_long_line_comes_whole_and_before_the_end() -> None:
    child = Child(f"print('x' * {MAX_RESULT_BYTES // 2})")
    assert child.end() == ChildExit(0, ())
    assert [len(line) for line in child.lines] == [MAX_RESULT_BYTES // 2 + 1]


def test_the_reason_is_the_cause_then_the_last_that_was_said_then_the_status() -> None:
    assert Child("import sys; sys.exit(3)").end().reason == "exit status 3"
    assert Child("import sys; print('a\\nb', file=sys.stderr); sys.exit(3)").end().reason == "b"
    limits = ChildLimits(seconds=0.5, too_long="it took longer than 0.5 s")
    assert Child("import time; time.sleep(600)", limits).end().reason == limits.too_long


def test_what_a_child_has_started_ends_with_it(tmp_path: Path) -> None:
    """It is of the child's group, and keeps its pipes open."""
    number = tmp_path / "pid"
    child = Child(
        "import subprocess, sys; from pathlib import Path\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(number)!r}).write_text(str(one.pid)); print('done', flush=True)"
    )
    assert child.end().status == 0
    assert child.lines == [b"done\n"]
    until_s = time.monotonic() + WAIT_S
    while is_running(int(number.read_text())):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which nobody may reap here."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_memory_beyond_the_limit_ends_it() -> None:
    limits = ChildLimits(memory_bytes=150 * 1024**2, too_much=lambda used: f"{used >> 20} MiB")
    end = Child("x = b'1' * 400_000_000; import time; time.sleep(600)", limits).end()
    assert end.cause.endswith(" MiB")
    assert end.status < 0


def test_a_result_beyond_the_limit_of_time_is_none() -> None:
    events: queue.Queue[TaskEnded] = queue.Queue()
    code = "import time; print('{}', flush=True); time.sleep(600)"
    start_task("c1", (sys.executable, "-c", code), events.put, limit_s=1.0, max_bytes=100)
    assert events.get(timeout=WAIT_S) == TaskEnded("c1", None, "it took longer than 1 s")


def test_without_a_process_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_of: object, **_more: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with pytest.raises(OSError, match="no process can be started: Resource temporarily"):
        Child("")
