"""One model in the loop: images become inputs, one inference of many, and decoded results.

Each session of its engine is a `Lane`: a thread that infers, and inputs for a batch that runs and
for the next one, which is made meanwhile. Inferences take the lanes in turn.
"""

import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from device.engine.manifest import DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing
from device.runtime.frames import FrameOpener
from pipelines.decode_config import DecodeConfig
from pipelines.model_config import PipelineModel
from pipelines.results import Decoded, ModelRun
from pipelines.runtime.feed import Arrays, DeviceFeed, Feed, HostFeed, Picture, Placed
from pipelines.stages.decode import View, constant_inputs, decode, view_of
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.fit import EngineFacts

FEEDS = 2  # of a session: one is read by the engine, the next one is made


class Report(Protocol):
    """How one segment of the engine runs here."""

    @property
    def segment(self) -> str:
        """The segment's name."""

    @property
    def processor(self) -> str:
        """The processor that the plan chose: `gpu`, `dla0` or `dla1`."""

    @property
    def runs_on(self) -> tuple[str, ...]:
        """The processors that run it here; DLA cores may take turns."""

    @property
    def implementation(self) -> str:
        """`cuda`, `tensorrt` or `portable`."""

    @property
    def reason(self) -> str:
        """Why no better implementation runs; empty if the best one does."""

    @property
    def degraded(self) -> str:
        """Why a Jetson does not run it as planned; empty elsewhere, and if it does."""


class Inference(Protocol):
    """What a pipeline needs of `device.runtime.session.Session`."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The engine's inputs, in its order."""

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The engine's outputs, in its order."""

    @property
    def dims(self) -> tuple[DimRange, ...]:
        """The ranges of the named sizes of dynamic shapes."""

    @property
    def reports(self) -> Sequence[Report]:
        """How each segment runs here."""

    def infer(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Run arrays of the dtypes and shapes of `inputs`; SessionError if one does not fit."""


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """A session of a model's engine, on a DLA core of its own. `frames` opens the input that makes
    itself of frames, where the GPU does that."""

    session: Inference
    frames: FrameOpener | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """An open session with the names of its classes, and of its engine file the hash and the
    preprocessing. `frames`: see `SessionHandle`; `turns`: further sessions of the engine, where
    frames take turns on the DLA cores; `predicted_us`: the plan's time of each processor for a
    frame."""

    session: Inference
    labels: tuple[str, ...]
    engine_sha256: str
    preprocessing: Preprocessing | UnsetType = UNSET
    frames: FrameOpener | None = None
    turns: tuple[SessionHandle, ...] = ()
    predicted_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[SessionHandle, ...]:
        """All sessions, in the order in which inferences take them."""
        return (SessionHandle(self.session, self.frames), *self.turns)

    @property
    def facts(self) -> EngineFacts:
        """What a pipeline is checked against."""
        session = self.session
        return EngineFacts(
            session.inputs, session.outputs, self.labels, session.dims, self.preprocessing
        )


def batch_sizes(session: Inference) -> DimRange:
    """Return the batches that a session takes, from the first dimension of its input.

    It is 1 where an output does not have a row for each image.
    """
    first = session.inputs[0].shape[0]
    if isinstance(first, int):
        return DimRange(name="", min=first, opt=first, max=first)
    one = DimRange(name="", min=1, opt=1, max=1)
    if first is None or any(info.shape[:1] != (first,) for info in session.outputs):
        return one
    return next((dim for dim in session.dims if dim.name == first), one)


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """What a network gave for one image, in a run that others may share."""

    network: "Network"
    outputs: Outputs
    view: View
    run: ModelRun

    def decoded(self) -> Decoded:
        """Return the results, in pixels of the image."""
        return decode(self.outputs, self.network.decode, self.view)


class PendingResults(Protocol):
    """What a run of a network gives: a Future, or a `Done`."""

    def result(self) -> list[InferenceResult]:
        """Wait for the results. Raises what the engine has raised."""


@dataclass(frozen=True, slots=True)
class Done:
    """Results that are there: a frame would wait for the locks of a Future."""

    results: list[InferenceResult]

    def result(self) -> list[InferenceResult]:
        """Return them."""
        return self.results


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A batch that is ready for the engine."""

    feed: Feed
    places: tuple[Placed, ...]
    begin_ns: int
    ready_ns: int


class Lane:
    """One session: its inputs, two batches of them, and the one thread that infers."""

    def __init__(self, feeds: Sequence[Feed], processors: tuple[str, ...]) -> None:
        self.processors = processors
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._feeds = feeds
        self._free: queue.SimpleQueue[Feed] = queue.SimpleQueue()
        for feed in feeds:
            self._free.put(feed)

    def warm_up(self, count: int) -> None:
        """Infer once, so that the first frame does not wait for initialization."""
        self.thread.submit(self._feeds[0].infer, count).result()

    def prepare(self, pictures: Sequence[Picture]) -> _Inputs:
        """Make inputs of pictures; waits until those of an earlier batch are free."""
        feed = self._free.get()
        begin_ns = time.monotonic_ns()
        try:
            places = tuple(feed.put(row, picture) for row, picture in enumerate(pictures))
        except BaseException:
            self._free.put(feed)
            raise
        return _Inputs(feed, places, begin_ns, time.monotonic_ns())

    def infer(self, inputs: _Inputs, count: int) -> tuple[Outputs, tuple[int, int]]:
        """Run the engine on `count` images in its thread, and free their inputs; return the
        outputs, and when it began and ended."""
        begin_ns = time.monotonic_ns()
        try:
            outputs = inputs.feed.infer(count)
        finally:
            self._free.put(inputs.feed)
        return outputs, (begin_ns, time.monotonic_ns())

    def close(self) -> None:
        """Wait for the inference that runs, and free what the inputs took."""
        self.thread.shutdown(cancel_futures=True)
        for feed in self._feeds:
            feed.close()


class Network:
    """One engine for up to `room` images an inference. One thread starts inferences."""

    def __init__(self, config: PipelineModel, model: Model, most: int) -> None:
        """`most`: the most images at once; more of them run in several inferences."""
        self._name = config.replaces or config.name
        self._sizes = batch_sizes(model.session)
        self.room = min(most, self._sizes.max)
        self.labels = model.labels
        self.decode: DecodeConfig = config.reading
        self._preprocess = config.feeding
        self._largest = self._size_for(self.room)
        constants = constant_inputs(config.reading, config.feeding)
        others = {n: np.repeat(value, self._largest, axis=0) for n, value in constants.items()}
        self.lanes = tuple(
            Lane([self._open_feed(turn, others) for _ in range(FEEDS)], _processors(turn.session))
            for turn in model.lanes
        )
        self._inferences = 0

    def _open_feed(self, turn: SessionHandle, others: Arrays) -> Feed:
        if turn.frames is not None:
            return DeviceFeed(self._preprocess, turn.frames(self._largest, others))
        session = turn.session
        name = next(i.name for i in session.inputs if i.name not in others)
        return HostFeed(self._preprocess, session.infer, name, self._largest, others)

    def warm_up(self) -> None:
        """Infer once with each session."""
        for lane in self.lanes:
            lane.warm_up(self._largest)

    def close(self) -> None:
        """Wait for what runs, and free what the inputs took."""
        for lane in self.lanes:
            lane.close()

    def see(self, pictures: Sequence[Picture]) -> list[InferenceResult]:
        """Return what the network gives for pictures."""
        here = len(pictures) <= self.room  # nothing to do meanwhile
        return [one for future in self.start(pictures, here=here) for one in future.result()]

    def start(self, pictures: Sequence[Picture], *, here: bool = False) -> list[PendingResults]:
        """Make inputs of pictures, and let the engine begin; the results are in their order.

        `here`: infer in the caller's thread, so that all is done on return: two changes of threads
        are saved.
        """
        started: list[PendingResults] = []
        for chunk in self._chunks(pictures):
            lane = self._next_lane()
            inputs = lane.prepare(chunk)
            if here:
                started.append(Done(self._infer(lane, inputs)))
            else:
                started.append(lane.thread.submit(self._infer, lane, inputs))
        return started

    def start_whole(self, pictures: Sequence[Picture]) -> Future[list[tuple[ModelRun, Decoded]]]:
        """Let the thread of a lane do everything: inputs, inference and decoding."""
        lane = self._next_lane()
        return lane.thread.submit(self._infer_and_decode, lane, pictures)

    def _infer_and_decode(
        self, lane: Lane, pictures: Sequence[Picture]
    ) -> list[tuple[ModelRun, Decoded]]:
        begin_ns = time.monotonic_ns()
        decoded = [
            (one.run, one.decoded())
            for chunk in self._chunks(pictures)
            for one in self._infer(lane, lane.prepare(chunk))
        ]
        span_ns = (begin_ns, time.monotonic_ns())
        return [(replace(run, span_ns=span_ns), one) for run, one in decoded]

    def _chunks(self, pictures: Sequence[Picture]) -> Iterator[Sequence[Picture]]:
        for start in range(0, len(pictures), self.room):
            yield pictures[start : start + self.room]

    def _next_lane(self) -> Lane:
        lane = self.lanes[self._inferences % len(self.lanes)]
        self._inferences += 1
        return lane

    def _infer(self, lane: Lane, inputs: _Inputs) -> list[InferenceResult]:
        places = inputs.places
        outputs, infer_ns = lane.infer(inputs, self._size_for(len(places)))
        run = ModelRun(
            model=self._name,
            processors=lane.processors,
            span_ns=(inputs.begin_ns, infer_ns[1]),
            ready_ns=inputs.ready_ns,
            infer_ns=infer_ns,
        )
        results = []
        for row, placed in enumerate(places):
            frame_outputs = outputs
            if self._largest > 1:
                frame_outputs = {name: output[row : row + 1] for name, output in outputs.items()}
            view = view_of(placed.geometry, placed.shape, self._preprocess)
            results.append(InferenceResult(self, frame_outputs, view, run))
        return results

    def _size_for(self, count: int) -> int:
        """Return the batch that the engine takes for so many images: the rest of it is padding."""
        sizes = self._sizes
        steps = -(-max(count, sizes.min) // sizes.step)
        return min(steps * sizes.step, sizes.max)


def _processors(session: Inference) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for report in session.reports for name in report.runs_on))
