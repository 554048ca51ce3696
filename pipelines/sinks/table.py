"""Where results go: MQTT, a JSON-lines file, an annotated video.

A sink that cannot start is an error at start. One that fails later drops frames, counts them by
cause and says so once in the log; the pipeline goes on.
"""

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from device.errors import PipelineError
from device.protocol.mqtt import LinkSettings
from pipelines.config import JsonlSink, MqttSink, SinkConfig, VideoSink
from pipelines.frame import Frame
from pipelines.results import Decoded
from pipelines.sinks.events import Event
from pipelines.sinks.files import OutputFiles
from pipelines.sinks.mqtt import MqttPublisher
from pipelines.sinks.video import VideoFileWriter

MQTT_KEEPALIVE_S = 10
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class FrameResult:
    """Everything that is known about one frame; `payload` is the event as JSON."""

    frame: Frame
    decoded: Decoded
    event: Event
    payload: bytes


@dataclass(frozen=True, slots=True)
class Broker:
    """Where to publish, on `<topic_prefix>/detections`. The password is not in its repr."""

    host: str
    port: int
    topic_prefix: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What sinks need beyond their own configuration."""

    labels: Sequence[str]
    broker: Broker | None = None
    files: OutputFiles = field(default_factory=OutputFiles)


class Sink(AbstractContextManager[Any], Protocol):
    """Takes results; a `with` block opens and closes its output."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Results dropped so far, by cause."""

    def write(self, result: FrameResult) -> None:
        """Take one result; never blocks for long and never raises for an external fault."""


def open_sink(config: SinkConfig, context: SinkContext) -> Sink:
    """Return the sink of a [[sinks]] table; PipelineError if it cannot work here."""
    return SINKS[type(config)](config, context)


class MqttOut:
    """Publishes each result, at most `max_hz`; drops those that the broker does not take."""

    def __init__(self, config: MqttSink, context: SinkContext) -> None:
        if context.broker is None:
            raise PipelineError(
                "the pipeline has an mqtt sink but no broker was named: start `python -m pipelines`"
                " with --mqtt-host and --topic-prefix, or remove the sink from pipeline.toml."
            )
        self._limit = RateLimit(config.max_hz)
        self._limited = 0
        broker = context.broker
        settings = LinkSettings(
            host=broker.host,
            port=broker.port,
            # The process id keeps two pipelines of one device, old and new, from evicting each
            # other.
            client_id=f"tandem-{broker.topic_prefix.rpartition('/')[2]}-{os.getpid()}",
            username=broker.username,
            password=broker.password,
            keepalive_s=MQTT_KEEPALIVE_S,
        )
        topic = f"{broker.topic_prefix}/detections"
        self._publisher = MqttPublisher(settings, topic, config.qos)

    @property
    def dropped(self) -> Mapping[str, int]:
        """mqtt_rate: over max_hz; mqtt_queue: broker too slow; mqtt_offline: not connected."""
        limited = {"mqtt_rate": self._limited} if self._limited else {}
        return {**limited, **self._publisher.dropped}

    def __enter__(self) -> "MqttOut":
        """Begin to connect; the pipeline does not wait for the broker."""
        self._publisher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send the queue for a short time, then disconnect."""
        self._publisher.close()

    def write(self, result: FrameResult) -> None:
        """Queue the payload for the sender thread."""
        if self._limit.allows(time.monotonic()):
            self._publisher.put(result.payload)
        else:
            self._limited += 1


class RateLimit:
    """A rate limit of `max_hz` on average; a burst of two passes, so that jitter drops nothing."""

    def __init__(self, max_hz: float) -> None:
        self._hz = max_hz
        self._tokens = 2.0
        self._at: float | None = None

    def allows(self, now: float) -> bool:
        """Return whether one more may pass at `now`, in seconds."""
        if self._at is not None:
            self._tokens = min(2.0, self._tokens + (now - self._at) * self._hz)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class JsonlOut:
    """Appends each result to a file, one JSON object a line, at once visible to readers."""

    def __init__(self, config: JsonlSink, context: SinkContext) -> None:
        self._files = context.files
        self._path = context.files.place(config.path, "jsonl")
        self._dropped: Counter[str] = Counter()
        self._file, self._made = context.files.open_lines(self._path, "jsonl")

    @property
    def dropped(self) -> Mapping[str, int]:
        """jsonl_full: the disk has no room; jsonl_error: the file could not be written for another
        reason; jsonl_quota: its folder may hold no more."""
        return dict(self._dropped)

    def __enter__(self) -> "JsonlOut":
        """The file is open already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file; one without lines is removed."""
        empty = os.fstat(self._file).st_size == 0
        os.close(self._file)
        if self._made and empty:
            self._path.unlink(missing_ok=True)

    def write(self, result: FrameResult) -> None:
        """Append one line in one write, so that a reader never sees half of it."""
        line = result.payload + b"\n"
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


class VideoOut:
    """Writes each frame with its detections drawn on it."""

    def __init__(self, config: VideoSink, context: SinkContext) -> None:
        self._labels = context.labels
        path = context.files.place(config.path, "video")
        self._writer = VideoFileWriter(path, config.fps, context.files)

    @property
    def dropped(self) -> Mapping[str, int]:
        """video_error: no encoder took the frame; video_quota: its folder may hold no more."""
        counts = {"video_error": self._writer.failed, "video_quota": self._writer.over_quota}
        return {cause: count for cause, count in counts.items() if count}

    def __enter__(self) -> "VideoOut":
        """The file is created with the first frame, in its size."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish the file."""
        self._writer.close()

    def write(self, result: FrameResult) -> None:
        """Draw and encode one frame."""
        latency_ms = result.event.latency_ms["total"]
        self._writer.write(result.frame.image, result.decoded, self._labels, latency_ms)


SINKS: dict[type[SinkConfig], Callable[[Any, SinkContext], Sink]] = {
    MqttSink: MqttOut,
    JsonlSink: JsonlOut,
    VideoSink: VideoOut,
}
