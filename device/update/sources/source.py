"""The interface of a source: bytes of a blob by ranges. What it gives is never trusted."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from device.errors import TransferError
from device.protocol.documents import BlobSpec


class SourceGoneError(TransferError):
    """The source does not have the blob, and will not: it is not asked again."""


class SourceReadError(TransferError):
    """The source cannot be read now: another one is asked, and later this one again."""


class Source(Protocol):
    """Bytes of a blob by ranges. All raise SourceGoneError or SourceReadError."""

    def index(self, blob: BlobSpec) -> bytes:
        """Return the index of the chunks."""

    def fetch(self, blob: BlobSpec, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each range (offset, length), in order."""

    def close(self) -> None:
        """End connections."""


def file_names(sha256: str, target: str) -> tuple[str, ...]:
    """Return the paths that a bundle may have in a folder or below a URL.

    That of a TUF repository with consistent snapshots, if it has a target path, and its hash.
    """
    folder, slash, name = target.rpartition("/")
    consistent = (f"{folder}{slash}{sha256}.{name}",) if target and ".." not in target else ()
    return (*consistent, f"{sha256}.bundle")
