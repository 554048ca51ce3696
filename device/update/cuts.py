"""Cuts a bundle into chunks by its content, so that equal content gives equal chunks elsewhere too.

A part that is larger than a chunk (a tensor, say) is cut from its own start, whatever lies before
it. Smaller parts, and the rest of a larger one, are joined with their neighbours. A joined chunk
ends where the content of its last part says so, by chance about every half chunk, or where the
next part would not fit: an inserted or changed part moves the cuts up to the next such end alone.
"""

import hashlib
import zlib
from collections.abc import Iterator

from device.protocol.documents import CHUNK_BYTES
from device.update.byte_source import ByteSource
from device.update.chunk_table import HASH_BYTES, MAX_CHUNKS_OF, ChunkTable, make_table
from device.update.layout import read_layout

CHUNK_FORMAT = 2
MAX_CHUNK_BYTES = 256 * 1024
_CRC_VALUES = 1 << 32


def cut_bundle(source: ByteSource) -> tuple[ChunkTable, int]:
    """Return the chunks of a bundle and the most bytes that one may have. Raises OSError.

    That is 64 KiB; more only where the index would become too long.
    """
    chunk_bytes = CHUNK_BYTES
    while True:
        table = _table(source, chunk_bytes)
        if table.count <= MAX_CHUNKS_OF[CHUNK_FORMAT] or chunk_bytes >= MAX_CHUNK_BYTES:
            return table, chunk_bytes
        chunk_bytes *= 2


def cut_like(source: ByteSource, chunk_bytes: int) -> ChunkTable:
    """Return the chunks of a bundle, cut as another one whose chunks have `chunk_bytes` at most."""
    return _table(source, chunk_bytes)


def _table(source: ByteSource, chunk_bytes: int) -> ChunkTable:
    hashes, sizes = bytearray(), []
    for piece in _chunks(source, chunk_bytes):
        hashes += hashlib.sha256(piece).digest()
        sizes.append(len(piece))
    assert len(hashes) == HASH_BYTES * len(sizes)
    return make_table(bytes(hashes), sizes)


def _chunks(source: ByteSource, chunk_bytes: int) -> Iterator[bytes]:
    joined = b""
    for piece in _pieces(source, chunk_bytes):
        if len(joined) + len(piece) > chunk_bytes:
            yield joined
            joined = b""
        joined += piece
        if len(joined) == chunk_bytes or _ends_chunk(piece, chunk_bytes):
            yield joined
            joined = b""
    if joined:
        yield joined


def _pieces(source: ByteSource, chunk_bytes: int) -> Iterator[bytes]:
    """Yield each part, a large one in whole chunks and a rest; nothing is joined with a whole
    chunk."""
    for part in read_layout(source):
        for start in range(part.start, part.stop, chunk_bytes):
            yield source.read(start, min(chunk_bytes, part.stop - start))


def _ends_chunk(piece: bytes, chunk_bytes: int) -> bool:
    """Whether a chunk ends after this piece: the more bytes it has, the likelier."""
    return zlib.crc32(piece) * (chunk_bytes // 2) < len(piece) * _CRC_VALUES
