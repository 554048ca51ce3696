"""Reads sources in threads of their own, and puts what they give on the agent's queue."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device.protocol.documents import BlobGet, BlobSpec
from device.update.chunk_table import ChunkTable
from device.update.sources.folder import FolderSource
from device.update.sources.source import Source, SourceGoneError, SourceReadError


def _http(place: str, names: tuple[str, ...], ca: Path | None) -> Source:
    from device.update.sources.http import HttpSource  # most agents never need it

    return HttpSource(place, names, ca)


def _folder(place: str, names: tuple[str, ...], _ca: Path | None) -> Source:
    return FolderSource(place, names)


THREADS = 2  # while one waits for a server the other reads
# How a source begins -> who reads it; a path begins with a slash.
KINDS: tuple[tuple[str, Callable[[str, tuple[str, ...], Path | None], Source]], ...] = (
    ("http://", _http),
    ("https://", _http),
    ("file:", _folder),
    ("/", _folder),
)
MQTT = "mqtt"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A part that a source gave: "index" or the number of a chunk. `peer`: the source's name."""

    sha256: str
    part: str
    payload: bytes
    peer: str


@dataclass(frozen=True, slots=True)
class SourceEnded:
    """A source gives nothing, now or, if `permanent`, ever."""

    sha256: str
    peer: str
    reason: str
    permanent: bool


SourceEvent = SourcePart | SourceEnded


@dataclass(frozen=True, slots=True)
class _Task:
    blob: BlobSpec
    request: BlobGet
    table: ChunkTable | None


def is_source(place: str) -> bool:
    """Whether a source is one that this version reads."""
    return place == MQTT or any(place.startswith(begin) for begin, _ in KINDS)


class SourceReader:
    """One source while a download uses it; `close` it. Its events carry `peer`.

    `ca`: a CA of HTTPS besides the system's.
    """

    def __init__(
        self,
        place: str,
        names: tuple[str, ...],
        peer: str,
        put: Callable[[SourceEvent], None],
        ca: Path | None = None,
    ) -> None:
        self.peer = peer
        self._place, self._names, self._ca = place, names, ca
        self._put = put
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        for number in range(THREADS):
            name = f"source-{peer}-{number}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def ask(self, blob: BlobSpec, request: BlobGet, table: ChunkTable | None) -> None:
        """Read what a request names."""
        self._tasks.put(_Task(blob, request, table))

    def close(self) -> None:
        """End the threads once they have read what they read."""
        self._closed.set()
        for _ in range(THREADS):
            self._tasks.put(None)

    def _run(self) -> None:
        make = next(make for begin, make in KINDS if self._place.startswith(begin))
        source = make(self._place, self._names, self._ca)
        while (task := self._tasks.get()) is not None:
            if self._closed.is_set():
                break
            sha256 = task.blob.sha256
            try:
                self._read(source, task)
            except SourceGoneError as error:
                self._put(SourceEnded(sha256, self.peer, str(error), permanent=True))
            except SourceReadError as error:
                self._put(SourceEnded(sha256, self.peer, str(error), permanent=False))
        source.close()

    def _read(self, source: Source, task: _Task) -> None:
        blob, table = task.blob, task.table
        if task.request.index:
            self._put(SourcePart(blob.sha256, "index", source.index(blob), self.peer))
        if table is None:
            return
        chunks = task.request.chunks
        ranges = [(table.starts[number], table.size(number)) for number in chunks]
        for number, data in zip(chunks, source.fetch(blob, ranges), strict=False):
            if self._closed.is_set():
                return
            self._put(SourcePart(blob.sha256, str(number), data, self.peer))
