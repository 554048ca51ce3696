"""Encodes chunks of a bundle as differences from an older one (`device.update.delta` decodes them).

Tensors of the same name, dtype and size are subtracted number by number: after a fine-tune the
differences are small, and their byte planes compress well. Other parts of the same name (headers,
texts) are compressed with the older part as their dictionary.
"""

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from device.protocol.documents import CHUNK_BYTES
from device.update.byte_source import ByteSource
from device.update.delta import (
    DELTA_FORMAT,
    DIFFERENCE,
    HEAD,
    MAX_OPERATIONS,
    MAX_PATCH_BYTES,
    OPERATION,
    PATCH,
    PLAIN,
)
from device.update.layout import Part, read_layout

ZSTD_LEVEL = 3
# safetensors' dtype -> the bytes of a number; what is not here is not subtracted.
ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a chunk from one part: their place in the bundle, and the base's part, if any."""

    start: int
    stop: int
    part: Part
    base: Part | None


class DeltaEncoder:
    """The differences of one bundle from one base. Raises OSError if a file cannot be read."""

    def __init__(self, bundle: ByteSource, base: ByteSource, base_number: int = 0) -> None:
        self._bundle, self._base = bundle, base
        self.base_number = base_number
        self._parts = read_layout(bundle)
        self._starts = [part.start for part in self._parts]
        self._of_base = {part.key: part for part in read_layout(base)}
        # Differences have few repetitions: short ones cost more to name than to write out.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            ZSTD_LEVEL, source_size=CHUNK_BYTES, min_match=7, write_content_size=0
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)

    def encode(self, start: int, size: int) -> bytes | None:
        """Return the difference that makes these bytes of the bundle, or None if it has no use."""
        spans = self._spans(start, start + size)
        if not any(span.base is not None for span in spans) or len(spans) > MAX_OPERATIONS:
            return None
        if len(spans) == 1 and not _is_subtracted(spans[0]):
            payload = self._patch(spans[0])
        else:
            payload = self._differences(spans)
        return payload if len(payload) < size else None

    def _spans(self, start: int, stop: int) -> list[_Span]:
        spans = []
        row = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            part = self._parts[row]
            until = min(stop, part.stop)
            spans.append(_Span(start, until, part, self._of_base.get(part.key)))
            start, row = until, row + 1
        return spans

    def _differences(self, spans: list[_Span]) -> bytes:
        rows, residuals = [], []
        for span in spans:
            data = _read(self._bundle, span.start, span.stop - span.start)
            if span.base is None or not _is_subtracted(span):
                rows.append(OPERATION.pack(0, len(data), PLAIN, 1))
                residuals.append(data)
                continue
            offset = span.base.start + span.start - span.part.start
            item_bytes = ITEM_BYTES[span.part.dtype]
            rows.append(OPERATION.pack(offset, len(data), DIFFERENCE, item_bytes))
            residuals.append(_subtract(data, _read(self._base, offset, len(data)), item_bytes))
        frame = self._compressor.compress(b"".join(residuals))
        return HEAD.pack(DELTA_FORMAT, self.base_number, len(rows)) + b"".join(rows) + frame

    def _patch(self, span: _Span) -> bytes:
        """Compress bytes with what lies around their place in the base's part."""
        assert span.base is not None
        size = span.stop - span.start
        middle = span.base.start + span.start - span.part.start
        first = max(span.base.start, min(middle, span.base.stop) - MAX_PATCH_BYTES // 2)
        last = min(span.base.stop, first + MAX_PATCH_BYTES)
        dictionary = zstandard.ZstdCompressionDict(
            _read(self._base, first, last - first), dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )
        compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, dict_data=dictionary, write_content_size=False, write_dict_id=False
        )
        row = OPERATION.pack(first, last - first, PATCH, 1)
        head = HEAD.pack(DELTA_FORMAT, self.base_number, 1)
        return head + row + compressor.compress(_read(self._bundle, span.start, size))


def _read(source: ByteSource, offset: int, length: int) -> bytes:
    data = source.read(offset, length)
    if len(data) != length:
        raise OSError("the file was cut off after it was opened")
    return data


def _is_subtracted(span: _Span) -> bool:
    """Whether the base has a tensor of the same dtype and size, and whole numbers are cut."""
    part, base = span.part, span.base
    item_bytes = ITEM_BYTES.get(part.dtype)
    if base is None or item_bytes is None:
        return False
    same = part.dtype == base.dtype and part.stop - part.start == base.stop - base.start
    return (
        same
        and (span.start - part.start) % item_bytes == 0 == (span.stop - span.start) % item_bytes
    )


def _subtract(data: bytes, base: bytes, item_bytes: int) -> bytes:
    """Return the zigzagged differences of numbers, in byte planes."""
    unsigned: npt.DTypeLike = np.dtype(f"<u{item_bytes}")
    difference = np.frombuffer(data, unsigned) - np.frombuffer(base, unsigned)
    sign = (difference.view(f"<i{item_bytes}") >> (8 * item_bytes - 1)).view(unsigned)
    zigzag: npt.NDArray[np.unsignedinteger] = (difference << 1) ^ sign
    planes = ((zigzag >> (8 * place)).astype(np.uint8) for place in range(item_bytes))
    return b"".join(plane.tobytes() for plane in planes)
