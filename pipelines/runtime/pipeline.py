"""A camera pipeline: sources -> preprocess -> infer -> decode -> sinks, a batch at a time.

One batch is in flight and each source keeps one more frame, the latest: the engine is never idle
and no frame is older than one inference and one frame period when its turn comes.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from device.protocol.messages import ChildMessage, Ready, Result, Stats
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.runtime.batch import BatchRunner, Model
from pipelines.runtime.heart import Heart
from pipelines.runtime.metrics import Metrics
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import Broker, FrameResult, Sink, SinkContext, open_sink
from pipelines.sources.live import Waiting
from pipelines.sources.table import Source, open_source
from pipelines.sources.take import batches_of
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
    runner = BatchRunner(config, model)
    runner.warm_up()
    with ExitStack() as stack:
        context = SinkContext(model.labels, broker, files or OutputFiles())
        sinks = [stack.enter_context(open_sink(sink, context)) for sink in config.sinks]
        heart = Heart(emit)
        waiting = Waiting(stop, heart.tick, patient)
        sources = [stack.enter_context(open_source(camera, waiting)) for camera in config.cameras]
        emit(_ready(config, model, runner.warm_up_s))
        heart.watch(sources, sinks)
        reporter = _Reporter(runner.metrics, sources, sinks, emit)
        batches = batches_of(sources, waiting, runner.room, runner.pace)
        try:
            return _run_batches(
                batches, runner, sinks, emit=emit, heart=heart, frames=frames, watch=watch
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
    )


def _run_batches(
    batches: Iterator[list[Frame]],
    runner: "BatchRunner",
    sinks: Sequence[Sink],
    *,
    emit: Callable[[ChildMessage], None],
    heart: Heart,
    frames: int | None,
    watch: Callable[[FrameResult], None] | None,
) -> int:
    count = 0
    for batch in batches:
        for result in runner.run(batch[: None if frames is None else frames - count], sinks):
            count += 1
            if count == 1:
                emit(Result(seq=result.frame.seq, latency_ms=result.event.latency_ms["total"]))
            heart.frame_done()
            if watch is not None:
                watch(result)
        if frames is not None and count >= frames:
            break
    return count


class _Reporter:
    """Emits Stats once a second, also without frames, and once more at the end."""

    def __init__(
        self,
        metrics: Metrics,
        sources: Sequence[Source],
        sinks: Sequence[Sink],
        emit: Callable[[ChildMessage], None],
    ) -> None:
        self._metrics = metrics
        self._droppers: tuple[Source | Sink, ...] = (*sources, *sinks)
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
