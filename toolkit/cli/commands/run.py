"""`tandem run`: a pipeline on this machine, in this process, with its figures on the screen."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from device.engine.file import open_engine
from device.engine.manifest import UNCALIBRATED
from device.protocol.messages import ChildMessage, Ready, Stats
from device.runtime.session import Dla, Scales, Session
from device.update.bundle import ENGINE, INFO, LABELS, PIPELINE, extract_bundle
from pipelines.config import (
    JsonlSink,
    MqttSink,
    PipelineConfig,
    SinkConfig,
    VideoSink,
    load_labels,
    load_pipeline,
)
from pipelines.runtime.metrics import Metrics
from pipelines.runtime.pipeline import Model, run_pipeline
from pipelines.sinks.events import Event
from pipelines.sinks.table import FrameResult
from pipelines.sources.uri import redact
from toolkit.cli.options.tactics import not_timed


@dataclass(frozen=True, slots=True)
class Parts:
    """The three files that make a pipeline."""

    engine: Path
    pipeline: Path
    labels: Path


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints: how the segments ran, figures over the whole run, the last frame."""

    pipeline: str
    engine_sha256: str
    segments: tuple[str, ...]
    stats: Stats
    last: Event | None


@click.command(
    epilog="Example: tandem run robot.bundle --source rtsp://10.0.0.7/stream --video seen.mp4"
)
@click.argument("target", metavar="BUNDLE_OR_ENGINE", type=click.Path(path_type=Path))
@click.option("--pipeline", type=click.Path(path_type=Path), help="pipeline.toml of an engine.")
@click.option("--labels", type=click.Path(path_type=Path), help="labels.txt of an engine.")
@click.option("--source", metavar="URI", help="A video, a folder, v4l2:///dev/video0, rtsp://...")
@click.option("--frames", type=click.IntRange(min=1), help="Stop after so many frames.")
@click.option("--video", metavar="OUT.mp4", help="Write an annotated video.")
@click.option("--jsonl", metavar="OUT.jsonl", help="Write what each frame showed.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON at the end.")
@click.option(
    "--dla",
    type=click.Choice(["portable", "exact", "fast"]),
    default="portable",
    show_default=True,
    help="What stands in for the DLA; exact and fast: its INT8 arithmetic in software.",
)
@click.option(
    "--scales",
    type=click.Choice(["hardware", "ideal"]),
    default="hardware",
    show_default=True,
    help="Scales of the DLA in software: 16 bits and a shift, or exact.",
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path),
    help="Run the fastest GPU tactics; those that the file lacks are timed and added to it.",
)
def run(
    target: Path,
    pipeline: Path | None,
    labels: Path | None,
    source: str | None,
    frames: int | None,
    video: str | None,
    jsonl: str | None,
    as_json: bool,
    dla: Dla,
    scales: Scales,
    timing_cache: Path | None,
) -> None:
    """Run a pipeline on this machine: a bundle, or an engine with --pipeline and --labels.

    The same files run on the board. Results go to --video and --jsonl; an mqtt sink is left out.
    """
    console = Console(stderr=as_json)
    with ExitStack() as stack:
        parts = _find_parts(target, pipeline, labels, stack)
        config = _adapt(load_pipeline(parts.pipeline), source, video, jsonl)
        names = load_labels(parts.labels)
        engine = stack.enter_context(open_engine(parts.engine))
        if engine.manifest.uncalibrated:
            console.print(Text(UNCALIBRATED, style="bold red"))
        session = stack.enter_context(
            Session(engine, dla=dla, scales=scales, timing_cache=timing_cache)
        )
        if timing_cache and all(one.implementation != "cuda" for one in session.reports):
            console.print(Text(not_timed(timing_cache), style="dim"))
        stop = stack.enter_context(_interruptible())
        view = _View(config, console, live=not as_json)
        with view:
            model = Model(session, names, engine.sha256)
            run_pipeline(config, model, emit=view.hear, stop=stop, frames=frames, watch=view.watch)
    if as_json:
        click.echo(msgspec.json.encode(view.summary()))
    else:
        console.print(view.figures(view.summary().stats))


def _find_parts(
    target: Path, pipeline: Path | None, labels: Path | None, stack: ExitStack
) -> Parts:
    """Find engine, pipeline and labels; a bundle is unpacked for as long as `stack` is open."""
    if target.is_dir():
        folder = target
    elif _is_bundle(target):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
        extract_bundle(target, folder)
    elif pipeline is None or labels is None:
        raise click.UsageError(
            f"{target} is not a bundle; for an engine give --pipeline and --labels too."
        )
    else:
        return Parts(target, pipeline, labels)
    return Parts(folder / ENGINE, pipeline or folder / PIPELINE, labels or folder / LABELS)


def _is_bundle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(INFO)) == INFO.encode()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror}).") from error


def _adapt(
    config: PipelineConfig, source: str | None, video: str | None, jsonl: str | None
) -> PipelineConfig:
    sinks: list[SinkConfig] = [sink for sink in config.sinks if not isinstance(sink, MqttSink)]
    sinks += [VideoSink(path=video)] if video else []
    sinks += [JsonlSink(path=jsonl)] if jsonl else []
    uri = config.source.uri if source is None else source
    return msgspec.structs.replace(
        config, source=msgspec.structs.replace(config.source, uri=uri), sinks=tuple(sinks)
    )


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C sets, so that files are finished before the program ends."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _View:
    """What the user sees while the pipeline runs, and the figures of the whole run."""

    def __init__(self, config: PipelineConfig, console: Console, *, live: bool) -> None:
        self._config = config
        self._console = console
        self._metrics = Metrics()
        self._ready = Ready(pipeline=config.name, engine_sha256="")
        self._stats: Stats | None = None
        self._last: Event | None = None
        self._summary: Summary | None = None
        self._live = (
            Live(get_renderable=self._render, console=console, transient=True) if live else None
        )

    def __enter__(self) -> "_View":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def hear(self, message: ChildMessage) -> None:
        """Take a message of the pipeline; its Ready starts the live table."""
        if isinstance(message, Ready):
            self._ready = message
            self._metrics = Metrics()
            for segment in message.segments:
                self._console.print(Text(segment, style="dim"))
            if self._live is not None:
                self._live.start()
        elif isinstance(message, Stats):
            self._stats = message

    def watch(self, result: FrameResult) -> None:
        """Take the result of a frame."""
        stages = dict(result.event.latency_ms)
        self._metrics.add(stages, stages.pop("total"))
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
        table = Table(title=f"{self._config.name}: {redact(self._config.source.uri)}")
        table.add_column("stage")
        table.add_column("p50 ms", justify="right")
        table.add_column("p99 ms", justify="right")
        for stage, p50 in stats.stage_p50_ms.items():
            table.add_row(stage, f"{p50:.2f}", f"{stats.stage_p99_ms[stage]:.2f}")
        total = (f"{stats.latency_p50_ms:.2f}", f"{stats.latency_p99_ms:.2f}")
        table.add_row("frame to result", *total, style="bold")
        drops = ", ".join(f"{count} {cause}" for cause, count in stats.dropped.items()) or "none"
        table.caption = f"{stats.frames} frames, {stats.fps:.1f} fps, dropped: {drops}"
        return table

    def _render(self) -> Group | Text:
        if self._stats is None:
            return Text("waiting for the first figures ...")
        seen = Table(show_header=False, box=None)
        for found in (self._last.detections if self._last else ())[:8]:
            box = "" if found.box is None else " ".join(f"{value:.0f}" for value in found.box)
            seen.add_row(found.label, f"{found.score:.2f}", box)
        return Group(self.figures(self._stats), seen)
