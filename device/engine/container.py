"""The safetensors container: a JSON header that says where each array lies, then the arrays.

    8 bytes   length of the header, little endian, unsigned
    header    {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets"}, ...}
    data      the arrays, back to back, little endian, row-major

This is our own small reader and writer, because the board's install has no safetensors library. It
writes the bytes that the library writes and refuses what the library refuses, and more besides:
repeated keys, unknown fields, and dtypes that numpy does not have.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from device.engine.manifest import ITEM_BYTES
from device.errors import EngineError

# The format allows 100 MB, which become 1.4 GB of objects. DenseNet-121 has 0.33 MB, 455 entries,
# and 27,000 values.
MAX_HEADER_BYTES = 16 * 1024**2
MAX_ENTRIES = 65_536
MAX_JSON_VALUES = 1_000_000
MAX_RANK = 32  # the most dimensions that every numpy takes
PREFIX_BYTES = 8
_METADATA = "__metadata__"
_MAX_INT = 2**63 - 1

# safetensors' name and numpy's name, in the order in which safetensors stores the arrays.
DTYPES: tuple[tuple[str, str], ...] = (
    ("U64", "uint64"),
    ("I64", "int64"),
    ("F64", "float64"),
    ("F32", "float32"),
    ("U32", "uint32"),
    ("I32", "int32"),
    ("F16", "float16"),
    ("U16", "uint16"),
    ("I16", "int16"),
    ("I8", "int8"),
    ("U8", "uint8"),
    ("BOOL", "bool"),
)
_TO_NUMPY = dict(DTYPES)
_FROM_NUMPY = {ours: theirs for theirs, ours in DTYPES}
_ORDER = {ours: row for row, (_, ours) in enumerate(DTYPES)}

_Size = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]


class _RawEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array as the header states it; the order of the fields is the order in the file."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_METADATA_DECODER = msgspec.json.Decoder(dict[str, str])
_ENTRY_DECODER = msgspec.json.Decoder(_RawEntry)


@dataclass(frozen=True, slots=True)
class Entry:
    """One array: numpy's dtype name, its shape, and its bytes counted from the first array."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds. `data_start` is the place of the first array in the file, in bytes."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def repeated_key(text: str | bytes) -> str | None:
    """Return a key that an object of this valid JSON holds twice, or None.

    JSON readers keep the last of two equal keys without a word, so two of them may see two
    different files in one.
    """
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                repeated.append(key)
            seen.add(key)

    json.loads(text, object_pairs_hook=pairs)
    return repeated[0] if repeated else None


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Return the length of the header in bytes, read from the first 8 bytes of a file.

    Raises EngineError if the file cannot hold such a header.
    """
    if file_bytes < PREFIX_BYTES:
        raise EngineError(
            f"{where} is not an engine: it has {file_bytes} bytes, an engine at least "
            f"{PREFIX_BYTES}; copy or build it again"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise EngineError(
            f"{where} is not an engine: its header would be {length} bytes long, the limit is "
            f"{MAX_HEADER_BYTES}; give a file that 'tandem build' wrote"
        )
    if length > file_bytes - PREFIX_BYTES:
        raise EngineError(
            f"{where} is cut off: its header is {length} bytes long, the file has "
            f"{file_bytes - PREFIX_BYTES} after the length; copy or build it again"
        )
    return length


def parse_header(blob: bytes, file_bytes: int, where: str) -> Header:
    """Return the typed header in `blob` (the header's bytes) of a file of `file_bytes` bytes.

    Every dtype, shape and offset is checked: the arrays cover the data of the file without hole,
    overlap or rest. Raises EngineError, which begins with `where`.
    """
    if not blob.startswith(b"{"):
        raise EngineError(
            f"{where} is not an engine: its header does not start with '{{'; "
            "give a file that 'tandem build' wrote"
        )
    _check_counts(blob, where)
    try:
        table = _TABLE.decode(blob)
        stated = table.pop(_METADATA, msgspec.Raw(b"{}"))
        if len(table) > MAX_ENTRIES:
            raise EngineError(
                f"{where} has {len(table)} entries, the limit is {MAX_ENTRIES}; "
                "give a file that 'tandem build' wrote"
            )
        metadata = _METADATA_DECODER.decode(stated)
        raw = {name: _ENTRY_DECODER.decode(value) for name, value in table.items()}
        again = repeated_key(blob)
    except (ValueError, RecursionError) as error:
        raise EngineError(
            f"{where} is damaged: its header is not valid ({error}); copy or build it again"
        ) from error
    if again is not None:
        raise EngineError(
            f"{where} is damaged: its header names {again!r} twice; copy or build it again"
        )
    entries = {name: _entry(name, value, where) for name, value in raw.items()}
    data_start = PREFIX_BYTES + len(blob)
    _check_cover(entries, file_bytes - data_start, where)
    return Header(entries, metadata, data_start)


def _check_counts(blob: bytes, where: str) -> None:
    """Refuse JSON of too many values before any of it becomes objects: each has a comma or bracket.

    Marks inside texts count too; the manifest, a text in the metadata, is bounded by this as well.
    """
    values = sum(blob.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_JSON_VALUES:
        raise EngineError(
            f"{where} is not an engine: its header has {values} values, the limit is "
            f"{MAX_JSON_VALUES}; give a file that 'tandem build' wrote"
        )


def _entry(name: str, raw: _RawEntry, where: str) -> Entry:
    dtype = _TO_NUMPY.get(raw.dtype)
    if dtype is None:
        raise EngineError(
            f"{where}: entry {name!r} has dtype {raw.dtype!r}; known are {', '.join(_TO_NUMPY)}"
        )
    if len(raw.shape) > MAX_RANK:
        raise EngineError(
            f"{where}: entry {name!r} has {len(raw.shape)} dimensions, the limit is {MAX_RANK}"
        )
    size = ITEM_BYTES[dtype]
    for dim in raw.shape:
        size *= dim
        # At every step, as a zero further on would hide a product that no address can hold.
        if size > _MAX_INT:
            raise EngineError(
                f"{where}: entry {name!r} has the shape {list(raw.shape)}, which is more than "
                f"{_MAX_INT} bytes; copy or build it again"
            )
    start, stop = raw.data_offsets
    if stop - start != size:
        raise EngineError(
            f"{where}: entry {name!r} takes {stop - start} bytes, its dtype and shape need {size}; "
            "copy or build it again"
        )
    return Entry(dtype, raw.shape, start, stop)


def _check_cover(entries: Mapping[str, Entry], data_bytes: int, where: str) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise EngineError(
                f"{where}: entry {name!r} starts at byte {entry.start} of the data, the entry "
                f"before it ends at {end}; copy or build it again"
            )
        end = entry.stop
    if end != data_bytes:
        state = "is cut off" if end > data_bytes else "has bytes that belong to no entry"
        raise EngineError(
            f"{where} {state}: its entries take {end} bytes, the file holds {data_bytes} after the "
            "header; copy or build it again"
        )


def lay_out(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Return where each array goes, in the order of the file: wide dtypes first, then by name.

    `shapes` maps a name to numpy's dtype name and the shape. Wide dtypes first keeps every array
    aligned to its element. Raises EngineError for a name or a dtype that the format cannot hold.
    """
    for name, (dtype, _) in shapes.items():
        if dtype not in _ORDER:
            raise EngineError(f"entry {name!r} has dtype {dtype}; known are {', '.join(_ORDER)}")
        if not name or name == _METADATA:
            raise EngineError(f"an entry cannot be named {name!r}; give it another name")
    entries: dict[str, Entry] = {}
    end = 0
    # By code point is by UTF-8 byte, which is how safetensors compares names.
    for name in sorted(shapes, key=lambda key: (_ORDER[shapes[key][0]], key)):
        dtype, shape = shapes[name]
        size = ITEM_BYTES[dtype]
        for dim in shape:
            size *= dim
        entries[name] = Entry(dtype, shape, end, end + size)
        end += size
    return entries


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file, padded with spaces to a multiple of 8 bytes.

    Raises EngineError if a name is not valid Unicode or the header is longer than the format takes.
    """
    table: dict[str, object] = {_METADATA: dict(metadata)}
    for name, entry in entries.items():
        table[name] = _RawEntry(_FROM_NUMPY[entry.dtype], entry.shape, (entry.start, entry.stop))
    try:
        blob = msgspec.json.encode(table)
    except UnicodeEncodeError as error:
        raise EngineError(f"the name {error.object!r} is not valid Unicode; rename it") from error
    blob += b" " * (-len(blob) % 8)
    if len(blob) > MAX_HEADER_BYTES:
        raise EngineError(
            f"the header is {len(blob)} bytes long, the limit is {MAX_HEADER_BYTES}; "
            "split the model"
        )
    return len(blob).to_bytes(PREFIX_BYTES, "little") + blob
