"""A pipeline as a library: `run_pipeline` and `Pipeline` run a bundle in this process."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from device.argument_names import ArgumentName, naming_arguments
from device.engine.file import Engine
from device.protocol.messages import ChildMessage
from device.runtime.session import Session
from device.update.bundle import PIPELINE, extract_bundle
from pipelines.config import PipelineConfig, load_pipeline
from pipelines.open_models import bundle_files, open_models
from pipelines.runtime.pipeline import RunOptions, discard, iter_results
from pipelines.sink_config import MqttSink
from pipelines.sinks.events import Event
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.table import Broker, FrameResult

# Of messages that are written for `tandem run`.
ARGUMENTS = (
    ArgumentName("`tandem run --overwrite`", "`overwrite=True`"),
    ArgumentName(r", or use `tandem run [^`]*`", ""),
)

__all__ = ["Broker", "Event", "FrameResult", "Pipeline", "run_pipeline"]


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
    pipeline = Pipeline(bundle, source=source, broker=broker, overwrite=overwrite)
    count = 0
    for result in pipeline.results(frames=frames, on_message=on_message, stop=stop):
        count += 1
        if on_result is not None:
            on_result(result)
    return count


class Pipeline:
    """The pipeline of a bundle, or of its unpacked folder, to be read frame by frame.

        for result in tandem.Pipeline("robot.bundle").results():
            print(result.event.seq, result.detections.boxes)

    The arguments are those of `run_pipeline`.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        source: str | None = None,
        broker: Broker | None = None,
        overwrite: bool = False,
    ) -> None:
        self._bundle = Path(bundle)
        self._source = source
        self._broker = broker
        self._overwrite = overwrite

    def results(
        self,
        *,
        frames: int | None = None,
        on_message: Callable[[ChildMessage], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[FrameResult]:
        """Yield each frame's result once the sinks have it, until the sources end.

        The engine and the sources are open while the iterator is: a loop that is left early closes
        them when the iterator is closed or forgotten. Raises TandemError as `run_pipeline` does.
        """
        with naming_arguments(ARGUMENTS), ExitStack() as stack:
            folder = self._bundle
            if not folder.is_dir():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
                extract_bundle(self._bundle, folder)
            config = load_pipeline(folder / PIPELINE)
            config = _adapt(config, self._source, with_mqtt=self._broker is not None)
            files = bundle_files(config, folder)
            models = open_models(config, files, stack, _open_session)
            results = iter_results(
                config,
                models[config.first.name],
                RunOptions(
                    emit=on_message or discard,
                    stop=stop or threading.Event(),
                    broker=self._broker,
                    files=OutputFiles(overwrite=self._overwrite),
                    frames=frames,
                    others=models,
                ),
            )
            yield from stack.enter_context(closing(results))


def _open_session(engine: Engine, dla_core: int | None, turn: int | None) -> Session:
    return Session(engine, dla_core=dla_core, turn=turn)


def _adapt(config: PipelineConfig, uri: str | None, *, with_mqtt: bool) -> PipelineConfig:
    adapted = config if uri is None else config.with_source(uri)
    sinks = tuple(sink for sink in config.sinks if with_mqtt or not isinstance(sink, MqttSink))
    return msgspec.structs.replace(adapted, sinks=sinks)
