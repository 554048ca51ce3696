"""Batches in flight: the engine works on one while the loop finishes the one before and makes the
inputs of the next.

A frame that waits for an engine gets old, so it is taken just in time: when the engine is about to
be free, by the time that batches take. Results come in the order in which frames were taken.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median
from typing import Any, Protocol

from device.errors import SourceError
from pipelines.frame import Frame
from pipelines.runtime.batch import BatchRunner, Started
from pipelines.sinks.result import FrameResult, Sink
from pipelines.sources.batching import Admission, batches_of
from pipelines.sources.live import Waiting
from pipelines.sources.table import Source

RECENT = 9  # batches of which the usual times are known
EARLY = 1.2  # a batch is begun so many times its own time before the engine is free,
EARLY_S = 0.0005  # and this much more: an engine that waits costs more than a frame's age

UNHURRIED = 1.5  # times the time of a frame from its reading to its result


class _RunningMedian:
    """The median of the last times, in seconds: one that the machine held up does not count."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=RECENT)
        self.value_s = 0.0

    def add(self, seconds: float) -> None:
        self._times_s.append(seconds)
        self.value_s = median(self._times_s)


@dataclass(slots=True)
class _Progress:
    """How many models of a batch are not done, and when the last one was."""

    running: int
    done_s: float


@dataclass(slots=True)
class _PendingBatch:
    """A batch that was started at `begin_s`, for which the loop took `own_s` so far."""

    started: Started
    begin_s: float
    own_s: float
    progress: _Progress

    @property
    def size(self) -> int:
        """The frames of the batch."""
        return len(self.started.inferences)


@dataclass(slots=True)
class _Costs:
    """What batches take: the engines by the number of frames, all that the loop does itself, and of
    that reading, and making inputs."""

    engines: defaultdict[int, _RunningMedian] = field(
        default_factory=lambda: defaultdict(_RunningMedian)
    )
    loop: _RunningMedian = field(default_factory=_RunningMedian)
    read: _RunningMedian = field(default_factory=_RunningMedian)
    prepare: _RunningMedian = field(default_factory=_RunningMedian)

    def ahead_s(self) -> float:
        """Return how long before the engine is free a batch is begun."""
        return EARLY * (self.read.value_s + self.prepare.value_s) + EARLY_S


class InFlightQueue:
    """The batches in flight of one runner: as many as it runs at the same time, and one more."""

    def __init__(self, runner: BatchRunner, waiting: Waiting) -> None:
        """`waiting.arrived` is notified when a batch is done."""
        self._runner = runner
        self._arrived = waiting.arrived
        self._pending: deque[_PendingBatch] = deque()
        self._done_s: deque[float] = deque(maxlen=RECENT)  # when the last batches were done
        self._costs = _Costs()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is in flight."""
        return bool(self._pending)

    @property
    def has_results(self) -> bool:
        """Whether the oldest batch is done."""
        return bool(self._pending) and not self._pending[0].progress.running

    @property
    def free_s(self) -> float:
        """When the next batch is to be begun, in seconds of `time.monotonic()`: now where an engine
        is idle, inf where none will be before a batch is done."""
        lanes = self._runner.lanes
        if len(self._pending) < lanes:
            return -inf
        if len(self._pending) > lanes:
            return inf
        oldest = self._pending[0]
        engine = self._costs.engines.get(oldest.size)
        if engine is None:
            return inf
        return self._engine_from_s(oldest) + engine.value_s - self._costs.ahead_s()

    def _engine_from_s(self, oldest: _PendingBatch) -> float:
        """Return when the oldest batch got its engine."""
        lanes = self._runner.lanes  # another network may have more or fewer
        # The engine had the batch before which so many others were begun, as batches take turns.
        before_s = self._done_s[-lanes] if len(self._done_s) >= lanes else -inf
        return max(oldest.begin_s + oldest.own_s, before_s)

    def took(self, read_s: float) -> None:
        """Learn how long it took to read the frames of a batch."""
        self._costs.read.add(read_s)

    def start(self, batch: Sequence[Frame]) -> None:
        """Let the models begin with a batch."""
        begin_s = time.monotonic()
        started = self._runner.start(batch, here=self._is_unhurried(len(batch)))
        now_s = time.monotonic()
        futures = started.futures
        progress = _Progress(len(futures), now_s)
        self._pending.append(_PendingBatch(started, begin_s, now_s - begin_s, progress))
        for future in futures:  # it keeps its callback's arguments: not the batch's arrays
            future.add_done_callback(partial(self._model_done, progress))

    def _is_unhurried(self, size: int) -> bool:
        """Whether the result is there long before the next frame: no work could overlap."""
        engine = self._costs.engines.get(size)
        if self._pending or engine is None:
            return False
        usual_s = engine.value_s + self._costs.read.value_s + self._costs.loop.value_s
        return self._runner.pace.gap_s() > UNHURRIED * usual_s

    def _model_done(self, progress: _Progress, _: Future[Any]) -> None:
        with self._arrived:
            if progress.running == 1:
                progress.done_s = time.monotonic()  # before `finish` can see that none runs
            progress.running -= 1
            if not progress.running:
                self._arrived.notify_all()

    def finish(self, sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Yield the results of the oldest batch; waits for its models if they are not done."""
        pending = self._pending[0]
        if pending.progress.running:
            with self._arrived:
                self._arrived.wait_for(lambda: not pending.progress.running)
        self._pending.popleft()
        begin_s = time.monotonic()
        yield from self._runner.finish(pending.started, sinks)
        finish_s = time.monotonic() - begin_s
        # Learns by what was spent before the engine began: what came after it is added below.
        engine_s = self._learn(pending) if pending.started.first else 0.0
        pending.own_s += finish_s
        if pending.started.here:
            pending.own_s -= engine_s
        self._costs.loop.add(pending.own_s)
        self._runner.pace.ran(max(pending.own_s, engine_s))

    def finish_all(self, sinks: Callable[[], Sequence[Sink]]) -> Iterator[FrameResult]:
        """Yield the results of all batches; afterwards none is in flight."""
        while self._pending:
            yield from self.finish(sinks())

    def _learn(self, pending: _PendingBatch) -> float:
        """Learn from a batch that the first model has seen; return how long engines took."""
        started = pending.started
        done_s = pending.progress.done_s
        engine_s = done_s - self._engine_from_s(pending)
        if started.here:
            engine_s = started.infer_s()
        self._costs.engines[pending.size].add(engine_s)
        self._costs.prepare.add(started.prepare_s())
        self._done_s.append(done_s)
        return engine_s


class Changes(Protocol):
    """What changes only while no batch is in flight."""

    @property
    def are_due(self) -> bool:
        """Whether there are any."""

    def take(self) -> None:
        """Take them."""


def run_frames(
    sources: Sequence[Source],
    waiting: Waiting,
    runner: BatchRunner,
    sinks: Callable[[], Sequence[Sink]],
    *,
    admission: Admission | None = None,
    changes: Changes | None = None,
    frames: int | None = None,
) -> Iterator[FrameResult]:
    """Run the frames of sources until they end, the stop event is set or `frames` were taken; yield
    each result once the sinks have it. All frames that were taken have one."""
    flight = InFlightQueue(runner, waiting)
    count = 0
    batches = batches_of(
        sources,
        waiting,
        room=runner.room,
        pace=runner.pace,
        admission=admission,
        engines=flight,
    )
    try:
        for batch in batches:
            if changes is not None and changes.are_due:
                yield from flight.finish_all(sinks)
                changes.take()
            if batch:
                taken = batch[: None if frames is None else frames - count]
                count += len(taken)
                flight.start(taken)
            while flight.has_results:
                yield from flight.finish(sinks())
            if count == frames:
                break
    except SourceError:  # the frames of before are whole
        yield from flight.finish_all(sinks)
        raise
    yield from flight.finish_all(sinks)
