"""SMP messages: a header of 8 bytes, and a CBOR map.

Source of the layout and of the numbers: Zephyr's documentation, "SMP Protocol Specification".
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from device.smp.cbor import Value, encode

HEADER = struct.Struct("!BBHHBB")  # version and operation, flags, length, group, sequence, command
READ, WRITE = 0, 2
REQUESTS, ANSWERS = (READ, WRITE), (READ + 1, WRITE + 1)
MAX_MESSAGE = (
    65_000  # bytes, header included: what the console framing can carry, and a little less
)


class Code(IntEnum):
    """The error codes of SMP that this server answers with."""

    UNKNOWN = 1
    NO_MEMORY = 2
    INVALID = 3
    NO_ENTRY = 5
    BAD_STATE = 6
    NOT_SUPPORTED = 8
    CORRUPT = 9
    BUSY = 10
    ACCESS_DENIED = 11


class SmpError(Exception):
    """A request that is refused: the code, and a sentence for the person at the other end."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message; `version` is 0 or 1, `length` counts the bytes behind it."""

    version: int
    operation: int
    length: int
    group: int
    sequence: int
    command: int


def read_header(
    data: bytes | bytearray, at: int = 0, operations: Sequence[int] = REQUESTS
) -> Header | None:
    """Return the header of a message at an offset, None if it cannot be one of `operations`."""
    first, flags, length, group, sequence, command = HEADER.unpack_from(data, at)
    version, operation = first >> 3, first & 7
    sound = version in (0, 1) and operation in operations and flags == 0
    if not sound or length > MAX_MESSAGE - HEADER.size:
        return None
    return Header(version, operation, length, group, sequence, command)


def request(
    operation: int, group: int, command: int, sequence: int, content: Mapping[str, Value]
) -> bytes:
    """Return the message that asks for a command; `sequence`, 0 to 255, comes back with its
    answer."""
    body = encode(content)
    return HEADER.pack(1 << 3 | operation, 0, len(body), group, sequence, command) + body


def answer(header: Header, content: Mapping[str, Value]) -> bytes:
    """Return the message that answers a request."""
    body = encode(content)
    first = header.version << 3 | (header.operation + 1)
    head = HEADER.pack(first, 0, len(body), header.group, header.sequence, header.command)
    return head + body
