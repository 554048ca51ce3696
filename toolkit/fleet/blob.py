"""A bundle as a blob: a file that is served in chunks, with the hash of each."""

import hashlib
from pathlib import Path

from device.errors import BundleError
from device.protocol.documents import MAX_CHUNKS_A_REQUEST, BlobGet, BlobSpec
from device.update.byte_source import FileBytes
from device.update.chunk_table import encode_index
from device.update.cuts import CHUNK_FORMAT, cut_bundle

INDEX_PART = "index"
_READ_BYTES = 1024 * 1024


class Blob:
    """A file that is served in chunks, cut by its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = FileBytes(path)
            whole = hashlib.sha256()
            for offset in range(0, self.file.size, _READ_BYTES):
                whole.update(self.file.read(offset, _READ_BYTES))
            self.table, chunk_bytes = cut_bundle(self.file)
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        self.index = encode_index(self.table)
        self.spec = BlobSpec(
            sha256=whole.hexdigest(),
            bytes=self.file.size,
            chunk_bytes=chunk_bytes,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
            chunk_format=CHUNK_FORMAT,
        )

    def read(self, part: int | str) -> bytes:
        """Return the bytes of a chunk, or of the index; BundleError if the file has changed."""
        if isinstance(part, str):
            return self.index
        chunk = self.file.read(self.table.starts[part], self.table.size(part))
        if not self.table.fits(part, chunk):
            raise BundleError(
                f"{self.path} was changed while it was deployed: deploy it again, and write new "
                "bundles under new names"
            )
        return chunk

    def parts_of(self, request: BlobGet) -> tuple[int | str, ...]:
        """Return the existing parts that a request names; none if it is for another blob."""
        if request.sha256 != self.spec.sha256:
            return ()
        index: tuple[int | str, ...] = (INDEX_PART,) if request.index else ()
        chunks = request.chunks[:MAX_CHUNKS_A_REQUEST]
        return (*index, *(number for number in chunks if number < self.table.count))

    def close(self) -> None:
        """Close the file."""
        self.file.close()
