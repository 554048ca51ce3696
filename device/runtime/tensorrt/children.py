"""Runs one step of a preparation in a child process with limits: what it answers, or what ended it.

TensorRT is known to crash, to hang and to take all memory; each is a problem of the segment alone.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.runtime.tensorrt.messages import explain, severity_of, split_builds, text_of
from device.runtime.tensorrt.request import Answer, Times
from device.start.child import guarded
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


BUILD = Task("device.runtime.tensorrt.build", Answer, "build", "it built the segment")
TIMING = Task("device.runtime.tensorrt.compare", Times, "timing", "the segment was timed")


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
    """Run a task on the request in a file, beside which its output is kept."""
    begin_s = time.monotonic()
    stdout, stderr = request.with_name("stdout"), request.with_name("stderr")
    with (
        stderr.open("wb") as errors,
        stdout.open("wb") as output,
        subprocess.Popen(
            guarded(module_command(task.module, str(request))),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        ) as child,
    ):
        ended = _watch(task, child, begin_s, watch)
    if ended is None and child.returncode != 0:
        # TensorRT crashes with another signal; one that ends in order has answered.
        passing = child.returncode > 0 or child.returncode == -signal.SIGKILL
        ended = Ended(problem=_death(task, child.returncode, stderr, log), passing=passing)
    answer = _answer(task, stdout)
    if answer:
        return Ended(answer=answer, late="" if ended is None else ended.problem)
    return ended or Ended(problem=f"the {task.noun} gave no answer", passing=True)


def total_limit_problem(limits: Limits) -> str:
    """Return why a segment is not prepared once the time of all is over."""
    return (
        f"the preparation as a whole took longer than {limits.total_seconds:.0f} s; what "
        "is built is kept: run it again, or give more with "
        "`tandem-agent prepare --total-timeout-s`"
    )


def _watch(
    task: Task, child: "subprocess.Popen[bytes]", begin_s: float, watch: Watch
) -> Ended | None:
    """Wait for the child; end it beyond a limit, and return that limit."""
    limits = watch.limits
    try:
        while child.poll() is None:
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
            resident = _resident_bytes(child.pid)
            if limits.memory_bytes is not None and resident > limits.memory_bytes:
                problem = (
                    f"the {task.noun} took {resident / 2**20:.0f} MiB of memory, the limit is "
                    f"{limits.memory_bytes / 2**20:.0f}; give more with "
                    "`tandem-agent prepare --again --max-memory-mb`"
                )
                return Ended(problem=problem, limit_bytes=limits.memory_bytes)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _answer(task: Task, stdout: Path) -> bytes:
    """Return the answer in the output of a child, b"" if none is whole.

    TensorRT and the DLA's runtime write there, too.
    """
    *lines, _ = stdout.read_bytes().split(b"\n")  # behind the last end of a line: no whole line
    for line in reversed(lines):
        with suppress(msgspec.DecodeError):
            msgspec.json.decode(line, type=task.answer)
            return line
    return b""


def _resident_bytes(pid: int) -> int:
    """The resident memory of a process, 0 once it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _death(task: Task, status: int, errors: Path, log: Path) -> str:
    """Why the child ended without an answer."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if status < 0:
        name = signal.Signals(-status).name
        last = f", after: {text_of(lines[-1])}" if lines else ""
        reason = f"TensorRT crashed ({name}) while {task.doing}{last}"
        first, again = split_builds(lines)
        known = explain(line for line in again or first if severity_of(line) == "error")
        return f"{reason}; {known}" if known else reason
    text = errors.read_text(errors="replace").strip().splitlines()
    return f"the {task.noun} failed: {text[-1] if text else f'exit status {status}'}"
