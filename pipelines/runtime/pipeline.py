"""A camera pipeline: sources -> preprocess -> infer -> decode -> sinks, a batch at a time.

One batch is in flight and each source keeps one more frame, the latest: the engine is never idle
and no frame is older than one inference and one frame period when its turn comes.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from msgspec import UNSET

from device.protocol.messages import ChildMessage, Ready, Result, Stats
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.heart import Heart
from pipelines.runtime.load_control import LoadControl
from pipelines.runtime.metrics import Metrics
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_zones import places_of
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import (
    Broker,
    FrameResult,
    Sink,
    SinkContext,
    StatsSink,
    open_sink,
)
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.sources.take import Admission, batches_of
from pipelines.stages.fit import check_fit
from pipelines.stages.preprocess_check import check_preprocessing
from pipelines.vision import cv2

STATS_S = 1.0
_LOG = logging.getLogger(__name__)


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
    """Run `iter_results` to its end; return the number of frames. `watch` sees every result."""
    count = 0
    for result in iter_results(
        config,
        model,
        emit=emit,
        stop=stop,
        broker=broker,
        files=files,
        patient=patient,
        frames=frames,
    ):
        count += 1
        if watch is not None:
            watch(result)
    return count


def iter_results(
    config: PipelineConfig,
    model: Model,
    *,
    emit: Callable[[ChildMessage], None],
    stop: threading.Event,
    broker: Broker | None = None,
    files: OutputFiles | None = None,
    patient: bool = False,
    frames: int | None = None,
) -> Generator[FrameResult, None, None]:
    """Yield each result until the source ends, `stop` is set or `frames` frames are done.

    The pipeline starts with the first result that is asked for; closing the iterator ends it.
    `emit` takes Ready, Result after the first frame, Heartbeats, Stats once a second (from another
    thread) and at the end. `files`: where sinks may write. `patient`: a camera that is
    away at the start is waited for. Raises TandemError where the pipeline cannot go on.
    """
    check_fit(config, model.session.inputs, model.session.outputs, model.labels)
    warning = check_preprocessing(config, model.preprocessing)
    if warning is not None:
        _LOG.warning(warning)
    cv2.setNumThreads(1)  # a second thread gains nothing at these sizes and adds jitter
    controls = Controls()
    runner = BatchRunner(config, model, controls)
    with ExitStack() as stack:
        stack.callback(runner.close)
        runner.warm_up()
        context = SinkContext(
            labels=model.labels,
            broker=broker,
            files=files or OutputFiles(),
            controls=controls,
            cameras=tuple(camera.id for camera in config.cameras),
            lost_s=config.lost_s,
            places=places_of(config),
        )
        sinks = [stack.enter_context(open_sink(sink, context)) for sink in config.sinks]
        control = None if config.load is UNSET else LoadControl(config.load)
        heart = Heart(emit, control)
        waiting = Waiting(stop, heart.tick, patient)
        sources = [stack.enter_context(open_source(camera, waiting)) for camera in config.cameras]
        runner.watch_drops(sources)
        emit(_ready(config, model, runner.warm_up_s))
        heart.watch(sources, sinks)
        droppers: list[Dropper] = [*sources, *sinks, controls, *([control] if control else ())]
        reporter = _Reporter(runner.metrics, droppers, sinks, emit)
        stack.callback(reporter.close)

        def admits(frame: Frame) -> bool:
            return controls.admits(frame.camera) and (control is None or control.admits(frame))

        admission = Admission(admits, controls.is_on)
        batches = batches_of(sources, waiting, runner.room, runner.pace, admission)
        first = True
        for result in _results_of(batches, runner, sinks, frames):
            latency_ms = result.event.latency_ms["total"]
            if first:
                emit(Result(seq=result.frame.seq, latency_ms=latency_ms))
                first = False
            # Frames that are filled in take no time: they would hide a slow engine.
            heart.frame_done(None if result.event.predicted is True else latency_ms)
            yield result


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


def _results_of(
    batches: Iterator[list[Frame]],
    runner: BatchRunner,
    sinks: Sequence[Sink],
    frames: int | None,
) -> Iterator[FrameResult]:
    """Yield the results of all batches, at most `frames`."""
    count = 0
    for batch in batches:
        for result in runner.run(batch[: None if frames is None else frames - count], sinks):
            count += 1
            yield result
        if frames is not None and count >= frames:
            return


class Dropper(Protocol):
    """Counts frames and results that are lost on their way."""

    @property
    def dropped(self) -> Mapping[str, int]: ...


class _Reporter:
    """Emits Stats once a second, also without frames, and once more at the end."""

    def __init__(
        self,
        metrics: Metrics,
        droppers: Sequence[Dropper],
        sinks: Sequence[Sink],
        emit: Callable[[ChildMessage], None],
    ) -> None:
        self._metrics = metrics
        self._droppers = droppers
        self._takers = [sink for sink in sinks if isinstance(sink, StatsSink)]
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
            stats = self._stats()
            self._emit(stats)
            for sink in self._takers:
                sink.take_stats(stats)

    def _stats(self) -> Stats:
        dropped: Counter[str] = Counter()
        for dropper in self._droppers:
            dropped.update(dropper.dropped)
        return self._metrics.take(dropped)
