"""Runs one step of a preparation in a child process with limits: what it answers, or what ended it.

TensorRT is known to crash, to hang and to take all memory; each is a problem of the segment alone.
"""

import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.runtime.tensorrt.messages import explain, severity_of, split_builds, text_of
from device.runtime.tensorrt.request import Answer, Times
from device.start.child_process import ChildExit, ChildProcess
from device.start.command import module_command

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one child process: its time, and its resident memory (None: no limit).

    `total_seconds`: of the preparation as a whole.
    """

    seconds: float = 1800.0
    memory_bytes: int | None = None
    total_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What a child does: its module, what it answers, and words for it in sentences."""

    module: str
    answer: type[msgspec.Struct]
    noun: str
    doing: str


BUILD = Task("device.runtime.prepare.build", Answer, "build", "it built the segment")
TIMING = Task("device.runtime.prepare.compare", Times, "timing", "the segment was timed")


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer that a child printed, or why there is none.

    `late`: how the child ended after its answer, if not in order, which takes nothing from it.
    `limit_s`, `limit_bytes`: the limit that ended it. `passing`: something else than TensorRT did,
    and another try may go well.
    """

    answer: bytes = b""
    problem: str = ""
    late: str = ""
    limit_s: float = 0.0
    limit_bytes: int = 0
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Watch:
    """The limits of a child. `end_s`: when the whole preparation ends, by the monotonic clock."""

    limits: Limits
    end_s: float | None
    on_progress: Callable[[float], None]


def run_child(task: Task, request: Path, log: Path, watch: Watch) -> Ended:
    """Run a task on the request in a file."""
    answers: deque[bytes] = deque(maxlen=1)

    def on_line(line: bytes) -> None:
        """Keep the last whole answer: TensorRT and the DLA's runtime write there, too."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            if line.endswith(b"\n"):
                msgspec.json.decode(line, type=task.answer)
                answers.append(line[:-1])

    ends = queue.SimpleQueue[ChildExit]()
    try:
        child = ChildProcess(module_command(task.module, str(request)), on_line, ends.put)
    except OSError as error:
        return Ended(problem=f"the {task.noun} failed: {error.strerror}", passing=True)
    try:
        end = _watch(task, child.pid, ends, watch)
    finally:
        child.stop()
    if isinstance(end, ChildExit):
        ended = _after_exit(task, end, log)
    else:
        ended = end
        ends.get()  # all that it said has been read
    if answers:
        return Ended(answer=answers[0], late="" if ended is None else ended.problem)
    return ended or Ended(problem=f"the {task.noun} gave no answer", passing=True)


def total_limit_problem(limits: Limits) -> str:
    """Return why a segment is not prepared once the time of all is over."""
    return (
        f"the preparation as a whole took longer than {limits.total_seconds:.0f} s; what "
        "is built is kept: run it again, or give more with "
        "`tandem-agent prepare --total-timeout-s`"
    )


def _watch(
    task: Task, pid: int, ends: "queue.SimpleQueue[ChildExit]", watch: Watch
) -> Ended | ChildExit:
    """Wait for the child; return how it ended, or the limit that it is beyond."""
    limits, begin_s = watch.limits, time.monotonic()
    while True:
        now_s = time.monotonic()
        watch.on_progress(now_s - begin_s)
        if now_s - begin_s > limits.seconds:
            problem = (
                f"the {task.noun} took longer than {limits.seconds:.0f} s; give more with "
                "`tandem-agent prepare --again --timeout-s`"
            )
            return Ended(problem=problem, limit_s=limits.seconds)
        if watch.end_s is not None and now_s > watch.end_s:
            return Ended(problem=total_limit_problem(limits), passing=True)
        resident = _resident_bytes(pid)
        if limits.memory_bytes is not None and resident > limits.memory_bytes:
            problem = (
                f"the {task.noun} took {resident / 2**20:.0f} MiB of memory, the limit is "
                f"{limits.memory_bytes / 2**20:.0f}; give more with "
                "`tandem-agent prepare --again --max-memory-mb`"
            )
            return Ended(problem=problem, limit_bytes=limits.memory_bytes)
        with suppress(queue.Empty):
            return ends.get(timeout=_POLL_S)


def _resident_bytes(pid: int) -> int:
    """The resident memory of a process, 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _after_exit(task: Task, exit_: ChildExit, log: Path) -> Ended | None:
    """Return why a child that ended by itself did so in disorder, None if it did not."""
    if exit_.status == 0:
        return None
    if exit_.status > 0:
        return Ended(problem=f"the {task.noun} failed: {exit_.reason}", passing=True)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    last = f", after: {text_of(lines[-1])}" if lines else ""
    name = signal.Signals(-exit_.status).name
    reason = f"TensorRT crashed ({name}) while {task.doing}{last}"
    first, again = split_builds(lines)
    known = explain(line for line in again or first if severity_of(line) == "error")
    # TensorRT crashes with another signal than this, which the kernel sends for want of memory.
    passing = exit_.status == -signal.SIGKILL
    return Ended(problem=f"{reason}; {known}" if known else reason, passing=passing)
