"""Recordings in MCAP: messages of ROS 2 in chunks, compressed with zstd, with an index.

A chunk is on the disk at the latest a second after its first message. What a power cut leaves is
readable to its last whole chunk, and gets its index when the sink starts again.
"""

import fcntl
import glob
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from device.errors import PipelineError
from pipelines.ros2.cdr import Message, encode
from pipelines.ros2.messages import message_text
from pipelines.sink_config import McapSink
from pipelines.sinks.files import MAX_NAMES
from pipelines.sinks.recording import CLOSE_S, RecordingOut
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
LOCK_S = 1.0  # for one who ends the file that is overwritten
PROFILE = "ros2"


class McapFile:
    """One file. It is locked while it is written: whoever ends what others left skips it."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        self.path = path
        self._file = path.open("r+b", buffering=1 << 20)
        try:
            self._lock()
            self._file.truncate()
        except OSError:
            self._file.close()
            raise
        self.pending = 0  # messages that are not known to be on the disk
        self._written = 0  # those of them in chunks of the file
        self._in_sync = 0  # those that are being brought to the disk
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

    def _lock(self) -> None:
        end_s = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= end_s:
                    text = "another program has locked the file"
                    raise BlockingIOError(error.errno, text, str(self.path)) from error
            time.sleep(0.02)

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
        size = self.size
        self.pending += 1
        self._writer.add_message(self._channels[topic], wall_ns, data, wall_ns, seq)
        if self.size != size:
            self._written = self.pending
        self.sync()

    def sync(self) -> None:
        """Bring chunks to the disk that are whole, or a second old; a disk that takes long is not
        waited for. Raises OSError, also of the time before."""
        if not self._syncing.done():
            return
        self._syncing.result()
        self.pending -= self._in_sync
        self._written -= self._in_sync
        self._in_sync = 0
        now_s = time.monotonic()
        if now_s - self._chunk_s >= CHUNK_S:
            self._writer.flush()
            self._chunk_s, self._written = now_s, self.pending
        elif self.size - self._on_disk < SYNC_BYTES:
            return
        if self.size == self._on_disk:
            return
        self._file.flush()
        self._syncing = self._disk.submit(os.fdatasync, self._file.fileno())
        self._on_disk, self._chunk_s = self.size, now_s
        self._in_sync = self._written

    def close(self, *, whole: bool = True) -> None:
        """Write the index and close; not `whole`: after an error, as a power cut leaves it."""
        self._disk.shutdown()
        try:
            if whole:
                self._writer.finish()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._syncing.result()  # its error is not told again by fsync
                self.pending = 0
        finally:
            self._file.close()


class McapOut(RecordingOut):
    """Writes recordings, the next one at `max_mb` or `max_s`: seen.mcap, seen-0001.mcap ..."""

    _config: McapSink

    def __init__(self, config: McapSink, context: SinkContext) -> None:
        """Claim the first file. Raises PipelineError."""
        super().__init__("mcap", config, context)
        self._files = context.files
        self._about = dict(context.about)
        self._base = context.files.place(config.path, "mcap")
        self._path, self._is_new = context.files.claim_new(self._base, "mcap")
        self._is_used = False  # the claimed file
        self._number = 0
        self._file: McapFile | None = None
        self._retry_s = 0.0
        earlier = self._base.parent.glob(f"{glob.escape(self._base.stem)}*.mcap")
        self._ending = threading.Thread(
            target=_end_all,
            args=[sorted(path for path in earlier if path != self._path)],
            name="mcap end",
            daemon=True,
        )

    def __enter__(self) -> "McapOut":
        """Begin to write, and to end the files that a power cut left."""
        self._ending.start()
        super().__enter__()
        return self

    def is_wanted(self, topic: str) -> bool:
        """All topics are written."""
        return True

    def put(self, topic: str, kind: str, message: Message, wall_ns: int, seq: int) -> None:
        """Write a message, in the next file if this one is full."""
        data = encode(kind, message)
        if not self._files.has_room(len(data)):
            self._dropped["mcap_quota"] += 1
            self._end_file()
            return
        file = self._open_file()
        try:
            file.put(topic, kind, data, wall_ns, seq)
        except OSError:
            self._give_up()
            raise

    def idle(self) -> None:
        """Bring the last chunk to the disk."""
        try:
            if self._file is not None:
                self._file.sync()
        except OSError:
            self._give_up()
            raise

    def close(self) -> None:
        """End the file; without messages it is removed."""
        try:
            self._end_file()
            if self._is_new and not self._is_used:
                self._path.unlink(missing_ok=True)
        finally:
            self._ending.join(CLOSE_S)

    def _give_up(self) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        self._end_file(whole=False)

    def _end_file(self, *, whole: bool = True) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close(whole=whole)
        finally:
            self._is_used = self._path.stat().st_size > 0
            if file.pending > 1:  # one is counted with the error
                self._dropped["mcap_error"] += file.pending - 1

    def _open_file(self) -> McapFile:
        file = self._file
        if file is not None and (
            file.size >= self._config.max_mb << 20
            or time.monotonic() - file.start_s >= self._config.max_s
        ):
            self._end_file()
        if self._file is None:
            if time.monotonic() < self._retry_s:
                raise OSError(f"{self._base} is tried again after {RETRY_S:g} s")
            self._retry_s = time.monotonic() + RETRY_S  # unless it opens
            if self._is_used:
                self._claim_next()
            self._file = McapFile(self._path, self._about)
            self._is_used, self._retry_s = True, 0.0
        return self._file

    def _claim_next(self) -> None:
        while True:
            self._number += 1
            numbered = self._base.with_stem(f"{self._base.stem}-{self._number:04d}")
            try:
                self._path, self._is_new = self._files.claim_new(numbered, "mcap")
            except PipelineError:
                if self._number >= MAX_NAMES or not os.path.lexists(numbered):
                    raise
            else:
                self._is_used = False
                return


def _end_all(paths: list[Path]) -> None:
    for path in paths:
        finish_recording(path)
