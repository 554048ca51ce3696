"""The pipeline as a child process: its command line, its output as events, start, stop, back-off.

The child leads its own process group and writes messages as JSON lines
(`device.protocol.messages`). Threads turn its output and its exit into events; each carries the
number of its run, so that late output of an old run is not taken for the new one's.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO

from device.start.child import guarded
from device.protocol.messages import ChildMessage, decode_message
from device.start.command import module_command

LOG = logging.getLogger("tandem.pipeline")
STDERR_LINES = 100
MAX_LINE_BYTES = 64 * 1024
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
FIRST_RESTART_S = 0.5
KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A kind of child; `{...}` in its arguments are formatted at each start."""

    name: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...]


PIPELINE = ProcessRow(
    name="pipeline",
    prefix=module_command("pipelines"),
    arguments=(
        *("--bundle", "{bundle}"),
        *("--profile", "{profile}"),
        *("--mqtt-host", "{mqtt_host}"),
        *("--mqtt-port", "{mqtt_port}"),
        *("--topic-prefix", "{topic_prefix}"),
    ),
)


def command_of(
    row: ProcessRow, values: Mapping[str, str], extra: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the formatted command line of a row."""
    return (*row.prefix, *(argument.format_map(values) for argument in row.arguments), *extra)


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """A message of the child."""

    run: int
    message: ChildMessage


@dataclass(frozen=True, slots=True)
class PipelineExited:
    """The child exited; `reason` says how, with the end of its stderr."""

    run: int
    reason: str


PipelineEvent = PipelineOutput | PipelineExited


@dataclass(frozen=True, slots=True)
class Restarts:
    """The back-off of a pipeline that dies: a value; each death returns the next one."""

    deaths_s: tuple[float, ...] = ()
    failed: bool = False
    at_s: float | None = None

    def died(self, now_s: float) -> "Restarts":
        """Double the delay at each death; after too many in a minute wait a whole one."""
        recent = tuple(t for t in self.deaths_s if now_s - t < RESTART_WINDOW_S)
        recent = (*recent, now_s)[-MAX_RESTARTS - 1 :]
        failed = self.failed or len(recent) > MAX_RESTARTS
        delay_s = RESTART_WINDOW_S if failed else FIRST_RESTART_S * 2.0 ** (len(recent) - 1)
        return Restarts(recent, failed, now_s + delay_s)

    def started(self) -> "Restarts":
        """Return the value after a start: no restart is due."""
        return replace(self, at_s=None)

    def worked(self) -> "Restarts":
        """Return the value after a result: the pipeline has not failed."""
        return replace(self, failed=False)


class PipelineProcess:
    """At most one child at a time. Start it from the main thread (see `device.agent.child`)."""

    def __init__(self, put: Callable[[PipelineEvent], None], grace_s: float) -> None:
        self.run = 0
        self._put = put
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: tuple[str, ...], environment: Mapping[str, str]) -> int:
        """Stop the running child and start a command; returns the number of the run.

        Raises OSError if the system cannot start another process.
        """
        self.stop()
        self.run += 1
        process = subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._process = process
        watcher = threading.Thread(
            target=_watch, args=(process, self.run, self._put), name="pipeline-watch", daemon=True
        )
        watcher.start()
        return self.run

    def stop(self) -> None:
        """Stop the child and its process group: SIGTERM, then SIGKILL after the grace period."""
        process, self._process = self._process, None
        if process is None:
            return
        self.run += 1  # later output of this run is dropped
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._grace_s)
        # Also when the leader has exited: its children may still have the camera open.
        _signal_group(process, signal.SIGKILL)
        try:
            process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            # Stuck in a driver. The agent has to stay reachable, so it continues without waiting.
            LOG.error("the pipeline (process %d) does not end, even killed", process.pid)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # PermissionError: macOS raises it for a dead group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _watch(
    process: "subprocess.Popen[bytes]", run: int, put: Callable[[PipelineEvent], None]
) -> None:
    """Turn the output and the exit of a child into events."""
    assert process.stdout is not None
    assert process.stderr is not None
    tail: deque[str] = deque(maxlen=STDERR_LINES)
    readers = (
        threading.Thread(target=_read_messages, args=(process.stdout, run, put), daemon=True),
        threading.Thread(target=_read_tail, args=(process.stderr, tail), daemon=True),
    )
    for reader in readers:
        reader.start()
    status = process.wait()
    for reader in readers:
        reader.join(1.0)  # a grandchild may keep the pipe open; its output is not needed
    put(PipelineExited(run, describe_exit(status, tuple(tail))))


def _read_messages(stream: IO[bytes], run: int, put: Callable[[PipelineEvent], None]) -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            message = decode_message(line)
            if message is not None:
                put(PipelineOutput(run, message))


def _read_tail(stream: IO[bytes], tail: "deque[str]") -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                tail.append(text)
                # An error of the log must not stop this loop: the child would block on its pipe.
                with contextlib.suppress(OSError, ValueError):
                    print(text, file=sys.stderr, flush=True)


def describe_exit(status: int, tail: tuple[str, ...]) -> str:
    """Return how a child exited, with the last lines of its stderr as the reason."""
    if status < 0:
        how = f"the pipeline was killed by {_signal_name(-status)}"
    elif status == 0:
        return "the pipeline ended by itself: its source has no more frames (loop = true for files)"
    else:
        how = f"the pipeline ended with status {status}"
    return f"{how}: {' | '.join(tail[-3:])}" if tail else f"{how} and said nothing on stderr"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
