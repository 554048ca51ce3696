"""Recordings in MCAP: messages of ROS 2 in chunks, compressed with zstd, with an index.

A chunk is on the disk at the latest a second after its first message. What a power cut leaves is
readable to its last whole chunk, and gets its index when the sink starts again.
"""

import fcntl
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from device.errors import PipelineError
from pipelines.ros2.cdr import Message, encode
from pipelines.ros2.messages import message_text
from pipelines.sink_config import McapSink
from pipelines.sinks.recording import RecordingOut
from pipelines.sinks.result import SinkContext

try:
    from mcap.writer import Writer

    from pipelines.sinks.mcap_finish import LIBRARY, finish_recording
except ImportError as error:
    raise PipelineError(
        "the mcap sink needs the package mcap, which is not installed: pip install"
        " 'tandem-edge[mcap]'."
    ) from error

CHUNK_BYTES = 1 << 20  # larger ones cost memory: the writer copies them five times
SYNC_BYTES = 4 << 20
CHUNK_S = 1.0
RETRY_S = 5.0  # after an error of the disk
PROFILE = "ros2"

_log = logging.getLogger(__name__)


class McapFile:
    """One file. It is locked while it is written: whoever ends what others left skips it."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        self.path = path
        self._file = path.open("r+b", buffering=1 << 20)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.truncate()
        self.start_s = time.monotonic()
        self._chunk_s = self.start_s
        self._channels: dict[str, int] = {}
        self._schemas: dict[str, int] = {}
        self._writer = Writer(self._file, chunk_size=CHUNK_BYTES)
        self._writer.start(PROFILE, LIBRARY)
        if about:
            self._writer.add_metadata("tandem", about)
        self._on_disk = self.size
        self._disk = ThreadPoolExecutor(1, "mcap disk")
        self._syncing: Future[None] = Future()
        self._syncing.set_result(None)

    @property
    def size(self) -> int:
        """Bytes so far, without the chunk in memory."""
        return self._file.tell()

    def put(self, topic: str, kind: str, data: bytes, wall_ns: int, seq: int) -> None:
        """Add a message. Raises OSError."""
        if topic not in self._channels:
            if kind not in self._schemas:
                text = message_text(kind).encode()
                self._schemas[kind] = self._writer.register_schema(kind, "ros2msg", text)
            self._channels[topic] = self._writer.register_channel(topic, "cdr", self._schemas[kind])
        self._writer.add_message(self._channels[topic], wall_ns, data, wall_ns, seq)
        self.sync()

    def sync(self) -> None:
        """Bring chunks to the disk that are whole, or a second old; a disk that takes long is not
        waited for. Raises OSError, also of the time before."""
        if not self._syncing.done():
            return
        self._syncing.result()
        now_s = time.monotonic()
        if now_s - self._chunk_s >= CHUNK_S:
            self._writer.flush()
            self._chunk_s = now_s
        elif self.size - self._on_disk < SYNC_BYTES:
            return
        if self.size == self._on_disk:
            return
        self._file.flush()
        self._syncing = self._disk.submit(os.fdatasync, self._file.fileno())
        self._on_disk, self._chunk_s = self.size, now_s

    def close(self, *, whole: bool = True) -> None:
        """Write the index and close; not `whole`: after an error, as a power cut leaves it."""
        self._disk.shutdown()
        try:
            if whole:
                self._writer.finish()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class McapOut(RecordingOut):
    """Writes recordings, the next one at `max_mb` or `max_s`: seen.mcap, seen-0001.mcap ..."""

    kind = "mcap"
    _config: McapSink

    def __init__(self, config: McapSink, context: SinkContext) -> None:
        """Claim the first file. Raises PipelineError."""
        super().__init__(config, context)
        self._files = context.files
        self._about = dict(context.about)
        self._base = context.files.place(config.path, "mcap")
        self._earlier = sorted(self._base.parent.glob(f"{self._base.stem}*.mcap"))
        self._path, self._is_new = context.files.claim_new(self._base, "mcap")
        self._count = 0
        self._file: McapFile | None = None
        self._retry_s = 0.0

    def is_wanted(self, topic: str) -> bool:
        """All topics are written."""
        return True

    def put(self, topic: str, kind: str, message: Message, wall_ns: int, seq: int) -> None:
        """Write a message, in the next file if this one is full."""
        data = encode(kind, message)
        if not self._files.has_room(len(data)):
            self._dropped["mcap_quota"] += 1
            self.close()
            return
        try:
            self._open_file().put(topic, kind, data, wall_ns, seq)
        except OSError:
            self._retry_s = time.monotonic() + RETRY_S
            if self._file is not None:
                file, self._file = self._file, None
                file.close(whole=False)
            raise

    def idle(self) -> None:
        """Bring the last chunk to the disk; at first, end the files that a power cut left."""
        if self._file is not None:
            self._file.sync()
        elif self._earlier:
            finish_recording(self._earlier.pop())

    def close(self) -> None:
        """End the file; without messages it is removed."""
        while self._earlier:
            finish_recording(self._earlier.pop())
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
        elif self._is_new and not self._count:
            self._path.unlink(missing_ok=True)

    def _open_file(self) -> McapFile:
        file = self._file
        if file is not None and (
            file.size >= self._config.max_mb << 20
            or time.monotonic() - file.start_s >= self._config.max_s
        ):
            self._file = None
            file.close()
        if self._file is None:
            if time.monotonic() < self._retry_s:
                raise OSError(f"{self._base} is tried again after {RETRY_S:g} s")
            if self._count:
                numbered = self._base.with_stem(f"{self._base.stem}-{self._count:04d}")
                self._path, self._is_new = self._files.claim_new(numbered, "mcap")
            self._count += 1
            self._file = McapFile(self._path, self._about)
        return self._file
