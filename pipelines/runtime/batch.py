"""The stages of a batch: preprocess each frame, infer once, decode and give out each result."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from device.engine.manifest import DimRange, TensorInfo
from device.engine.preprocessing import Preprocessing
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.runtime.metrics import Metrics
from pipelines.sinks.events import encode_event, make_event
from pipelines.sinks.table import FrameResult, Sink
from pipelines.sources.take import Pace
from pipelines.stages.decode import Outputs, decode, view_of
from pipelines.stages.preprocess import Geometry, Preprocessor


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
    preprocessing."""

    session: Inference
    labels: tuple[str, ...]
    engine_sha256: str
    preprocessing: Preprocessing | UnsetType = UNSET


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

    def __init__(self, config: PipelineConfig, model: Model) -> None:
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
        self._input = session.inputs[0].name
        shape = (self._size_for(self.room), *config.preprocess.input_shape[1:])
        self._blob = np.zeros(shape, config.preprocess.dtype)
        self._preprocessors = [
            Preprocessor(config.preprocess, self._blob[i : i + 1]) for i in range(self.room)
        ]

    def warm_up(self) -> None:
        """Infer once, so that the first frame does not wait for initialization."""
        begin_s = time.monotonic()
        self._model.session.infer({self._input: self._blob})
        self.warm_up_s = time.monotonic() - begin_s

    def run(self, batch: Sequence[Frame], sinks: Sequence[Sink]) -> Iterator[FrameResult]:
        """Run every stage on a batch; yield each result once the sinks have it."""
        begin_ns = time.monotonic_ns()
        geometries = [self._preprocessors[i].run(frame.image)[1] for i, frame in enumerate(batch)]
        ready_ns = time.monotonic_ns()
        outputs = self._model.session.infer({self._input: self._blob[: self._size_for(len(batch))]})
        inferred_ns = time.monotonic_ns()
        times = {"preprocess": (ready_ns - begin_ns) / 1e6, "infer": (inferred_ns - ready_ns) / 1e6}
        for i, (frame, geometry) in enumerate(zip(batch, geometries, strict=True)):
            wait = {"wait": (begin_ns - frame.t_recv.mono_ns) / 1e6}
            own = {name: output[i : i + 1] for name, output in outputs.items()}
            only = outputs if len(self._blob) == 1 else own
            yield self._finish(frame, geometry, only, {**wait, **times}, sinks)
        self.pace.ran((time.monotonic_ns() - begin_ns) / 1e9)

    def _finish(
        self,
        frame: Frame,
        geometry: Geometry,
        outputs: Outputs,
        times_ms: dict[str, float],
        sinks: Sequence[Sink],
    ) -> FrameResult:
        """Decode one frame's outputs and give the result to the sinks."""
        config = self._config
        begin_ns = time.monotonic_ns()
        view = view_of(geometry, frame.image.shape, config.preprocess)
        decoded = decode(outputs, config.decode, view)
        decoded_ns = time.monotonic_ns()
        times_ms["decode"] = (decoded_ns - begin_ns) / 1e6
        event = make_event(config.name, frame, decoded, self._model.labels, times_ms)
        result = FrameResult(frame, decoded, event, encode_event(event))
        for sink in sinks:
            sink.write(result)
        done_ns = time.monotonic_ns()
        times_ms["sinks"] = (done_ns - decoded_ns) / 1e6
        self.metrics.add(times_ms, (done_ns - frame.t_recv.mono_ns) / 1e6)
        return result

    def _size_for(self, count: int) -> int:
        """Return the batch that the engine takes for so many frames: the rest of it is padding."""
        sizes = self._sizes
        steps = -(-max(count, sizes.min) // sizes.step)
        return min(steps * sizes.step, sizes.max)
