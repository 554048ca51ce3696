"""A child process with all that it starts: lines in and out, its limits, and how it ended.

Start it from the main thread (see `device.start.guard`). What it says and that it ended are told in
threads of their own. One whose own children may leave its session runs below a keeper
(`device.start.keeper`).
"""

import contextlib
import errno
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from device.start.child import guarded
from device.start.keeper import keeper_command
from device.start.memory_watch import watch_memory

MAX_LINE_BYTES = 64 * 1024  # of stderr, and of the pipeline's messages
MAX_RESULT_BYTES = 16 * 1024**2  # of a line of stdout; a longer one comes in parts
TAIL_LINES = 100
NO_PROCESS = "no process can be started: "
JOIN_S = 5.0  # a process that the child has started may keep its pipes open for so long


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a child ended. `status`: as subprocess has it; `tail`: the last lines of its stderr;
    `cause`: why it was ended from here, empty: it ended by itself."""

    status: int
    tail: tuple[str, ...]
    cause: str = ""

    @property
    def reason(self) -> str:
        """Why it ended: the cause, or the last that it said, or its status."""
        return self.cause or (*self.tail[-1:], f"exit status {self.status}")[0]


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """The most that a child may take before it is ended, and what is said then: `too_long`, and
    `too_much` of the bytes that it held. `memory_bytes` 0: anything."""

    seconds: float = math.inf
    too_long: str = ""
    memory_bytes: int = 0
    too_much: Callable[[int], str] = "{} bytes of memory".format


NO_LIMITS = ChildLimits()


class ChildProcess:
    """One run of a command."""

    def __init__(
        self,
        command: tuple[str, ...],
        on_line: Callable[[bytes], None],
        on_exit: Callable[[ChildExit], None],
        *,
        limits: ChildLimits = NO_LIMITS,
        environment: Mapping[str, str] | None = None,
        written: "queue.Queue[bytes | None] | None" = None,
        on_stderr: Callable[[str], None] = lambda _text: None,
        max_line_bytes: int = MAX_RESULT_BYTES,
        keeper: str | None = None,
        ended: threading.Event | None = None,
    ) -> None:
        """Start the child. `on_line` takes each line of its stdout, `on_stderr` of its stderr, and
        then `on_exit` its end. `written`: what goes to its stdin, None at the end.
        `max_line_bytes`: of stdout; a longer one comes in parts. `keeper`: the mark of the one that
        it runs below. `ended`: is set as it ends.

        Raises OSError, whose strerror says that no process or no thread can be started, and why.
        """
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                guarded(command) if keeper is None else keeper_command(command, keeper),
                stdin=subprocess.DEVNULL if written is None else pipe,
                stdout=pipe, stderr=pipe, env={**os.environ, **(environment or {})},
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise OSError(error.errno, f"{NO_PROCESS}{error.strerror}") from error
        self._limits, self._on_exit, self._keeper = limits, on_exit, keeper
        self._cause = ""
        self._ended = ended or threading.Event()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        stdout, stderr, stdin = self._process.stdout, self._process.stderr, self._process.stdin
        assert stdout is not None
        assert stderr is not None
        self._readers = (
            threading.Thread(
                target=_read_lines, args=(stdout, on_line, max_line_bytes), daemon=True
            ),
            threading.Thread(target=read_tail, args=(stderr, self._tail, on_stderr), daemon=True),
        )
        threads = [*self._readers, threading.Thread(target=self._watch, daemon=True)]
        if limits.memory_bytes:
            threads.append(threading.Thread(target=self._hold_memory, daemon=True))
        if written is not None:
            threads.append(threading.Thread(target=_write, args=(stdin, written), daemon=True))
        try:
            for thread in threads:
                thread.start()
        except RuntimeError as error:  # the limit of tasks is reached: nobody would see it end
            self._on_exit = lambda _exit: None
            self.stop()
            raise OSError(errno.EAGAIN, f"no thread can be started ({error})") from error

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def end(self, cause: str = "it was stopped") -> None:
        """Kill the child and all that it started, for a reason."""
        self._cause = self._cause or cause
        if self._keeper is not None:
            self.send(signal.SIGUSR1)
        elif self._process.returncode is None:  # else its number may be another process's by now
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, for which one that is stopped goes on."""
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)

    def wait(self, for_s: float) -> bool:
        """Wait until it has ended; False: it has not within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(for_s)
            return True
        return False

    def stop(self) -> None:
        """Kill it and wait until it has ended."""
        self.end()
        self._process.wait()

    def _hold_memory(self) -> None:
        def breach(used_bytes: int) -> None:
            self.end(self._limits.too_much(used_bytes))

        watch_memory(self.pid, self._limits.memory_bytes, self._ended, breach)

    def _watch(self) -> None:
        seconds = self._limits.seconds
        try:
            status = self._process.wait(None if seconds == math.inf else seconds)
        except subprocess.TimeoutExpired:
            self.end(self._limits.too_long)
            status = self._process.wait()
        self._ended.set()
        until_s = time.monotonic() + JOIN_S
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))
        if self._keeper is None and any(reader.is_alive() for reader in self._readers):
            # Who still writes is of the child's group, whose number is no other process's then.
            self._kill_group()
        self._on_exit(ChildExit(status, tuple(self._tail), self._cause))


class OneChild:
    """At most one child at a time; what it says has the number of its run. Start it from the main
    thread (see `device.start.guard`)."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._run = 0

    @property
    def running(self) -> bool:
        """Whether a child runs."""
        return self._child is not None

    def is_current(self, run: int) -> bool:
        """Whether it is the number of the last child."""
        return run == self._run

    def ended(self, run: int) -> bool:
        """Take the end of a child; return whether it is that of the last one."""
        if run != self._run:
            return False
        self._child = None
        self._run += 1
        return True

    def stop(self) -> None:
        """End the child with all that it started; what it says from here on is not current."""
        child, self._child = self._child, None
        self._run += 1
        if child is not None:
            child.stop()


def read_tail(stream: IO[bytes], tail: "deque[str]", on_line: Callable[[str], None]) -> None:
    """Hand on and keep each line that says something, until the stream ends."""
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            if text := line.decode("utf-8", "replace").rstrip():
                tail.append(text)
                on_line(text)


def echo(text: str) -> None:
    """Print a line to stderr; an error must not stop who reads, or the child blocks on its pipe."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _read_lines(stream: IO[bytes], on_line: Callable[[bytes], None], max_bytes: int) -> None:
    with stream:
        while line := stream.readline(max_bytes):
            on_line(line)


def _write(pipe: IO[bytes], written: "queue.Queue[bytes | None]") -> None:
    """Write to the child; in a thread of its own, as the child may not read."""
    with contextlib.suppress(OSError, ValueError):  # the child has ended
        while (data := written.get()) is not None:
            pipe.write(data)
            pipe.flush()
    with contextlib.suppress(OSError):
        pipe.close()
