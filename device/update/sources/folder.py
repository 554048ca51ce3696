"""Bundles in a folder: a USB stick, a share, or the disk itself."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from device.files import UnfitFileError, read_regular
from device.protocol.documents import MAX_INDEX_BYTES, BlobSpec
from device.update.byte_source import FileBytes
from device.update.chunk_table import encode_index, index_fits
from device.update.cuts import CHUNK_FORMAT, cut_like
from device.update.sources.source import SourceGoneError, SourceReadError

SUFFIX = ".bundle"
INDEX_SUFFIX = ".index"


class FolderSource:
    """The bundle in a folder: by one of the names, or any `.bundle` file of its size.

    `place`: `file:///media/usb` or a path, of a folder or of the bundle itself. Its index is made
    of the file itself, unless a file with `.index` behind the name is there.
    """

    def __init__(self, place: str, names: Sequence[str]) -> None:
        path = unquote(place.removeprefix("file://")) if place.startswith("file:") else place
        self._folder = Path(path.removeprefix("file:"))
        self._names = names
        self._file: FileBytes | None = None

    def index(self, blob: BlobSpec) -> bytes:
        """Return the index of the first file whose index is that of the blob."""
        problem: OSError | None = None
        for path in self._candidates(blob):
            try:
                self.close()
                self._file = FileBytes(path)
                index = self._index_of(path, blob)
            except OSError as error:
                problem = problem or error
                continue
            if index is not None:
                return index
        self.close()
        if problem is not None:
            raise SourceReadError(f"cannot read {self._folder}: {problem}") from problem
        raise SourceGoneError(
            f"{self._folder} has no bundle {blob.sha256[:12]}...: copy it there, or name another "
            "source"
        )

    def fetch(self, blob: BlobSpec, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each range."""
        if self._file is None:
            self.index(blob)
        for offset, length in ranges:
            assert self._file is not None
            try:
                data = self._file.read(offset, length)
            except OSError as error:
                raise SourceReadError(f"cannot read {self._folder}: {error.strerror}") from error
            if len(data) != length:
                raise SourceReadError(f"the bundle in {self._folder} is cut off: copy it again")
            yield data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _candidates(self, blob: BlobSpec) -> Iterator[Path]:
        try:
            if self._folder.is_file():
                yield self._folder
                return
            named = [self._folder / name for name in self._names]
            yield from (path for path in named if path.is_file())
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                if path not in named and path.is_file() and path.stat().st_size == blob.bytes:
                    yield path
        except OSError as error:
            raise SourceReadError(f"cannot read {self._folder}: {error.strerror}") from error

    def _index_of(self, path: Path, blob: BlobSpec) -> bytes | None:
        assert self._file is not None
        beside = path.with_name(f"{path.name}{INDEX_SUFFIX}")
        with contextlib.suppress(FileNotFoundError, UnfitFileError):
            if index_fits(index := read_regular(beside, MAX_INDEX_BYTES, follow=True), blob):
                return index
        if self._file.size != blob.bytes:
            return None
        if blob.chunk_format == CHUNK_FORMAT:
            index = encode_index(cut_like(self._file, blob.chunk_bytes))
        else:
            starts = range(0, blob.bytes, blob.chunk_bytes)
            parts = (self._file.read(start, blob.chunk_bytes) for start in starts)
            index = b"".join(hashlib.sha256(part).digest() for part in parts)
        return index if index_fits(index, blob) else None
