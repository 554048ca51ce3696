"""How many bytes a board fetches for a bundle when another one is in its slot.

Nothing is estimated: the bundle is cut as the server cuts it, the other one as the board cuts what
is in its slots, and the differences are encoded as the server sends them.
"""

from pathlib import Path

import msgspec

from device.errors import BundleError
from device.update.byte_source import FileBytes
from device.update.chunk_table import ChunkTable
from device.update.cuts import cut_like
from toolkit.fleet.bundles.blob import Blob
from toolkit.fleet.bundles.delta import DeltaEncoder


class FetchBytes(msgspec.Struct, frozen=True, kw_only=True):
    """All in bytes; every transfer but `whole_bytes` begins with the index.

    `reused_bytes`: of chunks that the board copies from its slot. `reuse_bytes`: what it then
    fetches, chunks as they are. `delta_bytes`: the same with differences where they are smaller.
    """

    chunks: int
    index_bytes: int
    whole_bytes: int
    reused_chunks: int
    reused_bytes: int
    reuse_bytes: int
    delta_bytes: int


def fetch_bytes(base: Path, bundle: Path) -> FetchBytes:
    """Return what a board with `base` in its slot fetches for `bundle`. Raises BundleError."""
    blob = Blob(bundle)
    try:
        base_file = FileBytes(base)
    except OSError as error:
        blob.close()
        raise BundleError(f"cannot read {base}: {error.strerror}") from error
    try:
        return _counted(blob, base_file)
    except OSError as error:
        raise BundleError(f"cannot read {base} or {bundle}: {error.strerror or error}") from error
    finally:
        base_file.close()
        blob.close()


def _counted(blob: Blob, base: FileBytes) -> FetchBytes:
    table = blob.table
    known = _digests(cut_like(base, blob.spec.chunk_bytes))
    missing = [number for number in range(table.count) if table.digest(number) not in known]
    missing_bytes = sum(table.size(number) for number in missing)
    encoder = DeltaEncoder(blob.file, base)
    sent_bytes = 0
    for number in missing:
        difference = encoder.encode(table.starts[number], table.size(number))
        sent_bytes += table.size(number) if difference is None else len(difference)
    index_bytes = len(blob.index)
    return FetchBytes(
        chunks=table.count,
        index_bytes=index_bytes,
        whole_bytes=index_bytes + blob.spec.bytes,
        reused_chunks=table.count - len(missing),
        reused_bytes=blob.spec.bytes - missing_bytes,
        reuse_bytes=index_bytes + missing_bytes,
        delta_bytes=index_bytes + sent_bytes,
    )


def _digests(table: ChunkTable) -> frozenset[bytes]:
    return frozenset(table.digest(number) for number in range(table.count))
