"""A pipeline as a library: `run_pipeline` runs a bundle in this process."""

import logging
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from device.engine.file import open_engine
from device.engine.manifest import UNCALIBRATED
from device.protocol.messages import ChildMessage
from device.runtime.session import Session
from device.update.bundle import ENGINE, LABELS, PIPELINE, extract_bundle
from pipelines.config import MqttSink, PipelineConfig, load_labels, load_pipeline
from pipelines.runtime.batch import Model
from pipelines.runtime.pipeline import run_pipeline as run_frames
from pipelines.sinks.events import Event
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import Broker, FrameResult

__all__ = ["Broker", "Event", "FrameResult", "run_pipeline"]

_log = logging.getLogger(__name__)


def run_pipeline(
    bundle: str | Path,
    *,
    source: str | None = None,
    frames: int | None = None,
    broker: Broker | None = None,
    on_result: Callable[[FrameResult], None] | None = None,
    on_message: Callable[[ChildMessage], None] | None = None,
    stop: threading.Event | None = None,
    overwrite: bool = False,
) -> int:
    """Run the pipeline of a bundle, or of its unpacked folder; return the number of frames.

    It ends with its sources, after `frames` frames, or when `stop` is set. `source`: read from this
    file, folder or address, not from that of pipeline.toml; `ID=URI` for one of several.
    `on_result` gets every frame with its detections (`result.event.detections`), in this thread;
    `on_message` what the agent gets: Ready, Result, Heartbeat, Stats. Without a `broker` mqtt sinks
    are left out. `overwrite`: other sinks may replace files that are there.

    Raises TandemError: the bundle is damaged, the engine cannot run here, or the source fails.
    """
    with ExitStack() as stack:
        folder = Path(bundle)
        if not folder.is_dir():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
            extract_bundle(Path(bundle), folder)
        config = _adapt(load_pipeline(folder / PIPELINE), source, with_mqtt=broker is not None)
        labels = load_labels(folder / LABELS)
        engine = stack.enter_context(open_engine(folder / ENGINE))
        if engine.manifest.uncalibrated:
            _log.warning(UNCALIBRATED)
        session = stack.enter_context(Session(engine))
        model = Model(session, labels, engine.sha256, engine.manifest.preprocessing)
        return run_frames(
            config,
            model,
            emit=on_message or _discard,
            stop=stop or threading.Event(),
            broker=broker,
            files=OutputFiles(overwrite=overwrite),
            frames=frames,
            watch=on_result,
        )


def _adapt(config: PipelineConfig, uri: str | None, *, with_mqtt: bool) -> PipelineConfig:
    adapted = config if uri is None else config.with_source(uri)
    sinks = tuple(sink for sink in config.sinks if with_mqtt or not isinstance(sink, MqttSink))
    return msgspec.structs.replace(adapted, sinks=sinks)


def _discard(message: ChildMessage) -> None:
    """Discard a message."""
