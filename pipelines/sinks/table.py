"""Where results go: the table of sinks, with a JSON-lines file and an annotated video.

A sink that cannot start is an error at start. One that fails later drops frames, counts them by
cause and says so once in the log; the pipeline goes on.
"""

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from msgspec import UNSET

from pipelines.rate import RateLimit
from pipelines.sink_config import (
    FoxgloveSink,
    JsonlSink,
    McapSink,
    MqttSink,
    PrometheusSink,
    Ros2Sink,
    SerialSink,
    SinkConfig,
    SnapshotSink,
    VideoSink,
)
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.mqtt_sink import MqttOut
from pipelines.sinks.payloads import payload_of
from pipelines.sinks.prometheus import PrometheusOut
from pipelines.sinks.result import Broker, FrameResult, Sink, SinkContext, StatsSink
from pipelines.sinks.serial_port import SerialOut
from pipelines.sinks.snapshot import SnapshotOut
from pipelines.sinks.video import VideoFileWriter

__all__ = [
    "Broker",
    "FrameResult",
    "RateLimit",
    "Sink",
    "SinkContext",
    "StatsSink",
    "open_sink",
]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)


def open_sink(config: SinkConfig, context: SinkContext) -> Sink:
    """Return the sink of a [[sinks]] table; PipelineError if it cannot work here."""
    return SINKS[type(config)](config, context)


class JsonlOut(AbstractContextManager["JsonlOut"]):
    """Appends each result to a file, one JSON object a line, at once visible to readers."""

    def __init__(self, config: JsonlSink, context: SinkContext) -> None:
        self._files = context.files
        self._config = config
        self._path = context.files.place(config.path, "jsonl")
        self._dropped: Counter[str] = Counter()
        self._file, self._is_new = context.files.open_lines(self._path, "jsonl")

    @property
    def dropped(self) -> Mapping[str, int]:
        """jsonl_full: the disk has no room; jsonl_error: the file could not be written for another
        reason; jsonl_quota: its folder may hold no more."""
        return dict(self._dropped)

    def __exit__(self, *_: object) -> None:
        """Close the file; one without lines is removed."""
        empty = os.fstat(self._file).st_size == 0
        os.close(self._file)
        if self._is_new and empty:
            self._path.unlink(missing_ok=True)

    def write(self, result: FrameResult) -> None:
        """Append one line in one write, so that a reader never sees half of it."""
        line = payload_of(result, self._config) + b"\n"
        if not self._files.has_room(len(line)):
            self._dropped["jsonl_quota"] += 1
            return
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk is full
                os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_CUR) - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            cause = "jsonl_full" if error.errno in _DISK_FULL else "jsonl_error"
            if not self._dropped[cause]:
                _log.error("%s cannot be written: %s; results are dropped", self._path, error)
            self._dropped[cause] += 1


class VideoOut(AbstractContextManager["VideoOut"]):
    """Writes each frame with its detections drawn on it, into a file for each camera."""

    def __init__(self, config: VideoSink, context: SinkContext) -> None:
        self._models = config.models
        path = context.files.place(config.path, "video")
        self._writers = {
            camera: VideoFileWriter(
                path if len(context.cameras) == 1 else path.with_stem(f"{path.stem}-{camera}"),
                None if config.fps is UNSET else config.fps,
                context.files,
            )
            for camera in context.cameras
        }

    @property
    def dropped(self) -> Mapping[str, int]:
        """video_error: no encoder took the frame; video_quota: its folder may hold no more."""
        writers = self._writers.values()
        counts = {
            "video_error": sum(writer.failed for writer in writers),
            "video_quota": sum(writer.over_quota for writer in writers),
        }
        return {cause: count for cause, count in counts.items() if count}

    def __exit__(self, *_: object) -> None:
        """Finish the files."""
        for writer in self._writers.values():
            writer.close()

    def write(self, result: FrameResult) -> None:
        """Draw and encode one frame."""
        writer = self._writers[result.frame.camera]
        frame = result.frame
        writer.write(frame.image, lambda: draw_result(result, self._models), frame.fps)


def _open_mcap(config: McapSink, context: SinkContext) -> Sink:
    from pipelines.sinks.mcap_file import McapOut

    return McapOut(config, context)


def _open_foxglove(config: FoxgloveSink, context: SinkContext) -> Sink:
    from pipelines.sinks.foxglove_server import FoxgloveOut

    return FoxgloveOut(config, context)


def _open_ros2(config: Ros2Sink, context: SinkContext) -> Sink:
    from pipelines.sinks.ros2 import Ros2Out

    return Ros2Out(config, context)


SINKS: dict[type[SinkConfig], Callable[[Any, SinkContext], Sink]] = {
    MqttSink: MqttOut,
    JsonlSink: JsonlOut,
    VideoSink: VideoOut,
    SnapshotSink: SnapshotOut,
    SerialSink: SerialOut,
    PrometheusSink: PrometheusOut,
    McapSink: _open_mcap,
    FoxgloveSink: _open_foxglove,
    Ros2Sink: _open_ros2,
}
