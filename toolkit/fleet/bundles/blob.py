"""A bundle as a blob: a file that is served in chunks, with the hash of each.

python -m toolkit.fleet.bundles.blob BUNDLE...   writes BUNDLE.index for a web server
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from device.errors import BundleError, TandemError
from device.files import write_file
from device.protocol.documents import MAX_CHUNKS_A_REQUEST, BlobGet, BlobSpec
from device.update.byte_source import FileBytes
from device.update.chunk_table import encode_index
from device.update.cuts import CHUNK_FORMAT, cut_bundle
from device.update.sources.folder import INDEX_SUFFIX

INDEX_PART = "index"
_READ_BYTES = 1024 * 1024


class Blob:
    """A file that is served in chunks, cut by its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as stack:
            try:
                self.file = FileBytes(path)
                stack.callback(self.file.close)
                whole = hashlib.sha256()
                for offset in range(0, self.file.size, _READ_BYTES):
                    whole.update(self.file.read(offset, _READ_BYTES))
                self.table, chunk_bytes = cut_bundle(self.file)
            except OSError as error:
                raise BundleError(f"cannot read {path}: {error.strerror}") from error
            stack.pop_all()
        self.index = encode_index(self.table)
        self._compared = bytearray(self.table.count)
        self.spec = BlobSpec(
            sha256=whole.hexdigest(),
            bytes=self.file.size,
            chunk_bytes=chunk_bytes,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
            chunk_format=CHUNK_FORMAT,
        )

    def read(self, part: int | str) -> bytes:
        """Return the bytes of a chunk, or of the index; BundleError if the file has changed.

        A chunk is compared when it is first read: the device compares it each time.
        """
        if isinstance(part, str):
            return self.index
        chunk = self.file.read(self.table.starts[part], self.table.size(part))
        if not self._compared[part] and not self.table.fits(part, chunk):
            raise BundleError(
                f"{self.path} was changed while it was deployed: deploy it again, and write new "
                "bundles under new names"
            )
        self._compared[part] = 1
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


def write_index(bundle: Path) -> Path:
    """Write the index of a bundle beside it and return its path; BundleError if that fails."""
    blob = Blob(bundle)
    path = bundle.with_name(f"{bundle.name}{INDEX_SUFFIX}")
    try:
        write_file(path, blob.index, 0o666, BundleError)
    finally:
        blob.close()
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Write the index of each bundle."""
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.fleet.bundles.blob",
        description="Write the index beside each bundle.",
    )
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    try:
        for bundle in parser.parse_args(argv).bundles:
            print(write_index(bundle))
    except TandemError as error:
        print(f"blob: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
