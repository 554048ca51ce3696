"""A bundle as a blob: a file that is served in chunks, with the hash of each."""

import hashlib
import os
from pathlib import Path

from device.errors import BundleError
from device.protocol.documents import CHUNK_BYTES, MAX_CHUNKS_A_REQUEST, BlobGet, BlobSpec

INDEX_PART = "index"


class Blob:
    """A file that is served in chunks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise BundleError(f"cannot read {path}: {error.strerror}") from error
        whole, hashes = hashlib.sha256(), bytearray()
        size = 0
        while chunk := self._file.read(CHUNK_BYTES):
            whole.update(chunk)
            hashes += hashlib.sha256(chunk).digest()
            size += len(chunk)
        self.index = bytes(hashes)
        self.spec = BlobSpec(
            sha256=whole.hexdigest(),
            bytes=size,
            chunk_bytes=CHUNK_BYTES,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
        )

    def read(self, part: int | str) -> bytes:
        """Return the bytes of a chunk, or of the index; BundleError if the file has changed."""
        if isinstance(part, str):
            return self.index
        chunk = os.pread(self._file.fileno(), CHUNK_BYTES, part * CHUNK_BYTES)
        if hashlib.sha256(chunk).digest() != self.index[part * 32 : part * 32 + 32]:
            raise BundleError(
                f"{self._path} was changed while it was deployed: deploy it again, and write new "
                "bundles under new names"
            )
        return chunk

    def parts_of(self, request: BlobGet) -> tuple[int | str, ...]:
        """Return the existing parts that a request names; none if it is for another blob."""
        if request.sha256 != self.spec.sha256:
            return ()
        index: tuple[int | str, ...] = (INDEX_PART,) if request.index else ()
        chunks = request.chunks[:MAX_CHUNKS_A_REQUEST]
        return (*index, *(number for number in chunks if number < self.spec.chunks))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
