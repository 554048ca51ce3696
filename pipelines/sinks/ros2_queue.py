"""Sinks that make and send messages of ROS 2 in a thread of their own: the loop waits for no
network and no disk."""

import ctypes
import logging
import re
import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Literal

from device.board_files import hottest_c
from device.errors import PipelineError
from device.protocol.messages import Stats
from pipelines.ros2.cdr import Message
from pipelines.sinks.result import FrameResult
from pipelines.sinks.ros2_messages import diagnostics

IDLE_S = 1.0
TIME_ERROR = 5  # adjtimex: the clock is not synchronised
SIZE_OF_TIMEX = 208  # bytes, on 64-bit Linux

_log = logging.getLogger(__name__)


class QueuedSink(AbstractContextManager["QueuedSink"]):
    """A queue of `limit` results and figures, and the thread that sends them.

    `kind`: of pipeline.toml, which begins the causes of drops. `drops`: what makes way in a full
    queue. `close_s`: how long the thread may take for the queue at the end.
    """

    def __init__(
        self, kind: str, limit: int, drops: Literal["oldest", "newest"], close_s: float
    ) -> None:
        self._kind = kind
        self._limit = limit
        self._drops = drops
        self._close_s = close_s
        self._pipeline = ""
        self._ages_ms: dict[str, float] = {}
        self._runs: dict[str, str] = {}
        self._dropped: Counter[str] = Counter()
        self._queue: deque[FrameResult | Stats] = deque()
        self._filled = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{kind} sink", daemon=True)

    @property
    def dropped(self) -> Mapping[str, int]:
        """KIND_queue: results come faster than they are sent, or were left at the end; KIND_error:
        a message could not be made or sent; what the sink adds."""
        return dict(self._dropped)

    @abstractmethod
    def send(self, result: FrameResult) -> None:
        """Make and send the messages of a frame; in the thread, as all that follows."""

    @abstractmethod
    def send_stats(self, stats: Stats) -> None:
        """Make and send the figures of a second."""

    def idle(self) -> None:
        """Do what is due when no result came for a second."""

    def close(self) -> None:
        """Write what is left, and close the output."""

    def __enter__(self) -> "QueuedSink":
        """Begin to send."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Send the queue, and close; what is not sent in `close_s` is dropped."""
        with self._filled:
            self._closing = True
            self._filled.notify()
        self._thread.join(self._close_s)
        with self._filled:
            if self._queue:
                self._dropped[f"{self._kind}_queue"] += len(self._queue)
                self._queue.clear()

    def write(self, result: FrameResult) -> None:
        """Queue a result."""
        self._pipeline = result.event.pipeline
        # New mappings each time: the thread reads the old ones.
        self._ages_ms = {**self._ages_ms, result.frame.camera: result.event.age_ms}
        self._runs = {**self._runs, **{run.model: ", ".join(run.processors) for run in result.runs}}
        self._append(result)

    def take_stats(self, stats: Stats) -> None:
        """Queue the figures of the last second."""
        self._append(stats)

    def diagnostics(self, stats: Stats, now_ns: int) -> Message:
        """Return a DiagnosticArray of the figures of the last second."""
        return diagnostics(
            now_ns,
            self._pipeline,
            stats,
            ages_ms=self._ages_ms,
            runs=self._runs,
            heat_c=hottest_c(Path("/sys")),
            clock=clock_text(),
        )

    def _append(self, item: FrameResult | Stats) -> None:
        with self._filled:
            if len(self._queue) >= self._limit:
                self._dropped[f"{self._kind}_queue"] += 1
                if self._drops == "newest":
                    return
                self._queue.popleft()
            self._queue.append(item)
            self._filled.notify()

    def _next(self) -> FrameResult | Stats | None:
        with self._filled:
            if not self._queue and not self._closing:
                self._filled.wait(IDLE_S)
            return self._queue.popleft() if self._queue else None

    def _run(self) -> None:
        while True:
            item = self._next()
            if isinstance(item, Stats):
                self._guarded(partial(self.send_stats, item))
            elif item is not None:
                self._guarded(partial(self.send, item))
            elif self._closing:
                break
            else:
                self._guarded(self.idle)
        self._guarded(self.close)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  (no message may end a pipeline)
            if not self._dropped[f"{self._kind}_error"]:
                _log.exception("the %s sink drops a frame: %s", self._kind, error)
            self._dropped[f"{self._kind}_error"] += 1


def clock_text() -> str:
    """Return what the kernel says of the system clock, from which all stamps are."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(SIZE_OF_TIMEX))
    return "not synchronised" if state in (TIME_ERROR, -1) else "synchronised"


def ros_name(name: str) -> str:
    """Return a name of ours as a part of a topic: letters, digits and `_`, no digit first."""
    text = re.sub(r"\W", "_", name)
    return f"_{text}" if text[:1].isdigit() else text


def topic_prefix(camera: str, cameras: Sequence[str]) -> str:
    """Return what topics of a camera begin with: `/` if it is the only one, else `/ID/`."""
    return f"/{ros_name(camera)}/" if len(cameras) > 1 else "/"


def check_names(cameras: Sequence[str]) -> None:
    """Raise PipelineError: the topics of two cameras would be the same."""
    known: dict[str, str] = {}
    for camera in cameras:
        same_topic = known.setdefault(ros_name(camera), camera)
        if same_topic != camera:
            raise PipelineError(
                f"the sources {same_topic!r} and {camera!r} have the same topics in ROS 2,"
                f" /{ros_name(camera)}: give one of them another id."
            )
