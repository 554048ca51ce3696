"""Where the parts of a bundle lie: its headers, its members, and in the engine every tensor.

The layout decides where a bundle is cut into chunks and which parts of two bundles are compared; it
is never trusted: a file that is no bundle, or an engine whose header cannot be read, has fewer
parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from device.update.byte_source import ByteSource
from device.update.members import (
    ENGINE,
    ENGINE_SUFFIX,
    MAX_MODELS,
    MAX_PAYLOAD_FILES,
    SUFFIXES,
)

TAR_BLOCK = 512
# bundle.json, pipeline.toml, the bill of materials, and the files of models or of a payload.
MAX_MEMBERS = 3 + max(MAX_MODELS * len(SUFFIXES), MAX_PAYLOAD_FILES)
# A longer header is one part: its objects would not fit into an agent.
MAX_HEADER_BYTES = 16 * 1024**2
MAX_TENSORS = 65_536
PREFIX_BYTES = 8  # of a safetensors file: the length of its header


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `start` to `stop` of a bundle. Parts of two bundles with the same `key` hold the same
    thing; `dtype` is safetensors' name, empty for what is not a tensor."""

    key: str
    start: int
    stop: int
    dtype: str = ""


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header, `__metadata__` included, which has neither field."""

    dtype: str = ""
    data_offsets: tuple[int, int] | None = None


def read_layout(source: ByteSource) -> tuple[Part, ...]:
    """Return the parts of a bundle in order, without a hole. Raises OSError."""
    parts: list[Part] = []
    end = 0
    for name, header, start, stop, after in _members(source):
        parts.append(Part(f"header of {name}", header, start))
        parts.extend(
            _tensors(source, name, start, stop)
            if name.endswith(ENGINE_SUFFIX)
            else (Part(name, start, stop),)
        )
        parts.append(Part(f"after {name}", stop, after))
        end = after
    parts.append(Part("end", end, source.size))
    return tuple(part for part in parts if part.start < part.stop)


def _members(source: ByteSource) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield each member: its name, and where its header, its data, their end and the next begin."""
    offset = 0
    for _ in range(MAX_MEMBERS):
        block = source.read(offset, TAR_BLOCK)
        if len(block) < TAR_BLOCK or block[257:262] != b"ustar":
            return
        try:
            name = block[:100].rstrip(b"\0").decode("ascii")
            size = int(block[124:135], 8)
        except ValueError:
            return
        start = offset + TAR_BLOCK
        stop, after = start + size, start + size + -size % TAR_BLOCK
        if size < 0 or after > source.size:
            return
        yield name, offset, start, stop, after
        offset = after


def _tensors(source: ByteSource, member: str, start: int, stop: int) -> Iterator[Part]:
    """Yield the header and the tensors of an engine, or the whole as one part."""
    of = "" if member == ENGINE else f"{member} "
    header_bytes = int.from_bytes(source.read(start, PREFIX_BYTES), "little")
    data_start = start + PREFIX_BYTES + header_bytes
    whole = Part(member, start, stop)
    if header_bytes > MAX_HEADER_BYTES or data_start > stop:
        yield whole
        return
    try:
        header = source.read(start + PREFIX_BYTES, header_bytes)
        table = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        yield whole
        return
    rows = sorted(
        (*entry.data_offsets, name, entry.dtype)
        for name, entry in table.items()
        if entry.data_offsets is not None
    )
    ends = [0, *(row[1] for row in rows)]
    gapless = all(row[0] == end <= row[1] for row, end in zip(rows, ends, strict=False))
    if not gapless or data_start + ends[-1] != stop or len(rows) > MAX_TENSORS:
        yield whole
        return
    yield Part(f"header of {member}'s tensors", start, data_start)
    for first, last, name, dtype in rows:
        yield Part(f"{of}tensor {name}", data_start + first, data_start + last, dtype)
