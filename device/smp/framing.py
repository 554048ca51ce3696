"""How SMP messages lie on a line: bytes in, whole messages out. No input raises an error.

Console: each message is base64 in lines of at most 127 bytes behind 0x06 0x09 (the first) or 0x04
0x14, with its length before and its CRC-16 (XMODEM) behind it; all else on the line is ignored.
Raw: messages follow each other as they are; after noise the next plausible header counts.
"""

import binascii
import struct
from collections.abc import Sequence
from typing import Literal, Protocol

from device.smp.message import HEADER, MAX_MESSAGE, REQUESTS, read_header

FramingName = Literal["console", "raw"]
FIRST, NEXT = b"\x06\x09", b"\x04\x14"
LINE = 127
MAX_LINE = 4096  # a client may be told to send longer lines
_LENGTH = struct.Struct("!H")
_CRC_BYTES = 2
_ZEROS = bytes(HEADER.size)  # an echo of nothing: padding within an upload that lost a byte
_LINE_DATA = (LINE - 4) // 4 * 4  # whole groups of base64 beside the marks of a line


class Framing(Protocol):
    """What a line needs of its framing."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes of the line; return the messages that are whole now."""

    def reset(self) -> None:
        """Forget what is not whole: the line was silent, or was closed."""

    def encode(self, message: bytes) -> bytes:
        """Return a message as it goes onto the line."""


class ConsoleFraming:
    """The framing of a console. It holds one line and one message at most."""

    def __init__(self) -> None:
        self._line = b""
        self._skips = False  # a line that is too long is ignored to its end
        self._packet: bytearray | None = None
        self._length = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes of the line; return the messages that are whole now."""
        *lines, self._line = (self._line + data).split(b"\n")
        if lines and self._skips:
            del lines[0]
            self._skips = False
        messages = [message for line in lines if (message := self._take(line)) is not None]
        if len(self._line) > MAX_LINE:
            self._line, self._skips, self._packet = b"", True, None
        return messages

    def reset(self) -> None:
        """Forget what is not whole."""
        self._line, self._skips, self._packet = b"", False, None

    def encode(self, message: bytes) -> bytes:
        """Return a message in lines."""
        crc = binascii.crc_hqx(message, 0)
        packet = _LENGTH.pack(len(message) + _CRC_BYTES) + message + crc.to_bytes(2, "big")
        text = binascii.b2a_base64(packet, newline=False)
        starts = range(0, len(text), _LINE_DATA)
        lines = ((NEXT if at else FIRST) + text[at : at + _LINE_DATA] + b"\n" for at in starts)
        return b"".join(lines)

    def _take(self, line: bytes) -> bytes | None:
        at = line.rfind(FIRST)
        if at >= 0:  # behind a prompt, too
            self._packet, self._length = bytearray(), 0
        elif self._packet is None or (at := line.rfind(NEXT)) < 0:
            return None
        try:
            self._packet += binascii.a2b_base64(line[at + 2 :])
        except binascii.Error:
            self._packet = None
            return None
        return self._whole()

    def _whole(self) -> bytes | None:
        """Return the message if all of it is there and its CRC fits."""
        packet = self._packet
        if packet is None or len(packet) < _LENGTH.size:
            self._packet = None
            return None
        (length,) = _LENGTH.unpack_from(packet)
        if not HEADER.size + _CRC_BYTES <= length <= MAX_MESSAGE + _CRC_BYTES:
            self._packet = None
            return None
        size = len(packet) - _LENGTH.size
        if size < length:
            return None
        self._packet = None
        message = bytes(packet[_LENGTH.size : -_CRC_BYTES])
        crc = int.from_bytes(packet[-_CRC_BYTES:], "big")
        return message if size == length and binascii.crc_hqx(message, 0) == crc else None


class RawFraming:
    """Messages as they are. There is no checksum: an upload is checked by its SHA-256."""

    def __init__(self, operations: Sequence[int] = REQUESTS) -> None:
        """`operations`: those of the messages that are expected; a client expects `ANSWERS`."""
        self._operations = operations
        self._buffer = bytearray()
        self._needed = HEADER.size  # bytes before there is anything to see

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes of the line; return the messages that are whole now."""
        self._buffer += data
        if len(self._buffer) < self._needed:
            return []
        self._needed = HEADER.size
        buffer, at, messages = self._buffer, 0, []
        while at + HEADER.size <= len(buffer):
            header = read_header(buffer, at, self._operations)
            if header is None or buffer.startswith(_ZEROS, at):
                at += 1
                continue
            stop = at + HEADER.size + header.length
            if stop > len(buffer):
                self._needed = stop - at
                break
            messages.append(bytes(buffer[at:stop]))
            at = stop
        del buffer[:at]
        return messages

    def reset(self) -> None:
        """Forget what is not whole."""
        self._buffer.clear()
        self._needed = HEADER.size

    def encode(self, message: bytes) -> bytes:
        """Return the message."""
        return message


FRAMINGS: dict[FramingName, type[ConsoleFraming] | type[RawFraming]] = {
    "console": ConsoleFraming,
    "raw": RawFraming,
}
