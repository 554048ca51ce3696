"""The pipeline as a child process: its command line, its output as events, start, stop, back-off.

The child runs below a keeper, which ends with the last process that it has started
(`device.start.keeper`), and writes messages as JSON lines (`device.protocol.messages`). Threads
turn its output and its exit into events; each carries the number of its run, so that late output of
an old run is not taken for the new one's. A thread holds it to its memory limit.
"""

import contextlib
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from device.agent.process_activity import Activity, activity_of
from device.agent.silence import NOBODY, Heard
from device.protocol.messages import ChildMessage, Heartbeat, Result, Stats, decode_message
from device.start.child_process import MAX_LINE_BYTES, ChildExit, ChildLimits, ChildProcess, echo
from device.start.command import module_command
from device.start.keeper import LEFTOVER_S, end_keepers, end_tree
from device.start.memory_watch import oom_kills

LOG = logging.getLogger("tandem.pipeline")
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
FIRST_RESTART_S = 0.5
KILL_WAIT_S = 5.0
LINES_PER_S = 50.0  # of messages; a pipeline gives some five
BURST_LINES = 200.0
MAX_WAITING = 64  # messages that the agent has no time for
BYTES_PER_LINE = 1024  # a longer line counts as several


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A kind of child; `{...}` in its arguments are formatted at each start."""

    name: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...]


PIPELINE = ProcessRow(
    name="pipeline",
    prefix=module_command("pipelines.__main__"),
    arguments=(
        *("--bundle", "{bundle}"),
        *("--profile", "{profile}"),
        *("--mqtt-host", "{mqtt_host}"),
        *("--mqtt-port", "{mqtt_port}"),
        *("--topic-prefix", "{topic_prefix}"),
        *("--data", "{data}", "--data-mb", "{data_mb}"),
        *("--services", "{services}"),
        *("--tap", "{tap}"),
        "--wait-for-source",
    ),
)


@dataclass(frozen=True, slots=True)
class PipelineOutput:
    """A message of the child, which came at `at_s` of `time.monotonic()`."""

    run: int
    message: ChildMessage
    at_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class PipelineExited:
    """The child exited; `reason` says how, with the end of its stderr.

    `crashed`: with another status than 0, which says that its source has no more frames.
    """

    run: int
    reason: str
    crashed: bool = True


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


@dataclass(slots=True)
class _Run:
    """One start of the child; its threads write here."""

    number: int
    alive_s: float = field(default_factory=time.monotonic)
    started_s: float = field(default_factory=time.monotonic)
    flood_since_s: float = inf
    beating: bool = False  # the loop has begun: it gives heartbeats
    oom_kills: int = field(default_factory=oom_kills)
    ended: threading.Event = field(default_factory=threading.Event)

    def heard(self, message: ChildMessage) -> PipelineOutput:
        """Note that the child lives, here and not where events are handled: that thread may be busy
        for long."""
        output = PipelineOutput(self.number, message)
        beats = isinstance(message, Heartbeat) and message.state != "loading"
        if beats or (not self.beating and self.flood_since_s == inf):
            self.alive_s = output.at_s
            self.beating = self.beating or beats or isinstance(message, Result)
        return output


class PipelineProcess:
    """At most one child at a time. Start it from the main thread (see `device.start.guard`)."""

    def __init__(
        self,
        put: Callable[[PipelineEvent], None],
        grace_s: float,
        mark: str = "",
        memory_bytes: int = 0,
        on_line: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """`grace_s`: the child has so long to end. `mark`: what its keeper carries; empty: those of
        earlier agents are not looked for. `memory_bytes`: what it and all that it starts may hold;
        0: anything. `on_line` takes what it prints to stderr, in another thread."""
        self.run = 0
        self._put = put
        self._grace_s = grace_s
        self._mark = mark
        self._limits = ChildLimits(
            memory_bytes=memory_bytes,
            too_much=lambda used_bytes: (
                f"the pipeline held {used_bytes >> 20} MiB of memory and may hold"
                f" {memory_bytes >> 20} MiB (memory_mb in agent.toml): it was ended"
            ),
        )
        self._on_line = on_line
        self._current: tuple[_Run, ChildProcess] | None = None

    @property
    def heard(self) -> Heard:
        """What was heard of the child."""
        if self._current is None:
            return NOBODY
        run = self._current[0]
        flood_s = max(0.0, time.monotonic() - run.flood_since_s)
        return Heard(run.alive_s, run.beating, run.started_s, flood_s)

    def activity(self) -> Activity | None:
        """Return what the child and what it started have done by now."""
        if self._current is None or self._current[0].ended.is_set():
            return None
        return activity_of(self._current[1].pid)

    def start(self, command: tuple[str, ...], environment: Mapping[str, str]) -> int:
        """Stop the running child and start a command; returns the number of the run.

        Raises OSError if the system cannot start another process.
        """
        self.stop()
        self.run += 1
        run, measure, put = _Run(self.run), _Measure(), self._put
        outbox = _Outbox(put)

        def on_line(line: bytes) -> None:
            measure.wait(line, run)
            message = decode_message(line)
            if message is not None:
                outbox.add(run.heard(message))

        def on_exit(exit_: ChildExit) -> None:
            outbox.close()
            reason = exit_.cause or describe_exit(exit_.status, exit_.tail)
            killed = exit_.status == -signal.SIGKILL and not exit_.cause
            if killed and oom_kills() > run.oom_kills:
                reason += "; the kernel ended a process meanwhile because memory ran out"
            put(PipelineExited(run.number, reason, crashed=exit_.status != 0))

        def on_stderr(text: str) -> None:
            self._on_line(text)
            echo(text)

        child = ChildProcess(
            command, on_line, on_exit, limits=self._limits, environment=environment,
            on_stderr=on_stderr, max_line_bytes=MAX_LINE_BYTES, keeper=self._mark, ended=run.ended,
        )  # fmt: skip
        self._current = run, child
        return self.run

    def stop(self) -> None:
        """Stop the child and all that it started: SIGTERM, then SIGKILL after the grace period.

        Ends what an earlier agent of this state folder has left behind, too.
        """
        if self._current is not None:
            child, self._current = self._current[1], None
            self.run += 1  # later output of this run is dropped
            child.send(signal.SIGTERM)
            child.wait(self._grace_s)
            child.send(signal.SIGHUP)
            if not child.wait(2.0 * LEFTOVER_S):
                end_tree(child.pid)
            if not child.wait(KILL_WAIT_S):
                # Stuck in a driver. The agent has to stay reachable: it does not wait.
                LOG.error("the pipeline (process %d) does not end, even killed", child.pid)
        if self._mark and (ended := end_keepers(self._mark)):
            LOG.warning("ended %d pipelines that an earlier agent had left behind", ended)

    def kill(self) -> None:
        """Kill the child without waiting; its exit is an event."""
        if self._current is not None:
            self._current[1].send(signal.SIGHUP)


class _Measure:
    """Lets lines pass at a rate, with bursts: a child that writes more waits on its pipe, and takes
    neither this process's time nor its memory."""

    def __init__(self) -> None:
        self._left = BURST_LINES
        self._filled_s = time.monotonic()

    def wait(self, line: bytes, run: _Run) -> None:
        """Wait until a line may pass; note since when they have had to wait."""
        now_s = time.monotonic()
        self._left += (now_s - self._filled_s) * LINES_PER_S - max(1, len(line) // BYTES_PER_LINE)
        self._left, self._filled_s = min(self._left, BURST_LINES), now_s
        if self._left > BURST_LINES / 2:
            run.flood_since_s = inf
        elif self._left < 0.0:
            run.flood_since_s = min(run.flood_since_s, now_s)
            run.ended.wait(-self._left / LINES_PER_S)


class _Outbox:
    """Hands messages on in a thread of its own, as whoever takes them may be busy for long: signs
    of life are read meanwhile. What is said again soon is left out where there is no room."""

    def __init__(self, put: Callable[[PipelineEvent], None]) -> None:
        self._put = put
        self._waiting: queue.Queue[PipelineOutput | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None

    def add(self, output: PipelineOutput) -> None:
        """Add a message; waits for room for one that is said once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._hand_on, daemon=True)
            self._thread.start()
        if not isinstance(output.message, Heartbeat | Stats):
            self._waiting.put(output)
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(output)

    def close(self) -> None:
        """Wait until all messages are handed on."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _hand_on(self) -> None:
        while (output := self._waiting.get()) is not None:
            self._put(output)


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
