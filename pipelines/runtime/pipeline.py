"""A camera pipeline: source -> preprocess -> infer -> decode -> sinks, one frame at a time.

One frame is in flight and the source keeps one more, the latest: the engine is never idle and no
frame is older than one inference and one frame period when its turn comes.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from device.engine.manifest import TensorInfo
from device.engine.preprocessing import Preprocessing
from device.protocol.messages import ChildMessage, Ready, Result, Stats
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.runtime.heart import Heart
from pipelines.runtime.metrics import Metrics
from pipelines.sinks.events import encode_event, make_event
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import Broker, FrameResult, Sink, SinkContext, open_sink
from pipelines.sources.live import Waiting
from pipelines.sources.table import Source, open_source
from pipelines.stages.decode import decode, view_of
from pipelines.stages.fit import check_fit
from pipelines.stages.preprocess import Preprocessor
from pipelines.stages.preprocess_check import check_preprocessing
from pipelines.vision import cv2

STATS_S = 1.0
_LOG = logging.getLogger(__name__)


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


def run_pipeline(
    config: PipelineConfig,
    model: Model,
    *,
    emit: Callable[[ChildMessage], None],
    stop: threading.Event,
    broker: Broker | None = None,
    files: OutputFiles | None = None,
    patient: bool = False,
    frames: int | None = None,
    watch: Callable[[FrameResult], None] | None = None,
) -> int:
    """Run until the source ends, `stop` is set or `frames` frames are done; return their count.

    `emit` takes Ready, Result after the first frame, Heartbeats, Stats once a second (from another
    thread) and at the end. `watch` sees every result. `files`: where sinks may write. `patient`: a
    camera that is away at the start is waited for. Raises TandemError where the pipeline cannot go
    on.
    """
    check_fit(config, model.session.inputs, model.session.outputs, model.labels)
    warning = check_preprocessing(config, model.preprocessing)
    if warning is not None:
        _LOG.warning(warning)
    cv2.setNumThreads(1)  # a second thread gains nothing at these sizes and adds jitter
    runner = _Runner(config, model)
    runner.warm_up()
    with ExitStack() as stack:
        context = SinkContext(model.labels, broker, files or OutputFiles())
        sinks = [stack.enter_context(open_sink(sink, context)) for sink in config.sinks]
        heart = Heart(emit)
        waiting = Waiting(stop, heart.tick, patient)
        source = stack.enter_context(open_source(config.source, waiting))
        emit(_ready(config, model, runner.warm_up_s))
        heart.watch(source, sinks)
        reporter = _Reporter(runner.metrics, source, sinks, emit)
        try:
            return _run_frames(
                source, runner, sinks, emit=emit, heart=heart, frames=frames, watch=watch
            )
        finally:
            reporter.close()


def _ready(config: PipelineConfig, model: Model, warm_up_s: float) -> Ready:
    reports = model.session.reports
    segments = tuple(
        f"{report.segment} ({report.processor}): {report.reason}" for report in reports
    )
    return Ready(
        pipeline=config.name,
        engine_sha256=model.engine_sha256,
        segments=segments,
        warm_up_s=round(warm_up_s, 3),
        degraded=tuple(report.degraded for report in reports if report.degraded),
    )


def _run_frames(
    source: Source,
    runner: "_Runner",
    sinks: Sequence[Sink],
    *,
    emit: Callable[[ChildMessage], None],
    heart: Heart,
    frames: int | None,
    watch: Callable[[FrameResult], None] | None,
) -> int:
    count = 0
    for frame in source:
        result = runner.run(frame, sinks)
        count += 1
        if count == 1:
            emit(Result(seq=frame.seq, latency_ms=result.event.latency_ms["total"]))
        heart.frame_done()
        if watch is not None:
            watch(result)
        if frames is not None and count >= frames:
            break
    return count


class _Runner:
    """The stages of one frame, timed."""

    def __init__(self, config: PipelineConfig, model: Model) -> None:
        self.metrics = Metrics()
        self.warm_up_s = 0.0
        self._config = config
        self._model = model
        self._input = model.session.inputs[0].name
        self._preprocessor = Preprocessor(config.preprocess)

    def warm_up(self) -> None:
        """Infer once, so that the first frame does not wait for initialization."""
        config = self._config.preprocess
        begin_s = time.monotonic()
        self._model.session.infer({self._input: np.zeros(config.input_shape, config.dtype)})
        self.warm_up_s = time.monotonic() - begin_s

    def run(self, frame: Frame, sinks: Sequence[Sink]) -> FrameResult:
        """Run every stage on one frame."""
        times = [time.monotonic_ns()]
        blob, geometry = self._preprocessor.run(frame.image)
        times.append(time.monotonic_ns())
        outputs = self._model.session.infer({self._input: blob})
        times.append(time.monotonic_ns())
        view = view_of(geometry, frame.image.shape, self._config.preprocess)
        decoded = decode(outputs, self._config.decode, view)
        times.append(time.monotonic_ns())
        stages = {"wait": (times[0] - frame.t_recv.mono_ns) / 1e6}
        for i, stage in enumerate(("preprocess", "infer", "decode")):
            stages[stage] = (times[i + 1] - times[i]) / 1e6
        event = make_event(self._config.name, frame, decoded, self._model.labels, stages)
        result = FrameResult(frame, decoded, event, encode_event(event))
        for sink in sinks:
            sink.write(result)
        done = time.monotonic_ns()
        stages["sinks"] = (done - times[-1]) / 1e6
        self.metrics.add(stages, (done - frame.t_recv.mono_ns) / 1e6)
        return result


class _Reporter:
    """Emits Stats once a second, also without frames, and once more at the end."""

    def __init__(
        self,
        metrics: Metrics,
        source: Source,
        sinks: Sequence[Sink],
        emit: Callable[[ChildMessage], None],
    ) -> None:
        self._metrics = metrics
        self._droppers: tuple[Source | Sink, ...] = (source, *sinks)
        self._emit = emit
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, name="stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Emit the last figures and stop."""
        self._done.set()
        self._thread.join()
        self._emit(self._stats())

    def _report(self) -> None:
        while not self._done.wait(STATS_S):
            self._emit(self._stats())

    def _stats(self) -> Stats:
        dropped: Counter[str] = Counter()
        for dropper in self._droppers:
            dropped.update(dropper.dropped)
        return self._metrics.take(dropped)
