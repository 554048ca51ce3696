"""Takes frames of one or several sources in turn, and gathers them to batches.

A batch waits for the other cameras no longer than pays: until the fastest camera's next frame
would wait for the engine. It never waits for a camera that is away or paused.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from device.errors import SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame
from pipelines.sources.live import Waiting
from pipelines.sources.table import Source, open_source

WAIT_S = 0.1  # between two calls of a consumer that waits
WINDOW_S = (0.002, 0.1)  # least and longest wait for the rest of a batch
ARRIVALS = 64  # a camera's period is the span of so many frames: gaps between two jitter
SMOOTHING = 0.1  # of the running mean of the time that a batch takes


@dataclass(slots=True)
class Pace:
    """How long a batch may wait, from the cameras' periods and the time that batches take."""

    _arrivals: dict[str, deque[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=ARRIVALS))
    )
    _gaps_ns: deque[float] = field(default_factory=lambda: deque(maxlen=ARRIVALS))
    _batch_s: float = 0.0

    def arrived(self, frame: Frame) -> None:
        """Learn from the number and the time of a frame."""
        arrivals = self._arrivals[frame.camera]
        now_ns = frame.t_recv.mono_ns
        if arrivals and frame.seq > arrivals[-1][0]:
            seq, before_ns = arrivals[-1]
            self._gaps_ns.append((now_ns - before_ns) / (frame.seq - seq))
        arrivals.append((frame.seq, now_ns))

    def ran(self, seconds: float) -> None:
        """Learn from the time of one batch."""
        first = self._batch_s == 0.0
        self._batch_s += (1.0 if first else SMOOTHING) * (seconds - self._batch_s)

    def gap_s(self) -> float:
        """Return the shortest time between two frames of late; 0.0 if none is known yet, or there
        are several cameras, whose frames may come together."""
        return min(self._gaps_ns, default=0.0) / 1e9 if len(self._arrivals) == 1 else 0.0

    def _periods_s(self) -> list[float]:
        spans = [(frames[0], frames[-1]) for frames in self._arrivals.values()]
        return [
            (last_ns - first_ns) / (last - first) / 1e9
            for (first, first_ns), (last, last_ns) in spans
            if last > first
        ]

    def window_s(self) -> float:
        """Return how long the first frame of a batch waits for others, in seconds."""
        spare_s = min(self._periods_s(), default=0.0) - self._batch_s
        return min(max(spare_s, WINDOW_S[0]), WINDOW_S[1])


@dataclass(frozen=True, slots=True)
class Admission:
    """Which frames are run: `admits` is asked once for each frame; `expects`, whether a camera
    gives any now."""

    admits: Callable[[Frame], bool] = lambda frame: True
    expects: Callable[[str], bool] = lambda camera: True


class Engines(Protocol):
    """What runs batches, and when it takes the next one."""

    @property
    def free_s(self) -> float:
        """When the next batch is to be begun, in seconds of `time.monotonic()`; inf: not before
        there are results."""

    @property
    def has_results(self) -> bool:
        """Whether results are to be given out before more frames are taken."""

    @property
    def is_busy(self) -> bool:
        """Whether a batch runs."""

    def took(self, read_s: float) -> None:
        """Learn how long it took to read the frames of a batch."""


class IdleEngines:
    """What takes every batch at once, and gives its results before it takes the next one."""

    free_s = -inf
    has_results = False
    is_busy = False

    def took(self, read_s: float) -> None:
        """Nothing is learnt."""


@contextmanager
def read_frames(config: SourceConfig) -> Iterator[Iterator[Frame]]:
    """Open one source and give the iterator over its frames."""
    waiting = Waiting(threading.Event())
    with open_source(config, waiting) as source:
        yield frames_of(source, waiting)


def frames_of(source: Source, waiting: Waiting) -> Iterator[Frame]:
    """Yield the frames of one source until its end or the stop event."""
    for batch in batches_of([source], waiting, 1, Pace()):
        yield batch[0]


def batches_of(
    sources: Sequence[Source],
    waiting: Waiting,
    room: int,
    pace: Pace,
    admission: Admission | None = None,
    *,
    engines: Engines | None = None,
) -> Iterator[list[Frame]]:
    """Yield batches of up to `room` frames until all sources have ended or the stop event is set,
    and empty lists while `engines` have results.

    What was gathered until then, or until a source fails, is a last batch.

    Sources take turns, so that none starves the others. The frames of a source stay in order;
    those that `admission` refuses are left out, and no batch waits for a camera that it does not
    expect. A frame is taken no sooner than `engines` want it: until then a newer one may come.
    """
    engines = engines or IdleEngines()
    admission = admission or Admission()
    gathering = _Gathering(
        sources, waiting, room=room, pace=pace, admission=admission, engines=engines
    )
    try:
        while not waiting.stop.is_set():
            if engines.has_results:
                yield []
                continue
            batch = gathering.gather()
            if batch:
                yield batch
            elif all(source.ended for source in sources):
                return
    except SourceError:
        yield from gathering.rest()
        raise
    yield from gathering.rest()


class _Gathering:
    """The batch that is gathered from sources that take turns."""

    def __init__(
        self,
        sources: Sequence[Source],
        waiting: Waiting,
        *,
        room: int,
        pace: Pace,
        admission: Admission,
        engines: Engines,
    ) -> None:
        self._turn = deque(sources)
        self._waiting = waiting
        self._room = room
        self._pace = pace
        self._admission = admission
        self._engines = engines
        self._took_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._batch: list[Frame] = []
        self._cameras: set[str] = set()  # cameras that gave a frame since it began, taken or not
        self._closing_s = inf
        self._read_s = 0.0

    def gather(self) -> list[Frame]:
        """Return one batch; empty at the end or stop, or while engines have results: then what is
        gathered stays."""
        self._learn()
        while not self._waiting.stop.is_set() and len(self._batch) < self._room:
            if self._engines.has_results:
                return []
            free_s = -inf if self._batch else self._engines.free_s
            if time.monotonic() >= free_s:
                begin_s = time.monotonic()
                frame = self._poll()
                if frame is not None:
                    self._read_s += time.monotonic() - begin_s
                    self._add(frame)
                    continue
                if self._batch and self._is_complete():
                    break
            if all(source.ended for source in self._turn):
                break
            self._wait(free_s)
        batch, self._took_s = self._batch, self._read_s if self._batch else 0.0
        self._begin()
        return batch

    def _learn(self) -> None:
        """Learn from the batch before, which was not to wait for that."""
        if self._took_s:
            self._engines.took(self._took_s)
            self._took_s = 0.0

    def rest(self) -> Iterator[list[Frame]]:
        """Yield what is gathered when no more frames are taken: these were taken, and counted."""
        if self._batch:
            yield self._batch

    def _add(self, frame: Frame) -> None:
        """Add a frame that is to be run."""
        is_taken = self._admission.admits(frame)
        self._pace.arrived(frame)
        if is_taken or self._batch:
            self._cameras.add(frame.camera)
        if not is_taken:
            self._tick()
            return
        self._batch.append(frame)
        if len(self._batch) == 1 and self._room > 1:
            self._closing_s = time.monotonic() + self._pace.window_s()

    def _poll(self) -> Frame | None:
        """Return a frame of the first source that has one, which goes to the end of the line."""
        for _ in range(len(self._turn)):
            source = self._turn[0]
            self._turn.rotate(-1)
            if not source.ended and (frame := source.poll()) is not None:
                return frame
        return None

    def _is_complete(self) -> bool:
        """Whether no more frames are to be waited for."""
        if time.monotonic() >= self._closing_s:
            return True
        giving = {one.config.id for one in self._turn if not one.ended and one.away is None}
        return {camera for camera in giving if self._admission.expects(camera)} <= self._cameras

    def _wait(self, free_s: float) -> None:
        """Wait until a frame may be taken that is there or is due, the batch closes, or engines
        have results."""
        self._tick()  # not afterwards: a frame would wait for it
        with self._waiting.arrived:
            due_s = min(source.due_s for source in self._turn if not source.ended)
            wait_s = min(max(due_s, free_s), self._closing_s) - time.monotonic()
            if wait_s > 0.0 and not self._engines.has_results:
                self._waiting.arrived.wait(min(wait_s, WAIT_S))

    def _tick(self) -> None:
        # An engine that hangs must not look alive: while it runs, only its results are a sign.
        if not self._engines.is_busy:
            self._waiting.tick()
