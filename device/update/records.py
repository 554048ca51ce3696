"""Records on the disk: a checksum, a line feed, JSON. Keys of a newer format are kept.

A device may go back to an older version of Tandem and forth again. The older one keeps the keys
that it does not know, of the record and of the records in it, and writes them back.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

MAX_RECORD_BYTES = 256 * 1024


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records; `unknown` holds the keys of a newer format."""

    unknown: Mapping[str, Any] = msgspec.field(name="", default_factory=dict)


R = TypeVar("R", bound=Record)


def encode_record(record: Record, checksum: Callable[[bytes], str]) -> bytes:
    """Return the bytes of a record, with the keys that were unknown when it was read."""
    body = msgspec.json.encode(_plain(record))
    return checksum(body).encode() + b"\n" + body


def decode_record(blob: bytes, kind: type[R], checksum: Callable[[bytes], str]) -> R:
    """Return the record in `blob`; ValueError says what is wrong with it."""
    if not blob:
        raise ValueError("it is empty")
    if len(blob) > MAX_RECORD_BYTES:
        raise ValueError(f"it is larger than {MAX_RECORD_BYTES} bytes")
    stored, _, body = blob.partition(b"\n")
    if stored != checksum(body).encode():
        raise ValueError("its checksum does not fit its content")
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
        record = msgspec.convert(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error) or "it is nested too deep") from error
    return _with_unknown(record, content)


def _plain(value: object) -> object:
    if isinstance(value, Record):
        known = {name: _plain(getattr(value, name)) for name in _names(value)}
        return {**value.unknown, **known}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def _with_unknown(record: R, content: Mapping[str, Any]) -> R:
    """Return a decoded record with the keys of `content` that its structs do not have."""
    names = _names(record)
    changes: dict[str, object] = {
        "unknown": {key: value for key, value in content.items() if key not in names}
    }
    for name in names:
        value = getattr(record, name)
        if isinstance(value, Record):
            changes[name] = _with_unknown(value, content[name])
        elif isinstance(value, tuple) and value:
            changes[name] = tuple(
                _with_unknown(one, part) if isinstance(one, Record) else one
                for one, part in zip(value, content[name], strict=True)
            )
    return msgspec.structs.replace(record, **changes)


def _names(record: Record) -> tuple[str, ...]:
    return tuple(name for name in record.__struct_fields__ if name != "unknown")
