"""The disk side of a download: a sparse part file and its index, both named by the blob's hash."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from device.errors import TransferError
from device.files import UnfitFileError, open_regular, read_regular, remove, replacing, sync_folder
from device.protocol.documents import MAX_INDEX_BYTES, BlobSpec
from device.update.admission import room_for_download
from device.update.background_sync import BackgroundSync, Prefix
from device.update.byte_source import ByteSource, UnpackedBundle, open_unpacked
from device.update.chunk_table import ChunkTable, decode_index, index_fits, repeats_of
from device.update.cuts import CHUNK_FORMAT, cut_like
from device.update.delta import can_decode, decode_delta
from device.update.transfer import Download
from device.update.window import RateLimit

LOG = logging.getLogger("tandem.agent")

# Gathered, waiting and being synced: a power cut loses no more than 4 MiB.
SYNC_BYTES = 4 * 1024**2 // 3
PEER = re.compile(r"[A-Za-z0-9_-]{0,32}")  # names are free to make up


class PartFile:
    """Chunks on the disk. No journal: chunks that are present are found by their hashes."""

    def __init__(self, folder: Path, spec: BlobSpec, *, in_background: bool = False) -> None:
        """Open the part file; unfinished downloads of other blobs are removed.

        `in_background`: sync and hash in a thread while more comes.
        """
        self.path = folder / f"{spec.sha256}.part"
        self._index_path = folder / f"{spec.sha256}.index"
        self._spec = spec
        self._unsynced_bytes = 0
        for leftover in folder.iterdir():
            if leftover not in (self.path, self._index_path):
                remove(leftover)
        self._file = _opened(self.path)
        try:
            _check_space(folder, spec, os.fstat(self._file).st_blocks * 512)
            os.ftruncate(self._file, spec.bytes)
        except (OSError, TransferError):
            os.close(self._file)
            raise
        self._prefix = Prefix()
        self._background = BackgroundSync(self._file) if in_background else None

    def read_index(self) -> bytes:
        """Return the saved index, unchecked; empty if there is none."""
        try:
            return read_regular(self._index_path, MAX_INDEX_BYTES)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                LOG.warning("the index is fetched again: %s", error)
                remove(self._index_path)
            return b""

    def save_index(self, blob: bytes) -> None:
        """Store the index, so that a restart does not request it again."""
        with replacing(self._index_path, 0o600) as file:
            file.write(blob)

    def present(self, table: ChunkTable) -> list[int]:
        """Return the numbers of the chunks that are present, by their hashes.

        One that the disk does not give is fetched again: a new write may go to a good sector.
        """
        if os.fstat(self._file).st_blocks == 0:
            return []
        numbers = []
        for number in range(table.count):
            start, size = table.starts[number], table.size(number)
            try:
                chunk = os.pread(self._file, size, start)
            except OSError as error:
                LOG.warning("chunk %d is fetched again: %s", number, error)
                continue
            if table.fits(number, chunk):
                numbers.append(number)
                self._prefix.add(start, start + size)
        return numbers

    def read(self, offset: int, length: int) -> bytes:
        """Return what the disk has; what cannot be read is empty."""
        try:
            return os.pread(self._file, length, offset)
        except OSError:
            return b""

    def write(self, offset: int, payload: bytes) -> None:
        """Write a verified chunk at its offset."""
        written = os.pwrite(self._file, payload, offset)
        if written != len(payload):
            raise TransferError(f"the disk took {written} of {len(payload)} bytes of a chunk")
        self._prefix.add(offset, offset + written)
        self._unsynced_bytes += written
        if self._unsynced_bytes >= SYNC_BYTES:
            self._unsynced_bytes = 0
            if self._background is None:
                os.fdatasync(self._file)
            else:
                self._background.sync(self._prefix.end)

    def finish(self) -> None:
        """Sync the file and compare all of it with the hash in the desired document."""
        background = self._background or BackgroundSync(self._file)
        self._background = None
        sha256 = background.digest(self._spec.bytes)
        os.fsync(self._file)
        if sha256 != self._spec.sha256:
            raise TransferError(
                f"the fetched bundle has the sha256 {sha256[:12]}..., announced was "
                f"{self._spec.sha256[:12]}...: the desired document does not fit it, deploy again"
            )
        sync_folder(self.path.parent)

    def close(self) -> None:
        """Close the file; it can be resumed."""
        if self._background is not None:
            self._background.close()
            self._background = None
        os.close(self._file)

    def remove(self) -> None:
        """Close and delete everything."""
        self.close()
        for path in (self.path, self._index_path):
            with contextlib.suppress(OSError):  # the next download tries again
                path.unlink()


class Fetch:
    """A download with its part file, and the bundles on the disk that it may copy chunks from."""

    def __init__(
        self,
        folder: Path,
        spec: BlobSpec,
        window_chunks: int,
        bases: Mapping[str, Path] | None = None,
        limit: RateLimit | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """`bases`: the folders of unpacked bundles, by the SHA-256 of the bundle."""
        self.download = Download(spec, window_chunks, limit)
        self._bases = dict(bases or {})
        self._sources: dict[str, UnpackedBundle] = {}
        self._copies: dict[int, tuple[int, ...]] = {}  # chunks with the same content as others
        self.copied_bytes = 0
        self.file = PartFile(folder, spec, in_background=in_background)
        index = self.file.read_index()
        if index_fits(index, spec):
            try:
                self._set_index(decode_index(index, spec))
            except (TransferError, OSError):
                self.close()
                raise

    def on_part(self, part: str, payload: bytes, now_s: float) -> None:
        """Take a message on the topic of a part: "index", "none", a chunk's number, or "d" and the
        number of a chunk that comes as a difference; after a slash the peer.

        A topic without a peer is that of a server which gives no name.
        """
        part, _, peer = part.partition("/")
        if not PEER.fullmatch(peer):
            return
        if part == "index":
            if self.download.on_index(payload, peer):
                table = decode_index(payload, self.download.spec)
                self.file.save_index(payload)
                self._set_index(table)
        elif part == "none":
            self.download.on_gone(peer, _printable(payload), now_s)
        elif (number := _chunk_number(part.removeprefix("d"))) is not None:
            if part.startswith("d"):
                self._on_delta(number, payload, now_s, peer)
            else:
                self._on_chunk(number, payload, now_s, peer)

    def close(self) -> None:
        """Close all files; the download can be resumed."""
        self.file.close()
        self._close_bases()

    def remove(self) -> None:
        """Close all files and delete those of the download."""
        self.file.remove()
        self._close_bases()

    def _close_bases(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _set_index(self, table: ChunkTable) -> None:
        repeats = repeats_of(table)
        self._copies = {
            n: (first, *rest) for first, rest in repeats.items() for n in (first, *rest)
        }
        present = self.file.present(table)
        here = frozenset(present)
        later = {n for first, rest in repeats.items() if first not in here for n in rest}
        self.download.set_index(table, present, later)
        for number in present:
            if number in self._copies:
                self._write_copies(number, self.file.read(table.starts[number], table.size(number)))
        opened = ((sha256, open_unpacked(folder)) for sha256, folder in self._bases.items())
        self._sources = {sha256: source for sha256, source in opened if source is not None}
        if self.download.spec.chunk_format == CHUNK_FORMAT:
            self._copy_from_bases(table)
            if can_decode():
                self.download.bases = tuple(self._sources)

    def _copy_from_bases(self, table: ChunkTable) -> None:
        """Take the chunks that the other bundles have as well, whatever these are."""
        numbers: dict[bytes, list[int]] = {}
        for number in self.download.missing:
            numbers.setdefault(table.digest(number), []).append(number)
        for source in self._sources.values():
            for digest, data in _chunks_of(source, self.download.spec.chunk_bytes, numbers):
                for number in numbers.pop(digest, ()):
                    if self.download.take_copied(number, data):
                        self.file.write(table.starts[number], data)
                        self.copied_bytes += len(data)
        if self.copied_bytes:
            total = self.download.spec.bytes
            LOG.info("%d of %d bytes are copied from the slots", self.copied_bytes, total)

    def _on_chunk(self, number: int, payload: bytes, now_s: float, peer: str) -> None:
        if self.download.on_chunk(number, payload, now_s, peer):
            self._write(number, payload)

    def _on_delta(self, number: int, payload: bytes, now_s: float, peer: str) -> None:
        table, download = self.download.table, self.download
        if table is None or not download.wants(number) or not self._sources:
            return
        try:
            chunk = decode_delta(payload, table.size(number), tuple(self._sources.values()))
        except (TransferError, OSError) as error:
            LOG.warning("%s; the chunks themselves are asked for", error)
            download.on_bad_delta(number, peer)
            return
        if not table.fits(number, chunk):
            LOG.warning("a difference does not make its chunk; the chunks are asked for")
            download.on_bad_delta(number, peer)
        elif download.on_chunk(number, chunk, now_s, peer, sent_bytes=len(payload)):
            self._write(number, chunk)

    def _write(self, number: int, chunk: bytes) -> None:
        assert self.download.table is not None
        self.file.write(self.download.table.starts[number], chunk)
        self._write_copies(number, chunk)

    def _write_copies(self, number: int, chunk: bytes) -> None:
        """Write a chunk at the other places of the bundle where it is, too."""
        assert self.download.table is not None
        for copy in self._copies.get(number, ()):
            if self.download.take_copied(copy, chunk):
                self.file.write(self.download.table.starts[copy], chunk)


def _chunks_of(
    source: ByteSource, chunk_bytes: int, useful: Mapping[bytes, object]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a bundle whose hashes are of use, with these; fewer if it is not read."""
    try:
        table = cut_like(source, chunk_bytes)
        for number in range(table.count):
            if table.digest(number) in useful:
                yield table.digest(number), source.read(table.starts[number], table.size(number))
    except OSError as error:
        LOG.warning("the slots give no more chunks: %s", error)


def _opened(path: Path) -> int:
    """Open a part file; what else has its name is removed: it only has to be fetched again."""
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    except UnfitFileError as error:
        LOG.warning("%s is fetched anew: %s", path.name, error)
        remove(path)
        return open_regular(path, os.O_RDWR | os.O_CREAT)


def _chunk_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _printable(payload: bytes) -> str:
    """Return a server's sentence as one line of at most 300 characters."""
    text = payload[:1200].decode(errors="replace")
    line = "".join(mark if mark.isprintable() else " " for mark in text)
    return line[:300].strip() or "a server does not have the release: publish it again"


def _check_space(folder: Path, spec: BlobSpec, allocated_bytes: int) -> None:
    """Raise TransferError unless the rest of the part file fits; `admission.no_room` judges before
    whether the release does."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    needed = room_for_download(max(0, spec.bytes - allocated_bytes))
    if free < needed:
        raise TransferError(
            f"the download needs {needed >> 20} MiB on the disk of {folder}, {free >> 20} MiB are "
            "free: make room and deploy again"
        )
