"""Run a pipeline in this process, with its figures on the screen."""

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import click
import msgspec
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from device.engine.file import Engine
from device.errors import ConfigError
from device.protocol.messages import ChildMessage, Ready, Reload, Stats
from device.runtime.session import Session
from device.update.bundle import INFO, PIPELINE, extract_bundle
from pipelines.config import PipelineConfig, load_pipeline
from pipelines.open_models import (
    ModelFiles,
    Opener,
    bundle_files,
    files_of,
    open_models,
)
from pipelines.preview.server import Preview
from pipelines.preview.window import Window
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.pipeline import RunOptions, run_pipeline
from pipelines.runtime.reload import ReloadFile, hangups
from pipelines.runtime.switching import quick_turns
from pipelines.runtime.trace import TraceWriter
from pipelines.sink_config import FoxgloveSink, JsonlSink, McapSink, MqttSink, SinkConfig, VideoSink
from pipelines.sinks.events import Event
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.recording import PICTURES
from pipelines.sinks.ros2_queue import topic_prefix
from pipelines.sinks.table import FrameResult
from pipelines.sources.uri import redact
from toolkit.cli.actions.outputs import NOT_TIMED
from toolkit.cli.commands.record import Record
from toolkit.cli.commands.replay import Replay
from toolkit.cli.commands.run import OutputOptions, Run
from toolkit.cli.log import warn

MAX_DETECTIONS_SHOWN = 8
MQTT_LEFT_OUT = "The mqtt sink is left out: `tandem-pipeline` publishes, as the agent has it do."

T = TypeVar("T")


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints: how the segments ran, figures over the whole run, the last frame."""

    pipeline: str
    engine_sha256: str
    segments: tuple[str, ...]
    stats: Stats
    last: Event | None


def run(options: Run) -> None:
    """Run a bundle or an engine until its source ends, then print the figures.

    Raises TandemError, click.UsageError.
    """
    _run(options, lambda config: config)


def record(options: Record) -> None:
    """Run with a sink of kind mcap, which replaces the path of the pipeline's. Raises as `run`."""
    sink = McapSink(path=options.recording)
    _run(options, lambda config: _with_sinks(config, _with_path(config.sinks, sink)))


def replay(options: Replay) -> None:
    """Run on the pictures of a recording. Raises as `run`."""

    def read(config: PipelineConfig) -> PipelineConfig:
        ids = [camera.id for camera in config.cameras]
        several = len(ids) > 1
        for camera in config.cameras:
            topic = options.topic
            if several:
                topic = topic_prefix(camera.id, ids) + PICTURES
            uri = f"mcap://{options.recording}?topic={topic}"
            config = config.with_source(f"{camera.id}={uri}" if several else uri)
        changed = [
            replace(camera, frames="every", loop=False, realtime=not options.fast)
            for camera in config.cameras
        ]
        if several:
            return replace(config, sources=tuple(changed))
        return replace(config, source=changed[0], sources=())

    _run(options, read)


def _run(
    options: Run | Record | Replay, change: Callable[[PipelineConfig], PipelineConfig]
) -> None:
    output = options.output
    console = Console(stderr=output.as_json)
    with ExitStack() as stack:
        stack.enter_context(quick_turns())
        path, files = _find_pipeline(options, stack)
        config = load_pipeline(path)
        if any(isinstance(sink, MqttSink) for sink in config.sinks):
            console.print(Text(MQTT_LEFT_OUT, style="dim"))
        for sink in config.sinks:
            if isinstance(sink, FoxgloveSink) and sink.port:
                console.print(Text(f"live view: {sink.link}"), soft_wrap=True)
        config = change(_adapt(config, options))
        models = open_models(config, files, stack, _opener(options), partial(warn, colour="red"))
        cache = options.kernels.timing_cache
        reports = [report for each in models.values() for report in each.session.reports]
        if cache and all(report.implementation != "cuda" for report in reports):
            console.print(Text(NOT_TIMED.format(cache=cache), style="dim"))
        trace = None
        if output.trace is not None:
            trace = stack.enter_context(TraceWriter(output.trace, overwrite=output.overwrite))
        stop = stack.enter_context(_interruptible())
        reload = ReloadFile(path, lambda config: change(_adapt(config, options)))
        stack.enter_context(hangups(reload.now, stop))
        view = _View(config, console, trace, live=not output.as_json)
        viewers = [view, *_pictures(output, stop, stack, console)]
        with view:
            run_pipeline(
                config,
                models[config.first.name],
                RunOptions(
                    emit=_all([viewer.on_message for viewer in viewers]),
                    stop=stop,
                    files=OutputFiles(overwrite=output.overwrite),
                    frames=options.model.frames,
                    others=models,
                    reload=reload,
                ),
                watch=_all([viewer.on_result for viewer in viewers]),
            )
    if output.as_json:
        click.echo(msgspec.json.encode(view.summary()))
    else:
        console.print(view.figures(view.summary().stats))


def _pictures(
    output: OutputOptions, stop: threading.Event, stack: ExitStack, console: Console
) -> Iterator[Preview | Window]:
    """Yield the window and the page that are asked for; `stack` closes them."""
    if output.window:
        yield stack.enter_context(Window(stop))
    if output.preview is not None:
        preview = stack.enter_context(Preview(output.preview))
        console.print(Text(f"preview: {preview.url}"))
        yield preview


def _opener(options: Run | Record | Replay) -> Opener:
    def open_session(engine: Engine, dla_core: int | None, turn: int | None) -> Session:
        return Session(
            engine,
            dla=options.kernels.dla,
            scales=options.kernels.scales,
            timing_cache=options.kernels.timing_cache,
            dla_core=dla_core,
            turn=turn,
            executor=options.kernels.executor,
        )

    return open_session


def _find_pipeline(
    options: Run | Record | Replay, stack: ExitStack
) -> tuple[Path, Mapping[str, ModelFiles]]:
    """Return pipeline.toml and the files of its models; a bundle is unpacked for as long as `stack`
    is open."""
    target, model = options.target, options.model
    pipeline, labels = model.pipeline, model.labels
    engines: Mapping[str, Path] = model.engines
    if target.suffix == ".toml":
        if pipeline is not None:
            raise click.UsageError(f"{target} is a pipeline already: leave out --pipeline.")
        return target, files_of(load_pipeline(target), target.parent, engines, labels)
    if target.is_dir():
        folder = target
    elif _is_bundle(target):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
        extract_bundle(target, folder)
    elif pipeline is None:
        raise click.UsageError(
            f"{target} is not a bundle; for an engine give --pipeline and --labels too"
            " (`tandem model guess` proposes what they hold)."
        )
    else:
        config = load_pipeline(pipeline)
        engines = {config.first.name: target, **engines}
        return pipeline, files_of(config, pipeline.parent, engines, labels)
    path = pipeline or folder / PIPELINE
    return path, bundle_files(load_pipeline(path), folder, engines, labels, path)


def _is_bundle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(INFO)) == INFO.encode()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror}).") from error


def _adapt(config: PipelineConfig, options: Run | Record | Replay) -> PipelineConfig:
    """Replace the source, leave out MQTT sinks, and replace the files of sinks."""
    sinks: list[SinkConfig] = [sink for sink in config.sinks if not isinstance(sink, MqttSink)]
    if options.output.video:
        sinks = _with_path(sinks, VideoSink(path=options.output.video))
    if options.output.jsonl:
        sinks = _with_path(sinks, JsonlSink(path=options.output.jsonl))
    for source in options.model.sources:
        config = config.with_source(source)
    return _with_sinks(config, sinks)


def _with_sinks(config: PipelineConfig, sinks: Sequence[SinkConfig]) -> PipelineConfig:
    try:
        return replace(config, sinks=tuple(sinks))
    except ValueError as error:
        raise ConfigError(f"pipeline {config.name!r} with these options: {error}.") from error


def _with_path(
    sinks: Sequence[SinkConfig], replacement: JsonlSink | VideoSink | McapSink
) -> list[SinkConfig]:
    """Return sinks of which one replaces all of its kind; but for its path it is as the
    first of them."""
    same = [sink for sink in sinks if isinstance(sink, type(replacement))]
    new = replace(same[0], path=replacement.path) if same else replacement
    return [*(sink for sink in sinks if sink not in same), new]


def _all(takers: Sequence[Callable[[T], None]]) -> Callable[[T], None]:
    """Return a function that gives a value to each of several."""

    def give(value: T) -> None:
        for take in takers:
            take(value)

    return give


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that output files are completed."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _View(AbstractContextManager["_View"]):
    """The live table of a running pipeline, and the figures of the whole run."""

    def __init__(
        self, config: PipelineConfig, console: Console, trace: TraceWriter | None, *, live: bool
    ) -> None:
        self._config = config
        self._trace = trace
        self._console = console
        self._metrics = Metrics()
        self._ready = Ready(pipeline=config.name, engine_sha256="")
        self._stats: Stats | None = None
        self._last: Event | None = None
        self._summary: Summary | None = None
        self._live = (
            Live(get_renderable=self._render, console=console, transient=True) if live else None
        )

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def on_message(self, message: ChildMessage) -> None:
        """Handle a message of the pipeline; Ready starts the live table."""
        if isinstance(message, Ready):
            self._ready = message
            self._metrics = Metrics()
            for segment in message.segments:
                self._console.print(Text(segment, style="dim"))
            if self._live is not None:
                self._live.start()
        elif isinstance(message, Stats):
            self._stats = message
        elif isinstance(message, Reload):
            text = (
                f"not taken: {message.refused}" if message.refused else "; ".join(message.changes)
            )
            self._console.print(Text(f"pipeline.toml: {text}"))

    def on_result(self, result: FrameResult) -> None:
        """Add the result of a frame."""
        if self._trace is not None:
            self._trace.add(result)
        stages = dict(result.event.latency_ms)
        self._metrics.add(stages, stages.pop("total"), result.event.processors)
        self._last = result.event

    def summary(self) -> Summary:
        """Return the figures of the whole run; the first call ends it."""
        if self._summary is None:
            dropped = self._stats.dropped if self._stats else {}
            self._summary = Summary(
                pipeline=self._ready.pipeline,
                engine_sha256=self._ready.engine_sha256,
                segments=self._ready.segments,
                stats=self._metrics.take(dropped),
                last=self._last,
            )
        return self._summary

    def figures(self, stats: Stats) -> Table:
        """Return frames, rate, latencies and drops as a table."""
        addresses = ", ".join(redact(camera.uri) for camera in self._config.cameras)
        table = Table(title=f"{self._config.name}: {addresses}")
        table.add_column("stage")
        table.add_column("p50 ms", justify="right")
        table.add_column("p99 ms", justify="right")
        for stage, p50 in stats.stage_p50_ms.items():
            table.add_row(stage, f"{p50:.2f}", f"{stats.stage_p99_ms[stage]:.2f}")
        total = (f"{stats.latency_p50_ms:.2f}", f"{stats.latency_p99_ms:.2f}")
        table.add_row("frame to result", *total, style="bold")
        drops = ", ".join(f"{count} {cause}" for cause, count in stats.dropped.items()) or "none"
        ran = ", ".join(f"{name} {count}" for name, count in stats.processors.items()) or "none"
        table.caption = (
            f"{stats.frames} frames, {stats.fps:.1f} fps, dropped: {drops}; frames on each"
            f" processor: {ran}"
        )
        return table

    def _render(self) -> Group | Text:
        if self._stats is None:
            return Text("waiting for the first figures ...")
        detections = Table(show_header=False, box=None)
        for one in (self._last.detections if self._last else ())[:MAX_DETECTIONS_SHOWN]:
            box = "" if one.box is None else " ".join(f"{value:.0f}" for value in one.box)
            detections.add_row(one.label, f"{one.score:.2f}", box)
        return Group(self.figures(self._stats), detections)
