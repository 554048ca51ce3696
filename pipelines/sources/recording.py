"""Pictures of a recording in MCAP: sensor_msgs/CompressedImage and Image, as ROS 2 has them.

A file that a power cut left is read to its last whole chunk. Frames have the numbers and capture
times of the recording: trackers and zones see the time that passed then, at any pace.
"""

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import UNSET

from device.choices import list_choices
from device.errors import PipelineError, SourceError
from pipelines.config import SourceConfig
from pipelines.frame import Frame, Stamp
from pipelines.pictures import PictureError
from pipelines.ros2.cdr import decode
from pipelines.sources.ros2 import DECODERS
from pipelines.sources.uri import redact

try:
    from mcap.records import Channel, Chunk, McapRecord, Message, Schema
    from mcap.stream_reader import StreamReader, breakup_chunk

    from pipelines.ros2.chunks import DAMAGE, unpack_chunk
except ImportError as error:
    raise SourceError(
        "mcap:// needs the package mcap, which is not installed: pip install 'tandem-edge[mcap]'."
    ) from error

MAX_RECORD_BYTES = 256 << 20

_log = logging.getLogger(__name__)

Picture = tuple[int, int, str, dict[str, Any]]  # stamp in ns, number, type, message
Recorded = tuple[str, str, int, int, bytes]  # topic, type, log time in ns, number, message


class Recording(AbstractContextManager["Recording"]):
    """Pictures of one topic of a file, or of all files of a folder in the order of their times."""

    away = None

    def __init__(self, path: Path, topic: str, config: SourceConfig) -> None:
        """`topic`: "" takes the first with pictures. Raises SourceError: there is none."""
        self.name = redact(str(path))
        self.config = config
        self.ended = False
        self._topic = topic
        self._paths = [path]
        if path.is_dir():
            starts = {one: _start_ns(one) for one in path.glob("*.mcap")}
            # Two begin with the same frame where one was full within it: run.mcap, run-0001.mcap.
            self._paths = sorted(starts, key=lambda one: (starts[one], len(one.name), one.name))
        self._dropped: Counter[str] = Counter()
        self._pictures = self._read()
        self._start: tuple[float, Stamp] | None = None  # when the first frame was given, its stamp
        self._next = next(self._pictures, None)
        if self._next is None:
            known = sorted({message[0] for message in self._messages() if message[1] in DECODERS})
            raise SourceError(
                f"{self.name} has no pictures of topic {topic!r}: use one of"
                f" {list_choices(topic, known)}."
                if known
                else f"{self.name} has no topic of {', '.join(DECODERS)}: record pictures, too."
            )

    @property
    def dropped(self) -> Mapping[str, int]:
        """Pictures skipped so far; "corrupt": cannot be decoded; "late": see `VideoFile`."""
        return dict(self._dropped)

    @property
    def gap_s(self) -> float:
        """How far apart its frames are: as far as the next one."""
        return max(0.0, self.due_s - time.monotonic()) if self._start else 0.0

    @property
    def due_s(self) -> float:
        """When the next frame is due, in seconds of `time.monotonic()`."""
        if not self.config.realtime or self._start is None or self._next is None:
            return -inf
        begin_s, first = self._start
        return begin_s + (self._next[0] - first.wall_ns) / 1e9

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._pictures.close()

    def poll(self) -> Frame | None:
        """Return the next frame if it is due; `ended` is set after the last one."""
        now = Stamp.now()
        late_s = now.mono_ns / 1e9 - self.due_s
        if late_s < 0.0:
            return None
        if self._next is None:
            self._begin_again()
            return None
        (wall_ns, seq, kind, message), self._next = self._next, next(self._pictures, None)
        if self._start is None:
            self._start = now.mono_ns / 1e9, Stamp(now.mono_ns, wall_ns)
        if self._is_late(late_s):
            self._dropped["late"] += 1
            return None
        first = self._start[1]
        taken = Stamp(first.mono_ns + wall_ns - first.wall_ns, wall_ns)
        try:
            image = DECODERS[kind](message)
        except PictureError as error:
            _log.warning("picture %d of %s cannot be decoded: %s", seq, self.name, error)
            self._dropped["corrupt"] += 1
            return None
        return Frame(image, seq, taken, now, self.name, self.config.id)

    def _is_late(self, late_s: float) -> bool:
        limits_s = {"latest": self.gap_s, "bounded": self.config.max_age_ms / 1000.0, "every": inf}
        frames = "every" if self.config.frames is UNSET else self.config.frames
        return self.config.realtime and late_s > max(limits_s[frames], 1 / 30)

    def _begin_again(self) -> None:
        self.ended = not self.config.loop
        if not self.ended:
            self._pictures = self._read()
            self._start, self._next = None, next(self._pictures, None)

    def _read(self) -> Generator[Picture, None, None]:
        for topic, kind, log_ns, seq, data in self._messages():
            if kind not in DECODERS or self._topic not in ("", topic):
                continue
            self._topic = topic
            try:
                message = decode(kind, data)
            except PipelineError as error:
                _log.warning("picture %d of %s: %s", seq, self.name, error)
                self._dropped["corrupt"] += 1
                continue
            stamp = message["header"]["stamp"]
            wall_ns = stamp["sec"] * 1_000_000_000 + stamp["nanosec"]
            yield wall_ns or log_ns, seq, kind, message

    def _messages(self) -> Iterator[Recorded]:
        for path in self._paths:
            yield from messages_in(path)


def messages_in(path: Path) -> Iterator[Recorded]:
    """Yield the messages of a file in their order, to the last one that is whole."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror}).") from error
    with file:
        try:
            yield from _messages_in(file)
        except DAMAGE as error:
            _log.warning("%s ends early, it was not ended or is damaged: %s", path, error)


def _messages_in(file: BinaryIO) -> Iterator[Recorded]:
    schemas: dict[int, str] = {}
    channels: dict[int, Channel] = {}
    for record in _records(file):
        if isinstance(record, Schema):
            schemas[record.id] = record.name
        elif isinstance(record, Channel):
            channels[record.id] = record
        elif isinstance(record, Message):
            channel = channels[record.channel_id]
            kind = schemas.get(channel.schema_id, "") if channel.message_encoding == "cdr" else ""
            yield channel.topic, kind, record.log_time, record.sequence, record.data


def _records(file: BinaryIO) -> Iterator[McapRecord]:
    reader = StreamReader(file, emit_chunks=True, record_size_limit=MAX_RECORD_BYTES)
    for record in reader.records:
        if isinstance(record, Chunk):
            yield from breakup_chunk(replace(record, compression="", data=unpack_chunk(record)))
        else:
            yield record


def _start_ns(path: Path) -> float:
    return next((one[2] for one in messages_in(path)), inf)
