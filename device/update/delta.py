"""Decodes a chunk that was sent as its difference from a bundle which the device has.

    1 byte    DELTA_FORMAT
    1 byte    the number of the base in the request
    2 bytes   n, the number of operations (all numbers are unsigned and little endian)
    n x 14    offset in the base (8), length (4), kind (1), bytes of an item (1)
    rest      one zstd frame with the residuals of all operations, in order

Kinds: PLAIN, the residual is the bytes. DIFFERENCE, an operation on numbers of so many bytes each:
from each the number at its place in the base was subtracted, modulo their range, and the sign was
moved into the lowest bit; the residual has first all lowest bytes, then all second ones, and so on.
PATCH, the only operation: offset and length name the bytes of the base that are the dictionary of
the frame.

A difference is never trusted: the chunk is compared with its hash. So this has only to end, within
bounded memory, whatever comes. No numpy: the agent does without it, and arithmetic on all numbers
of a chunk at once is done in one long integer, lane by lane.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from device.errors import TransferError
from device.protocol.documents import MAX_BASES
from device.update.byte_source import ByteSource

DELTA_FORMAT = 1
PLAIN, DIFFERENCE, PATCH = 0, 1, 2
ITEM_BYTES = (1, 2, 4, 8)
MAX_OPERATIONS = 4096
MAX_PATCH_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 1024**2  # of zstd
HEAD = struct.Struct("<BBH")
OPERATION = struct.Struct("<QIBB")


def can_decode() -> bool:
    """Whether the decoder of zstd is installed."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def decode_delta(payload: bytes, size: int, bases: Sequence[ByteSource]) -> bytes:
    """Return the chunk of `size` bytes that a difference makes of a base.

    Raises TransferError if it is not one, OSError if a base cannot be read.
    """
    if len(payload) < HEAD.size:
        raise TransferError(f"a difference has {len(payload)} bytes, at least {HEAD.size} needed")
    version, base_number, count = HEAD.unpack_from(payload)
    if version != DELTA_FORMAT:
        raise TransferError(
            f"a difference has format {version}, this agent reads {DELTA_FORMAT}: update the agent"
        )
    if base_number >= min(len(bases), MAX_BASES):
        raise TransferError(f"a difference names base {base_number}, there are {len(bases)}")
    frame_start = HEAD.size + count * OPERATION.size
    if not 0 < count <= MAX_OPERATIONS or len(payload) < frame_start:
        raise TransferError(f"a difference of {len(payload)} bytes has {count} operations")
    rows = list(OPERATION.iter_unpack(payload[HEAD.size : frame_start]))
    return _apply(rows, payload[frame_start:], size, bases[base_number])


def _apply(rows: list[tuple[Any, ...]], frame: bytes, size: int, base: ByteSource) -> bytes:
    offset, length, kind, _item_bytes = rows[0]
    if len(rows) == 1 and kind == PATCH:
        if length > MAX_PATCH_BYTES:
            raise TransferError(f"a difference names {length} bytes, allowed {MAX_PATCH_BYTES}")
        return _decompress(frame, size, _base_bytes(base, offset, length))
    if sum(row[1] for row in rows) != size:
        raise TransferError(f"a difference does not make a chunk of {size} bytes")
    residuals = _decompress(frame, size, b"")
    parts: list[bytes] = []
    start = 0
    for offset, length, kind, item_bytes in rows:
        residual = residuals[start : start + length]
        start += length
        if kind == PLAIN:
            parts.append(residual)
        elif kind == DIFFERENCE and item_bytes in ITEM_BYTES and length % item_bytes == 0:
            parts.append(_add(_base_bytes(base, offset, length), residual, item_bytes))
        else:
            raise TransferError(f"a difference has an operation {kind} on {item_bytes} bytes")
    return b"".join(parts)


def _base_bytes(base: ByteSource, offset: int, length: int) -> bytes:
    if offset + length > base.size:
        raise TransferError(
            f"a difference names the bytes {offset} to {offset + length}, its base has {base.size}"
        )
    data = base.read(offset, length)
    if len(data) != length:
        raise TransferError(f"the base of a difference is cut off at {offset + len(data)} bytes")
    return data


def _decompress(frame: bytes, size: int, dictionary: bytes) -> bytes:
    """Return the content of a frame, which is `size` bytes; more are never made."""
    import zstandard

    known = None
    if dictionary:
        known = zstandard.ZstdCompressionDict(dictionary, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    decoder = zstandard.ZstdDecompressor(dict_data=known, max_window_size=MAX_WINDOW_BYTES)
    try:
        with decoder.stream_reader(frame, closefd=False) as reader:
            data: bytes = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise TransferError(f"a difference cannot be decompressed: {error}") from error
    if len(data) != size:
        raise TransferError(f"a difference holds {len(data)} bytes or more, expected {size}")
    return data


def _add(base: bytes, residual: bytes, item_bytes: int) -> bytes:
    """Return base + residual, number by number, where the residual is in planes and zigzagged."""
    length = len(base)
    if item_bytes > 1:
        count = length // item_bytes
        lanes = bytearray(length)
        for place in range(item_bytes):
            lanes[place::item_bytes] = residual[place * count : (place + 1) * count]
        residual = bytes(lanes)
    lowest, highest, rest = _lane_masks(length, item_bytes)
    zigzag = int.from_bytes(residual, "little")
    # Zigzag: z / 2 for an even z, -(z + 1) / 2 for an odd one, which is the complement of z / 2.
    ones = (1 << (8 * item_bytes)) - 1
    difference = ((zigzag >> 1) & rest) ^ ((zigzag & lowest) * ones)
    number = int.from_bytes(base, "little")
    # Without its highest bits no lane carries into the next; those are added without a carry.
    total = ((number & rest) + (difference & rest)) ^ ((number ^ difference) & highest)
    return total.to_bytes(length, "little")


@lru_cache(maxsize=8)
def _lane_masks(length: int, item_bytes: int) -> tuple[int, int, int]:
    """Return integers of `length` bytes with the lowest bit, the highest bit, and all bits but the
    highest of each lane set."""
    count = length // item_bytes
    masks = []
    for bits in (1, 1 << (8 * item_bytes - 1), (1 << (8 * item_bytes - 1)) - 1):
        masks.append(int.from_bytes(bits.to_bytes(item_bytes, "little") * count, "little"))
    lowest, highest, rest = masks
    return lowest, highest, rest
