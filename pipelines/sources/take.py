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
    _batch_s: float = 0.0

    def arrived(self, frame: Frame) -> None:
        """Learn from the number and the time of a frame."""
        self._arrivals[frame.camera].append((frame.seq, frame.t_recv.mono_ns))

    def ran(self, seconds: float) -> None:
        """Learn from the time of one batch."""
        first = self._batch_s == 0.0
        self._batch_s += (1.0 if first else SMOOTHING) * (seconds - self._batch_s)

    def window_s(self) -> float:
        """Return how long the first frame of a batch waits for others, in seconds."""
        spans = [(frames[0], frames[-1]) for frames in self._arrivals.values()]
        periods = [
            (last_ns - first_ns) / (last - first) / 1e9
            for (first, first_ns), (last, last_ns) in spans
            if last > first
        ]
        spare_s = min(periods, default=0.0) - self._batch_s
        return min(max(spare_s, WINDOW_S[0]), WINDOW_S[1])


@dataclass(frozen=True, slots=True)
class Admission:
    """Which frames are run: `admits` is asked once for each frame; `expects`, whether a camera
    gives any now."""

    admits: Callable[[Frame], bool] = lambda frame: True
    expects: Callable[[str], bool] = lambda camera: True


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
) -> Iterator[list[Frame]]:
    """Yield batches of up to `room` frames until all sources have ended or the stop event is set.

    Sources take turns, so that none starves the others. The frames of a source stay in order;
    those that `admission` refuses are left out, and no batch waits for a camera that it does not
    expect.
    """
    admission = admission or Admission()
    turn = deque(sources)
    while not waiting.stop.is_set():
        batch = _gather(turn, waiting, room, pace, admission)
        if batch:
            yield batch
        elif all(source.ended for source in sources):
            return


def _gather(
    turn: deque[Source],
    waiting: Waiting,
    room: int,
    pace: Pace,
    admission: Admission,
) -> list[Frame]:
    """Return one batch; empty at the end or stop."""
    batch: list[Frame] = []
    asked: set[str] = set()  # cameras that gave a frame since the batch began, taken or not
    closing_s = float("inf")
    while not waiting.stop.is_set() and len(batch) < room:
        frame = _poll(turn)
        if frame is not None:
            pace.arrived(frame)
            is_taken = admission.admits(frame)
            if is_taken or batch:
                asked.add(frame.camera)
            if not is_taken:
                waiting.tick()
                continue
            batch.append(frame)
            if len(batch) == 1 and room > 1:
                closing_s = time.monotonic() + pace.window_s()
            continue
        if batch and (time.monotonic() >= closing_s or _expected(turn, admission) <= asked):
            break
        if all(source.ended for source in turn):
            break
        _wait(turn, waiting, closing_s)
    return batch


def _poll(turn: deque[Source]) -> Frame | None:
    """Return a frame of the first source that has one, which goes to the end of the line."""
    for _ in range(len(turn)):
        source = turn[0]
        turn.rotate(-1)
        if not source.ended and (frame := source.poll()) is not None:
            return frame
    return None


def _expected(turn: deque[Source], admission: Admission) -> set[str]:
    """Return the cameras that give frames which may be taken."""
    giving = {source.config.id for source in turn if not source.ended and source.away is None}
    return {camera for camera in giving if admission.expects(camera)}


def _wait(turn: deque[Source], waiting: Waiting, closing_s: float) -> None:
    """Wait until a frame arrives or is due, or the batch closes."""
    with waiting.arrived:
        due_s = min(source.due_s for source in turn if not source.ended)
        wait_s = min(due_s, closing_s) - time.monotonic()
        if wait_s > 0.0:
            waiting.arrived.wait(min(wait_s, WAIT_S))
    waiting.tick()
