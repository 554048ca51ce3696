"""Bodies and messages that clients have packed."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipelines.serving.protocol import Status, refuse
from pipelines.serving.service import Service

PIECE_BYTES = 1 << 20


@asynccontextmanager
async def unpacked(
    service: Service, encoding: str, body: bytes | memoryview
) -> AsyncIterator[memoryview]:
    """Unpack a body; its size is held inside the block. Raises Refusal."""
    if encoding == "identity":
        yield memoryview(body)
        return
    if encoding not in {"gzip", "deflate"}:
        refuse(f"the content-encoding is {encoding[:40]!r}; this server takes gzip and deflate")
    limit = service.max_request_bytes
    data, counted = bytearray(), 0
    try:
        async for piece in _pieces(encoding, body):
            if len(data) + len(piece) > limit:
                refuse(
                    f"the request has more than {limit} bytes when it is unpacked, which this"
                    " server takes",
                    Status.TOO_LARGE,
                )
            service.hold(len(piece), len(data) + len(piece))
            counted += len(piece)
            data += piece
        yield memoryview(data)
    finally:
        service.release(counted)


async def _pieces(encoding: str, body: bytes | memoryview) -> AsyncIterator[bytes]:
    """Unpack in another thread, piece by piece. Raises Refusal."""
    unpack = zlib.decompressobj(47)
    for start in range(0, len(body), PIECE_BYTES):
        packed: bytes | memoryview = body[start : start + PIECE_BYTES]
        full = True
        while packed or full:
            try:
                piece = await asyncio.to_thread(unpack.decompress, packed, PIECE_BYTES)
            except zlib.error as error:
                refuse(f"the body is no {encoding}: {error}")
            yield piece
            packed, full = unpack.unconsumed_tail, len(piece) == PIECE_BYTES
    if not unpack.eof:
        refuse(f"the body ends before its {encoding} does")
