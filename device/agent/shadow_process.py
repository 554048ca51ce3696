"""The process that runs a new release in the shadow of the one that is live.

The child is `python -m pipelines.shadow`, with the lowest priority and a memory limit of its own.
What it says and that it ended arrive as events.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from device.agent.memory_watch import available_bytes, watch_memory
from device.agent.pipeline_process import MAX_LINE_BYTES, STDERR_LINES
from device.protocol.messages import Failure, Shadow, decode_message
from device.start.child import guarded
from device.start.command import module_command

LOG = logging.getLogger("tandem.agent")
TAP = "shadow.sock"  # in the state folder; the running pipeline listens there
MEMORY_SHARE = 0.75  # of what is free: the running release must not run out of it
START_S = 180.0  # for the engine to load at the lowest priority
_COMMAND = module_command("pipelines.shadow")


@dataclass(frozen=True, slots=True)
class ShadowSaid:
    """How far the comparison is."""

    run: int
    message: Shadow


@dataclass(frozen=True, slots=True)
class ShadowEnded:
    """The child has ended. `result` None: without one, `problem` says how.

    `passing`: the system is to blame, and another try may go well.
    """

    run: int
    result: Shadow | None
    problem: str = ""
    passing: bool = False


ShadowEvent = ShadowSaid | ShadowEnded


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """See `pipelines.shadow.compare.Limits`."""

    seconds: float
    frames: int
    timeout_s: float
    max_hz: float

    @property
    def longest_s(self) -> float:
        """The longest that a child may take that keeps its limits: it waits as long for the first
        frame as it looks at frames from then on."""
        return START_S + 2.0 * (self.seconds + self.timeout_s)


@dataclass(slots=True)
class _Run:
    """One start of the child; its threads write here."""

    number: int
    process: "subprocess.Popen[bytes]"
    result: Shadow | None = None
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, problem: str) -> None:
        """Kill the child and all that it started, for a reason."""
        self.problem = self.problem or problem
        if self.process.returncode is not None:
            return  # its number may be another process's by now
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)


class ShadowProcess:
    """At most one child at a time. Start it from the main thread (see `device.start.guard`)."""

    def __init__(
        self,
        put: Callable[[ShadowEvent], None],
        state_dir: Path,
        profile: str,
        *,
        plans: Path | None = None,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        """`plans`: where finished segments are kept."""
        self._put = put
        self._tap = state_dir / TAP
        self._profile = profile
        self._plans = plans
        self._command = command
        self._current: _Run | None = None
        self._number = 0

    @property
    def running(self) -> bool:
        """Whether a child runs."""
        return self._current is not None

    def start(self, folder: Path, limits: ShadowLimits) -> None:
        """Compare the release in a slot; a child that cannot be started ends at once."""
        self.stop()
        self._number += 1  # what an earlier one, which could not be started, still says is stale
        command = (
            *self._command, "--bundle", str(folder), "--profile", self._profile,
            "--tap", str(self._tap), "--seconds", f"{limits.seconds:g}",
            "--frames", str(limits.frames), "--timeout", f"{limits.timeout_s:g}",
            "--max-hz", f"{limits.max_hz:g}",
        )  # fmt: skip
        plans = {} if self._plans is None else {"TANDEM_PLANS": str(self._plans)}
        try:
            process = subprocess.Popen(
                guarded(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env={**os.environ, **plans}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._cannot_start(f"no process can be started: {error.strerror}")
            return
        run = self._current = _Run(self._number, process)
        memory_bytes = int(available_bytes() * MEMORY_SHARE)
        threads = (
            threading.Thread(target=_watch, args=(run, limits, self._put), daemon=True),
            threading.Thread(target=_hold_memory, args=(run, memory_bytes), daemon=True),
        )
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # the limit of tasks is reached: nobody would see it end
            self.stop()
            self._cannot_start(f"no thread can be started: {error}")

    def _cannot_start(self, problem: str) -> None:
        self._put(ShadowEnded(self._number, None, problem, passing=True))

    def is_current(self, event: ShadowEvent) -> bool:
        """Whether an event is of the last child."""
        return event.run == self._number

    def ended(self, event: ShadowEnded) -> bool:
        """Take the end of the child; return whether it is that of the last one."""
        if not self.is_current(event):
            return False
        self._current = None
        self._number += 1
        return True

    def stop(self) -> None:
        """End the child."""
        run, self._current = self._current, None
        if run is not None:
            run.end("it was stopped")
            run.process.wait()
            self._number += 1


def _hold_memory(run: _Run, limit_bytes: int) -> None:
    def breach(used_bytes: int) -> None:
        run.end(
            f"it held {used_bytes >> 20} MiB of memory beside the running release and may hold "
            f"{limit_bytes >> 20} MiB, {MEMORY_SHARE:.0%} of what was free"
        )

    watch_memory(run.process.pid, limit_bytes, run.ended, breach)


def _watch(run: _Run, limits: ShadowLimits, put: Callable[[ShadowEvent], None]) -> None:
    """Turn the output and the exit of a child into events."""
    process = run.process
    assert process.stdout is not None
    assert process.stderr is not None
    tail: deque[str] = deque(maxlen=STDERR_LINES)
    readers = (
        threading.Thread(target=_read_messages, args=(process.stdout, run, put), daemon=True),
        threading.Thread(target=_read_tail, args=(process.stderr, tail), daemon=True),
    )
    for reader in readers:
        reader.start()
    try:
        status = process.wait(limits.longest_s)
    except subprocess.TimeoutExpired:
        run.end(f"it took longer than {limits.longest_s:g} s")
        status = process.wait()
    run.ended.set()
    for reader in readers:
        reader.join(1.0)
    problem = run.problem or f"it ended with status {status}: {' | '.join([*tail][-3:])}"
    put(ShadowEnded(run.number, run.result, "" if run.result is not None else problem))


def _read_messages(stream: IO[bytes], run: _Run, put: Callable[[ShadowEvent], None]) -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            message = decode_message(line)
            if isinstance(message, Failure):
                run.problem = run.problem or message.message
            elif isinstance(message, Shadow):
                run.result = message if message.done else None
                put(ShadowSaid(run.number, message))


def _read_tail(stream: IO[bytes], tail: "deque[str]") -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                tail.append(text)
                with contextlib.suppress(OSError, ValueError):  # the child would block on its pipe
                    print(text, file=sys.stderr, flush=True)
