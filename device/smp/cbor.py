"""The part of CBOR (RFC 8949) that SMP needs, bounded.

A request is one flat map: keys are text; values are integers, booleans, null, text or bytes. What
is nested, tagged, of indefinite length or a float is refused before it takes memory.
"""

from collections.abc import Mapping, Sequence
from typing import Union

Scalar = Union[int, bool, None, str, bytes]  # noqa: UP007  (an alias, read on 3.10)
Value = Union[Scalar, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007
MAX_PAIRS = 16
MAX_KEY = 32  # bytes
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP = range(6)
_SIMPLE: dict[int, bool | None] = {0xF4: False, 0xF5: True, 0xF6: None}
_WIDTHS = {24: 1, 25: 2, 26: 4, 27: 8}


def decode_map(data: bytes) -> dict[str, Scalar]:
    """Return the flat map that `data` is. Raises ValueError: it is something else."""
    major, pairs, at = _head(data, 0)
    if major != _MAP:
        raise ValueError("the request is no CBOR map")
    if pairs > MAX_PAIRS:
        raise ValueError(f"the request has {pairs} keys, the limit is {MAX_PAIRS}")
    result: dict[str, Scalar] = {}
    for _ in range(pairs):
        key, at = _scalar(data, at)
        if not isinstance(key, str) or len(key) > MAX_KEY:
            raise ValueError("a key of the request is no short text")
        if key in result:
            raise ValueError(f"the key {key!r} of the request is there twice")
        result[key], at = _scalar(data, at)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the request")
    return result


def encode(value: Value) -> bytes:
    """Return a value in CBOR."""
    if value is None or isinstance(value, bool):
        return bytes((next(code for code, one in _SIMPLE.items() if one is value),))
    if isinstance(value, int):
        return _encode_head(_UNSIGNED, value) if value >= 0 else _encode_head(_NEGATIVE, ~value)
    if isinstance(value, bytes):
        return _encode_head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _encode_head(_TEXT, len(text)) + text
    if isinstance(value, Mapping):
        pairs = (encode(key) + encode(item) for key, item in value.items())
        return _encode_head(_MAP, len(value)) + b"".join(pairs)
    return _encode_head(_ARRAY, len(value)) + b"".join(encode(item) for item in value)


def _head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return major type, argument and where the item's content begins."""
    if at >= len(data):
        raise ValueError("the request ends too early")
    major, low = data[at] >> 5, data[at] & 0x1F
    at += 1
    if low < 24:
        return major, low, at
    width = _WIDTHS.get(low)
    if width is None:
        raise ValueError("the request has a length that is not known at its beginning")
    if at + width > len(data):
        raise ValueError("the request ends too early")
    return major, int.from_bytes(data[at : at + width], "big"), at + width


def _scalar(data: bytes, at: int) -> tuple[Scalar, int]:
    if at < len(data) and data[at] in _SIMPLE:
        return _SIMPLE[data[at]], at + 1
    major, argument, at = _head(data, at)
    if major == _UNSIGNED:
        return argument, at
    if major == _NEGATIVE:
        return ~argument, at
    if major not in (_BYTES, _TEXT):
        raise ValueError("a value of the request is nested, tagged or a float")
    stop = at + argument
    if stop > len(data):
        raise ValueError("the request ends too early")
    content = data[at:stop]
    if major == _BYTES:
        return content, stop
    try:
        return content.decode(), stop
    except UnicodeDecodeError as error:
        raise ValueError("a text of the request is no UTF-8") from error


def _encode_head(major: int, argument: int) -> bytes:
    if argument < 24:
        return bytes((major << 5 | argument,))
    low = next(low for low, width in _WIDTHS.items() if argument < 1 << (8 * width))
    return bytes((major << 5 | low,)) + argument.to_bytes(_WIDTHS[low], "big")
