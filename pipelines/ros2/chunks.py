"""Chunks of recordings in MCAP: unpacked within a limit, and what damaged ones raise."""

import struct

import lz4.frame  # type: ignore[import-untyped]
import zstandard
from mcap.exceptions import McapError
from mcap.records import Chunk

MAX_CHUNK_BYTES = 256 << 20
DAMAGE = (
    McapError,
    zstandard.ZstdError,
    struct.error,
    EOFError,
    ValueError,
    RuntimeError,
    LookupError,
    MemoryError,
    OverflowError,
)


def unpack_chunk(chunk: Chunk) -> bytes:
    """Return the records of a chunk. Raises ValueError if they are over the limit, or not of the
    size that the chunk says; no more than that is unpacked."""
    size = chunk.uncompressed_size
    if size > MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk has {size} bytes unpacked, and may have {MAX_CHUNK_BYTES}")
    if chunk.compression == "zstd":
        data: bytes = zstandard.ZstdDecompressor().stream_reader(chunk.data).read(size + 1)
    elif chunk.compression == "lz4":
        data = lz4.frame.LZ4FrameDecompressor().decompress(chunk.data, max_length=size + 1)
    else:
        return chunk.data
    if len(data) != size:
        raise ValueError(f"a chunk says that it has {size} bytes unpacked, and has others")
    return data
