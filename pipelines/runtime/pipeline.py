"""A camera pipeline: sources -> preprocess -> infer -> decode -> sinks, a batch at a time.

While the engine works on a batch, the loop finishes the one before and makes the inputs of the
next; each source keeps its latest frame until then. So the engine is never idle, and no frame is
older than one inference and one frame period when its turn comes.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from msgspec import UNSET

from device.protocol.messages import ChildMessage, Ready, Reload, Result, Stats
from pipelines.config import PipelineConfig
from pipelines.frame import Frame
from pipelines.model_config import frame_models
from pipelines.rate import FrameRate
from pipelines.runtime.batch import BatchRunner, Model, Tap
from pipelines.runtime.heartbeat import Dropper, HeartbeatSender
from pipelines.runtime.in_flight import run_frames
from pipelines.runtime.load_control import LoadControl
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.reload import FileWatch, Reloader, ReloadFile
from pipelines.sinks.controls import Controls
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.opened import OpenSinks
from pipelines.sinks.table import Broker, FrameResult, SinkContext
from pipelines.sources.batching import Admission
from pipelines.sources.live import Waiting
from pipelines.sources.table import open_source
from pipelines.stages.fit import check_engines
from pipelines.vision import cv2

STATS_S = 1.0
_LOG = logging.getLogger(__name__)


def discard(_: ChildMessage) -> None:
    """Discard a message."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a pipeline is run.

    `emit` takes Ready, Result after the first frame, Heartbeats, Stats once a second (from another
    thread) and at the end. `stop` ends the run, and so do `frames` frames. `others`: all models but
    the first, by name. `broker`: of the mqtt sinks. `files`: where sinks may write.
    `patient`: a camera that is away at the start is waited for. `reload`: the file whose changes
    are taken. `tap`: offered each frame that the first model sees, with its raw result.
    """

    emit: Callable[[ChildMessage], None] = discard
    stop: threading.Event = field(default_factory=threading.Event)
    frames: int | None = None
    others: Mapping[str, Model] = field(default_factory=dict)
    broker: Broker | None = None
    files: OutputFiles = field(default_factory=OutputFiles)
    patient: bool = False
    reload: ReloadFile | None = None
    tap: Tap | None = None


def run_pipeline(
    config: PipelineConfig,
    model: Model,
    options: RunOptions,
    watch: Callable[[FrameResult], None] | None = None,
) -> int:
    """Run `iter_results` to its end; return the number of frames. `watch` sees every result."""
    count = 0
    for result in iter_results(config, model, options):
        count += 1
        if watch is not None:
            watch(result)
    return count


def iter_results(
    config: PipelineConfig, model: Model, options: RunOptions
) -> Generator[FrameResult, None, None]:
    """Yield each result until the source ends, or the options say so; `model`: the first.

    The pipeline starts with the first result that is asked for; closing the iterator ends it.
    Raises TandemError where the pipeline cannot go on.
    """
    models = {**options.others, config.first.name: model}
    emit = options.emit
    for warning in check_engines(config, {name: one.facts for name, one in models.items()}):
        _LOG.warning(warning)
    cv2.setNumThreads(1)  # a second thread gains nothing at these sizes and adds jitter
    controls = Controls()
    runner = BatchRunner(config, model, controls, options.others)
    runner.tap = options.tap
    with ExitStack() as stack:
        stack.callback(runner.close)
        runner.warm_up()
        context = sink_context(config, models, controls, options.broker, options.files)
        sinks = stack.enter_context(OpenSinks(config.sinks, context))
        parts = _Parts(
            models=models,
            runner=runner,
            sinks=sinks,
            control=LoadControl(None if config.load is UNSET else config.load, use=runner.use),
            rate=FrameRate(config.cameras),
            controls=controls,
        )
        if options.reload is not None:
            parts.reloader = _open_reloader(options.reload, config, parts, emit, stack)
        heartbeat = HeartbeatSender(emit, parts.control)

        def tick() -> None:
            heartbeat.tick()
            sinks.tick()
            parts.take()

        waiting = Waiting(options.stop, tick, options.patient)
        sources = [stack.enter_context(open_source(camera, waiting)) for camera in config.cameras]
        runner.watch_drops(sources)
        emit(_ready(config, models, runner.warm_up_s))
        filters: list[Dropper] = [controls, parts.rate, parts.control]
        heartbeat.watch(sources, [sinks], filters)
        droppers: list[Dropper] = [*sources, sinks, *filters]
        reporter = Reporter(runner.metrics, droppers, sinks, emit)
        stack.callback(reporter.close)
        stack.callback(heartbeat.end)
        results = run_frames(
            sources,
            waiting,
            runner,
            lambda: sinks.sinks,
            admission=Admission(parts.admits, controls.is_on),
            changes=parts,
            frames=options.frames,
        )
        yield from _reported(results, heartbeat, emit)


def _reported(
    results: Iterable[FrameResult], heartbeat: HeartbeatSender, emit: Callable[[ChildMessage], None]
) -> Generator[FrameResult, None, None]:
    """Yield results; the heartbeat is told of each, and the parent process of the first."""
    for count, result in enumerate(results):
        latency_ms = result.event.latency_ms["total"]
        if count == 0:
            emit(Result(seq=result.frame.seq, latency_ms=latency_ms))
        # Frames that are filled in take no time: they would hide a slow engine.
        heartbeat.frame_done(None if result.event.predicted is True else latency_ms)
        yield result


def sink_context(
    config: PipelineConfig,
    models: Mapping[str, Model],
    controls: Controls,
    broker: Broker | None = None,
    files: OutputFiles | None = None,
) -> SinkContext:
    """Return what sinks need; `models`: all, by name."""
    return SinkContext(
        labels=models[config.followed.name].labels,
        broker=broker,
        files=files or OutputFiles(),
        controls=controls,
        cameras=tuple(camera.id for camera in config.cameras),
        lost_s=config.lost_s,
        models={model.name: models[model.name].labels for model in frame_models(config.networks)},
        about=_about(config, models),
    )


def _about(config: PipelineConfig, models: Mapping[str, Model]) -> dict[str, str]:
    """Return the engines, how their segments run, and the times of their plans."""
    about = {"pipeline": config.name}
    for network in config.networks:
        model = models[network.name]
        about[f"{network.name} engine_sha256"] = model.engine_sha256
        for report in model.session.reports:
            about[f"{network.name} {report.segment}"] = f"{report.processor}: {report.reason}"
        for processor, time_us in model.predicted_us.items():
            about[f"{network.name} predicted_us {processor}"] = f"{time_us:.1f}"
    return about


@dataclass(slots=True)
class _Parts:
    """What a change of pipeline.toml changes."""

    models: Mapping[str, Model]
    runner: BatchRunner
    sinks: OpenSinks
    control: LoadControl
    rate: FrameRate
    controls: Controls
    reloader: Reloader | None = None

    def admits(self, frame: Frame) -> bool:
        """Return whether a frame is to be run; whoever refuses it counts it."""
        return (
            self.controls.admits(frame.camera)
            and self.rate.admits(frame)
            and self.control.admits(frame)
        )

    @property
    def are_due(self) -> bool:
        """Whether the file has changed."""
        return self.reloader is not None and self.reloader.is_due

    def take(self) -> None:
        """Take a change, if there is one; only while no batch is in flight."""
        if self.reloader is not None:
            self.reloader.apply()

    def change(self, config: PipelineConfig) -> None:
        """Take another configuration. Raises TandemError, with all as before, if it cannot."""
        facts = {name: one.facts for name, one in self.models.items()}
        for warning in check_engines(config, facts):
            _LOG.warning(warning)
        self.runner.check(config)
        self.sinks.change(config.sinks)
        self.runner.change(config)
        self.rate.change(config.cameras)
        self.control.change(None if config.load is UNSET else config.load)


def _open_reloader(
    file: ReloadFile,
    config: PipelineConfig,
    parts: _Parts,
    emit: Callable[[ChildMessage], None],
    stack: ExitStack,
) -> Reloader:
    def tell(reload: Reload) -> None:
        emit(reload)
        parts.sinks.take_reload(reload)

    watch = stack.enter_context(FileWatch(file))
    return Reloader(watch, file, config, parts, tell)


def _ready(config: PipelineConfig, models: Mapping[str, Model], warm_up_s: float) -> Ready:
    segments: list[str] = []
    degraded: list[str] = []
    for network in config.networks:
        prefix = f"{network.name}: " if config.models else ""
        reports = [row for turn in models[network.name].lanes for row in turn.session.reports]
        for report in reports:
            segments.append(f"{prefix}{report.segment} ({report.processor}): {report.reason}")
            degraded += [f"{prefix}{report.degraded}"] if report.degraded else []
    return Ready(
        pipeline=config.name,
        engine_sha256=models[config.first.name].engine_sha256,
        segments=tuple(dict.fromkeys(segments)),  # sessions differ in their DLA core alone
        warm_up_s=round(warm_up_s, 3),
        degraded=tuple(dict.fromkeys(degraded)),
    )


class Reporter:
    """Emits Stats once a second, also without frames, and once more at the end."""

    def __init__(
        self,
        metrics: Metrics,
        droppers: Sequence[Dropper],
        sinks: OpenSinks,
        emit: Callable[[ChildMessage], None],
    ) -> None:
        self._metrics = metrics
        self._droppers = droppers
        self._sinks = sinks
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
            self._sinks.take_stats(stats)

    def _stats(self) -> Stats:
        dropped: Counter[str] = Counter()
        for dropper in self._droppers:
            dropped.update(dropper.dropped)
        return self._metrics.take(dropped)
