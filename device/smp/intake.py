"""A bundle that arrives as the chunks which the board lacks, one after the other in a stream.

A client uploads the list of the chunks first (`ChunkList`), reads the plan, and then sends for
each chunk of the plan, in its order, a record: kind and length (5 bytes), and the chunk itself or
its difference from a release in a slot. An offset counts the bytes of this stream. A record that
does not make its chunk moves the offset back to its beginning.

chunks.list       what the client uploaded
chunks/           the chunks that are there, as in every download
"""

import hashlib
import logging
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device.errors import TransferError
from device.files import make_folder, read_regular, sync_folder
from device.protocol.documents import MAX_INDEX_BYTES, BlobSpec
from device.smp.message import Code, SmpError
from device.smp.upload import IDLE_S
from device.update.part_file import Fetch

LOG = logging.getLogger("tandem.agent")
RECORD = struct.Struct("<BI")  # kind, and bytes of what follows
PLAIN, DELTA = 0, 1
MAX_LIST_BYTES = MAX_INDEX_BYTES + 4096
_WINDOW_CHUNKS = 64


class ChunkList(msgspec.Struct, frozen=True, kw_only=True):
    """The bundle and its index (`device.update.chunk_table`), as a client uploads them."""

    blob: BlobSpec
    index: bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be sent: `missing` has a bit for each chunk, the lowest bit of a byte first; it is
    empty where the bundle is there.

    The record of the chunk number `chunk` begins at `start` of the stream, and the board has the
    bytes before `offset`. `bases`: SHA-256 of the releases that differences may be taken from.
    """

    sha256: str
    missing: bytes
    chunk: int
    start: int
    offset: int
    bases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """The next offset. `match`: whether the whole bundle fits its SHA-256, None before its end;
    `rejected`: the record at the offset was damaged."""

    offset: int
    match: bool | None = None
    rejected: bool = False


class Intake:
    """At most one bundle at a time. `slots`: folders of unpacked releases by their SHA-256."""

    def __init__(
        self,
        folder: Path,
        slots: Callable[[], Mapping[str, Path]],
        *,
        prepare: Callable[[BlobSpec], bool],
        on_whole: Callable[[Path, str], None],
    ) -> None:
        """`prepare` makes room, and returns whether the whole bundle is there already. `on_whole`
        takes the whole bundle, which it moves, and its SHA-256."""
        self._list = folder / "chunks.list"
        self._folder = folder / "chunks"
        self._slots = slots
        self._prepare = prepare
        self._on_whole = on_whole
        self._fetch: Fetch | None = None
        self._plan: tuple[int, ...] = ()
        self._row = 0  # of the plan: the record that arrives
        self._record = bytearray()
        self._start = 0
        self._ended_sha256 = ""  # the bundle that has arrived whole, and where its stream ended
        self._peer: object = None
        self._heard_s = float("-inf")

    def take_list(self, path: Path, _sha256: str) -> None:
        """Keep an uploaded list of chunks; what came for another bundle is dropped."""
        self._close()
        path.rename(self._list)

    def holds(self, sha256: str | None) -> bool:
        """Whether this is the list that was uploaded last."""
        try:
            return hashlib.sha256(read_regular(self._list, MAX_LIST_BYTES)).hexdigest() == sha256
        except OSError:
            return False

    def is_busy(self, peer: object) -> bool:
        """Whether another client sends a bundle."""
        return peer != self._peer and time.monotonic() - self._heard_s < IDLE_S

    def plan(self, peer: object) -> Plan:
        """Return what this client has to send; one that asked before has to ask again."""
        if self._fetch is None:
            chunks = self._read_list()
            if self._prepare(chunks.blob):
                self.remove()
                self._ended_sha256 = chunks.blob.sha256
                return Plan(chunks.blob.sha256, b"", 0, 0, 0, ())
            self._open(chunks)
        fetch = self._fetch
        assert fetch is not None
        table = fetch.download.table
        assert table is not None
        self._peer, self._heard_s = peer, time.monotonic()
        if not self._plan:
            sha256 = fetch.download.spec.sha256
            if not self._finish(fetch):
                raise SmpError(Code.CORRUPT, "the chunks do not make the bundle: send it again")
            return Plan(sha256, b"", 0, 0, 0, ())
        missing = bytearray(-(-table.count // 8))
        for number in self._plan:
            missing[number // 8] |= 1 << number % 8
        return Plan(
            sha256=fetch.download.spec.sha256,
            missing=bytes(missing),
            chunk=self._plan[self._row],
            start=self._start,
            offset=self._start + len(self._record),
            bases=fetch.download.bases,
        )

    def take(self, peer: object, offset: int, data: bytes) -> Taken:
        """Take bytes of the stream; those at another offset than the next one are dropped."""
        if self._fetch is None and self._ended_sha256:
            return Taken(self._start, match=True)  # the answer to the last bytes was lost
        if self._fetch is None:
            raise SmpError(Code.BAD_STATE, "no transfer has begun: upload the list of chunks")
        if peer != self._peer:
            raise SmpError(Code.BUSY, "another client has continued this transfer: begin anew")
        self._heard_s = time.monotonic()
        if offset == self._start + len(self._record):
            try:
                return self._feed(self._fetch, data)
            except OSError as error:
                self._close()
                raise SmpError(
                    Code.UNKNOWN,
                    f"the disk does not take the bundle: {error.strerror}; make room and send it "
                    "again",
                ) from error
        return Taken(self._start + len(self._record))

    def remove(self) -> None:
        """Forget what has arrived."""
        self._close()
        self._list.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_list(self) -> ChunkList:
        try:
            return msgspec.json.decode(read_regular(self._list, MAX_LIST_BYTES), type=ChunkList)
        except OSError as error:
            raise SmpError(
                Code.BAD_STATE, "no transfer has begun: upload the list of chunks"
            ) from error
        except (ValueError, RecursionError) as error:
            self._list.unlink()
            raise SmpError(
                Code.CORRUPT, f"the list of chunks is not understood: {error}"
            ) from error

    def _open(self, chunks: ChunkList) -> None:
        make_folder(self._folder, 0o700)
        bases = self._slots()
        try:
            fetch = Fetch(self._folder, chunks.blob, _WINDOW_CHUNKS, bases, in_background=True)
        except TransferError as error:
            raise SmpError(Code.NO_MEMORY, str(error)) from error
        try:
            if not fetch.download.has_index:
                fetch.on_part("index", chunks.index, 0.0)
        except TransferError as error:
            fetch.close()
            raise SmpError(Code.CORRUPT, str(error)) from error
        if not fetch.download.has_index:
            fetch.close()
            self._list.unlink()
            raise SmpError(Code.CORRUPT, "the list of chunks is not that of its bundle")
        self._fetch, self._plan = fetch, fetch.download.missing
        self._row = self._start = 0
        self._record.clear()
        self._ended_sha256 = ""

    def _feed(self, fetch: Fetch, data: bytes) -> Taken:
        """Take bytes behind those that are there."""
        view, table = memoryview(data), fetch.download.table
        assert table is not None
        while view:
            number = self._plan[self._row] if self._row < len(self._plan) else None
            if number is None:
                raise SmpError(Code.INVALID, "bytes follow the last chunk")
            head = view[: max(0, RECORD.size - len(self._record))]
            self._record += head
            view = view[len(head) :]
            if len(self._record) < RECORD.size:
                break
            kind, length = RECORD.unpack_from(self._record)
            most = table.size(number)
            if kind not in (PLAIN, DELTA) or not 0 < length <= most:
                return self._reject(f"a record of kind {kind} has {length} bytes, not 1 to {most}")
            piece = view[: RECORD.size + length - len(self._record)]
            self._record += piece
            view = view[len(piece) :]
            if len(self._record) == RECORD.size + length:
                part = f"d{number}" if kind == DELTA else str(number)
                fetch.on_part(part, bytes(self._record[RECORD.size :]), 0.0)
                if fetch.download.wants(number):
                    return self._reject(f"chunk {number} was damaged on its way")
                self._start += len(self._record)
                self._record.clear()
                self._row += 1
        if self._row == len(self._plan):
            return Taken(self._start, match=self._finish(fetch))
        return Taken(self._start + len(self._record))

    def _reject(self, why: str) -> Taken:
        LOG.warning("SMP: %s: it is sent again", why)
        self._record.clear()
        return Taken(self._start, rejected=True)

    def _finish(self, fetch: Fetch) -> bool:
        """Pass the whole bundle on; return whether it has the SHA-256 that was announced."""
        path, sha256 = fetch.file.path, fetch.download.spec.sha256
        try:
            fetch.file.finish()
        except TransferError as error:
            LOG.warning("SMP: %s", error)
            self.remove()
            return False
        self._close()
        self._on_whole(path, sha256)
        sync_folder(path.parent)
        self.remove()
        self._ended_sha256 = sha256
        return True

    def _close(self) -> None:
        if self._fetch is not None:
            self._fetch.close()
        self._fetch, self._peer, self._heard_s = None, None, float("-inf")
        self._record.clear()
        self._ended_sha256 = ""
