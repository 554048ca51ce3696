"""The stages of a batch: preprocess each frame, infer once, decode and give out each result."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from device.engine.manifest import DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing
from device.runtime.frames import FrameOpener
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.results import Decoded
from pipelines.runtime.feed import Crop, DeviceFeed, Feed, HostFeed
from pipelines.runtime.metrics import Metrics
from pipelines.sinks.controls import Controls
from pipelines.sinks.events import FrameFacts, encode_event, make_event
from pipelines.sinks.table import FrameResult, Sink
from pipelines.sources.table import Source
from pipelines.sources.take import Pace
from pipelines.stages.decode import decode, view_of
from pipelines.stages.decoder_inputs import constant_inputs
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.scene import Scene


class Report(Protocol):
    """How one segment of the engine runs here."""

    @property
    def segment(self) -> str: ...
    @property
    def processor(self) -> str: ...
    @property
    def implementation(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def degraded(self) -> str: ...


class Inference(Protocol):
    """What a pipeline needs of `device.runtime.session.Session`."""

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...
    @property
    def dims(self) -> tuple[DimRange, ...]: ...
    @property
    def reports(self) -> Sequence[Report]: ...
    def infer(self, feeds: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """An open session with the names of its classes, and of its engine file the hash and the
    preprocessing. `frames` opens the input that makes itself of frames, where the GPU does that."""

    session: Inference
    labels: tuple[str, ...]
    engine_sha256: str
    preprocessing: Preprocessing | UnsetType = UNSET
    frames: FrameOpener | None = None


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


class BatchRunner:
    """The stages of up to `room` frames, timed."""

    def __init__(
        self, config: PipelineConfig, model: Model, controls: Controls | None = None
    ) -> None:
        session = model.session
        sizes = batch_sizes(session)
        most = len(config.cameras) if config.batch is UNSET else config.batch
        self.room = min(most, sizes.max)
        self.metrics = Metrics()
        self.pace = Pace()
        self.warm_up_s = 0.0
        self._sizes = sizes
        self._config = config
        self._model = model
        constants = constant_inputs(config.decode, config.preprocess)
        image = next(i.name for i in session.inputs if i.name not in constants)
        self._largest = self._size_for(self.room)
        others = {n: np.repeat(value, self._largest, axis=0) for n, value in constants.items()}
        self._feed: Feed
        if model.frames is None:
            self._feed = HostFeed(config.preprocess, session.infer, image, self._largest, others)
        else:
            self._feed = DeviceFeed(config.preprocess, model.frames(self._largest, others))
        self._scenes = {camera.id: Scene(config, model.labels) for camera in config.cameras}
        self._sources: Mapping[str, Source] = {}
        self._controls = controls or Controls()
        self._processors = tuple(dict.fromkeys(report.processor for report in session.reports))

    def warm_up(self) -> None:
        """Infer once, so that the first frame does not wait for initialization."""
        begin_s = time.monotonic()
        self._feed.infer(self._largest)
        self.warm_up_s = time.monotonic() - begin_s

    def close(self) -> None:
        """Free what the engine's inputs took."""
        self._feed.close()

    def watch_drops(self, sources: Sequence[Source]) -> None:
        """Let results say what each of the sources dropped, in the order of the pipeline's."""
        cameras = (camera.id for camera in self._config.cameras)
        self._sources = dict(zip(cameras, sources, strict=True))

    def run(self, batch: Sequence[Frame], sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Run every stage on a batch; yield each result once the sinks have it."""
        begin_ns = time.monotonic_ns()
        crops: dict[int, Crop] = {}
        for i, frame in enumerate(batch):
            scene = self._scene_of(frame)
            if scene.is_due():
                crops[i] = self._feed.put(len(crops), frame, scene)
        ready_ns = time.monotonic_ns()
        outputs: Outputs = {}
        if crops:
            outputs = self._feed.infer(self._size_for(len(crops)))
        inferred_ns = time.monotonic_ns()
        times = {"preprocess": (ready_ns - begin_ns) / 1e6, "infer": (inferred_ns - ready_ns) / 1e6}
        for i, frame in enumerate(batch):
            wait = {"wait": (begin_ns - frame.t_recv.mono_ns) / 1e6}
            crop = crops.get(i)
            if crop is None:
                yield self._fill_in(frame, wait, sinks)
                continue
            rows = slice(crop.row, crop.row + 1)
            own = {name: output[rows] for name, output in outputs.items()}
            only = outputs if self._largest == 1 else own
            facts = FrameFacts((ready_ns, inferred_ns))
            yield self._finish(frame, crop, only, {**wait, **times}, facts, sinks)
        self.pace.ran((time.monotonic_ns() - begin_ns) / 1e9)

    def _finish(  # noqa: PLR0917
        self,
        frame: Frame,
        crop: Crop,
        outputs: Outputs,
        times_ms: dict[str, float],
        facts: FrameFacts,
        sinks: Sequence[Sink],
    ) -> FrameResult:
        """Decode one frame's outputs and give the result to the sinks."""
        begin_ns = time.monotonic_ns()
        view = view_of(crop.geometry, crop.shape, self._config.preprocess)
        decoded = decode(outputs, self._config.decode, view)
        decoded_ns = time.monotonic_ns()
        times_ms["decode"] = (decoded_ns - begin_ns) / 1e6
        decoded = self._controls.filtered(decoded, frame.camera)
        decoded, zones = self._scene_of(frame).follow(decoded, frame, crop.x, crop.y)
        if self._config.tracker is not UNSET:
            times_ms["track"] = (time.monotonic_ns() - decoded_ns) / 1e6
        return self._give(frame, decoded, times_ms, replace(facts, zones=zones), sinks)

    def _fill_in(
        self, frame: Frame, times_ms: dict[str, float], sinks: Sequence[Sink]
    ) -> FrameResult:
        """Give out where the tracks are in a frame that the engine does not see."""
        begin_ns = time.monotonic_ns()
        decoded, zones = self._scene_of(frame).predict(frame)
        times_ms["track"] = (time.monotonic_ns() - begin_ns) / 1e6
        return self._give(frame, decoded, times_ms, FrameFacts(predicted=True, zones=zones), sinks)

    def _give(
        self,
        frame: Frame,
        decoded: Decoded,
        times_ms: dict[str, float],
        facts: FrameFacts,
        sinks: Sequence[Sink],
    ) -> FrameResult:
        begin_ns = time.monotonic_ns()
        source = self._sources.get(frame.camera)
        dropped = {} if source is None else source.dropped
        used = () if facts.predicted else self._processors
        facts = replace(facts, processors=used, dropped=dropped)
        event = make_event(self._config.name, frame, decoded, self._model.labels, times_ms, facts)
        result = FrameResult(frame, decoded, event, encode_event(event), facts.zones)
        for sink in sinks:
            sink.write(result)
        done_ns = time.monotonic_ns()
        times_ms["sinks"] = (done_ns - begin_ns) / 1e6
        self.metrics.add(times_ms, (done_ns - frame.t_recv.mono_ns) / 1e6)
        return result

    def _scene_of(self, frame: Frame) -> Scene:
        return self._scenes[frame.camera]

    def _size_for(self, count: int) -> int:
        """Return the batch that the engine takes for so many frames: the rest of it is padding."""
        sizes = self._sizes
        steps = -(-max(count, sizes.min) // sizes.step)
        return min(steps * sizes.step, sizes.max)
