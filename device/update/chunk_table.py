"""The index of a blob: the SHA-256 and the place of every chunk, in order.

    format 1   SHA-256 (32 bytes) of each chunk; all but the last have the same length
    format 2   SHA-256 (32 bytes) and length (4 bytes, little endian) of each chunk

The desired document names the hash of the index, so what is read here is what the host wrote, or
it was written by a host that errs.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from device.errors import TransferError
from device.protocol.documents import MAX_CHUNKS, MAX_INDEX_BYTES, BlobSpec

CHUNK_FORMATS = (1, 2)
HASH_BYTES = 32
_ROW = struct.Struct("<32sI")
# Format -> the most chunks that its index may list.
MAX_CHUNKS_OF = {1: MAX_CHUNKS, 2: min(MAX_CHUNKS, MAX_INDEX_BYTES // _ROW.size)}


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The chunks of a blob: `hashes` has 32 bytes for each, `starts` its offset, and the end."""

    hashes: bytes
    starts: "array[int]"

    @property
    def count(self) -> int:
        """The number of chunks."""
        return len(self.starts) - 1

    def size(self, number: int) -> int:
        """The bytes of one chunk."""
        return self.starts[number + 1] - self.starts[number]

    def digest(self, number: int) -> bytes:
        """The SHA-256 of one chunk."""
        return self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]

    def fits(self, number: int, payload: bytes) -> bool:
        """Whether a payload is the chunk of this number, which exists."""
        return len(payload) == self.size(number) and hashlib.sha256(
            payload
        ).digest() == self.digest(number)


def repeats_of(table: ChunkTable) -> dict[int, tuple[int, ...]]:
    """Return the chunks whose content is there again, each with the others, first ones first."""
    order = sorted(range(table.count), key=table.digest)  # stable: numbers stay in order
    groups = (tuple(group) for _, group in groupby(order, key=table.digest))
    return {group[0]: group[1:] for group in groups if group[1:]}


def make_table(hashes: bytes, sizes: Sequence[int]) -> ChunkTable:
    """Return the table of chunks with these hashes and lengths in bytes."""
    return ChunkTable(hashes, array("Q", accumulate(sizes, initial=0)))


def encode_index(table: ChunkTable) -> bytes:
    """Return the index in format 2."""
    return b"".join(_ROW.pack(table.digest(n), table.size(n)) for n in range(table.count))


def index_fits(payload: bytes, spec: BlobSpec) -> bool:
    """Whether this is the index that the desired document names; no index is larger than its
    message may be."""
    return (
        len(payload) <= MAX_INDEX_BYTES and hashlib.sha256(payload).hexdigest() == spec.index_sha256
    )


def decode_index(payload: bytes, spec: BlobSpec) -> ChunkTable:
    """Return the chunks that an index lists; TransferError unless they make up the blob."""
    if spec.chunk_format == 1:
        hashes, sizes = payload, _equal_sizes(payload, spec)
    else:
        if len(payload) % _ROW.size:
            raise _damaged(spec, f"has {len(payload)} bytes, no multiple of {_ROW.size}")
        rows = list(_ROW.iter_unpack(payload))
        hashes, sizes = b"".join(digest for digest, _ in rows), [size for _, size in rows]
    most = MAX_CHUNKS_OF[spec.chunk_format]
    if len(sizes) > most:
        raise _damaged(spec, f"lists {len(sizes)} chunks, the limit is {most}")
    for number, size in enumerate(sizes):
        if not 0 < size <= spec.chunk_bytes:
            raise _damaged(
                spec, f"gives chunk {number} {size} bytes, allowed are 1 to {spec.chunk_bytes}"
            )
    if sum(sizes) != spec.bytes:
        raise _damaged(spec, f"lists {sum(sizes)} bytes, the blob has {spec.bytes}")
    return make_table(hashes, sizes)


def _equal_sizes(payload: bytes, spec: BlobSpec) -> list[int]:
    count = -(-spec.bytes // spec.chunk_bytes)
    if len(payload) != count * HASH_BYTES:
        raise _damaged(spec, f"has {len(payload)} bytes, {count} chunks need {count * HASH_BYTES}")
    return [*[spec.chunk_bytes] * (count - 1), spec.bytes - (count - 1) * spec.chunk_bytes]


def _damaged(spec: BlobSpec, why: str) -> TransferError:
    return TransferError(
        f"the index of the blob {spec.sha256[:12]}... {why}: the host that wrote it errs; publish "
        "or deploy the bundle again"
    )
