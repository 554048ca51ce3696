"""Asks a board by SMP: single requests, and bytes in a stream with several requests in flight."""

import time
from collections.abc import Callable, Mapping, Set
from typing import Protocol

from device.smp.cbor import Scalar, Value, decode_map
from device.smp.message import (
    ANSWERS,
    HEADER,
    MAX_MESSAGE,
    READ,
    WRITE,
    Code,
    read_header,
    request,
)
from toolkit.fleet.transports.smp_links import Line
from toolkit.fleet.transports.transport import RefusedError, TransportError

OS, IMAGE, FILES, TANDEM = 0, 1, 8, 65
ANSWER_S = 3.0  # beside the time that the bytes take on the line
TRIES = 5
MIN_IN_FLIGHT = 4  # messages are made so small that so many fit into the board's buffers
_PLAIN_BYTES = 96  # of a message beside its data
# Codes that a garbled request may get; the same one is asked again.
_GARBLED = (Code.INVALID, Code.NOT_SUPPORTED)
# What a board says of a stream that it knows nothing of: its agent was started again, or has the
# whole, and the answer to the last bytes was lost.
_FORGOTTEN = Code.BAD_STATE


class SmpRefusedError(RefusedError):
    """The board answers a request with an error."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason or f"the board refuses the request with the code {code} of SMP")
        self.code = code


class Stream(Protocol):
    """Bytes to send, by their offset."""

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on, none at the end."""

    def acknowledged(self, offset: int) -> None:
        """The board has all before this offset."""

    def rejected(self, offset: int) -> None:
        """What begins at this offset was damaged. Raises TransportError: too often."""


class SmpClient:
    """One client of one board; `connect` before all else."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._sequence = 0
        self._buffer_bytes, self._buffers = 512, 1

    def connect(self, *, tries: int | None = None) -> None:
        """Open the line and ask, as `ask` does, for the size of the board's buffers."""
        self._line.open()
        self._buffer_bytes, self._buffers = 512, 1
        try:
            parameters = self.ask(READ, OS, 6, {}, tries=tries)
        except TransportError as error:
            raise TransportError(
                f"nobody answers SMP on {self._line.name}: compare device, framing and baud with "
                "[smp] of the board's agent.toml; a login shell there needs ?console=zmodem"
            ) from error
        buffer_bytes, buffers = parameters.get("buf_size"), parameters.get("buf_count")
        if isinstance(buffer_bytes, int) and isinstance(buffers, int):
            self._buffer_bytes = max(256, min(MAX_MESSAGE, buffer_bytes))
            self._buffers = max(1, min(64, buffers))

    def close(self) -> None:
        """Close the line."""
        self._line.close()

    def ask(
        self,
        operation: int,
        group: int,
        command: int,
        content: Mapping[str, Value],
        *,
        patience_s: float = 0.0,
        tries: int | None = None,
    ) -> dict[str, Scalar]:
        """Ask until an answer comes; return it. Raises TransportError or SmpRefusedError.

        `patience_s`: how long the board may think; `tries`: TRIES by default.
        """
        patient_until_s, garbled = time.monotonic() + patience_s, 0
        tried, sequences = 0, set[int]()
        while tried < (tries or TRIES) or time.monotonic() < patient_until_s:
            tried += 1
            sequences.add(self._send(operation, group, command, content))
            wait_s = ANSWER_S + self._line_s(2 * self._buffer_bytes)
            answer = self._await(sequences, time.monotonic() + wait_s)
            if answer is None:
                continue
            try:
                return _checked(answer)
            except SmpRefusedError as error:
                garbled += 1
                if error.code not in _GARBLED or garbled == TRIES:
                    raise
        raise TransportError(f"{self._line.name} does not answer any more")

    def upload(self, image: int, data: bytes, digest: bytes) -> None:
        """Upload a small file as an image; what the board has of it is not sent again."""
        first: dict[str, Value] = {"image": image, "len": len(data), "sha": digest, "off": 0}
        size = self._message_bytes - 64
        answer = self.ask(WRITE, IMAGE, 1, {**first, "data": data[:size]})
        offset = _offset_of(answer)
        if offset < len(data):
            answer = self.stream(IMAGE, 1, _Bytes(data), offset)
        if answer.get("match") is False:
            raise TransportError(f"what {self._line.name} received is damaged: flash again")

    def download(self, name: str) -> bytes:
        """Return a file of the board."""
        parts: list[bytes] = []
        offset, total = 0, 1
        while offset < total:
            answer = self.ask(READ, FILES, 0, {"off": offset, "name": name})
            data, length = answer.get("data"), answer.get("len")
            total = length if offset == 0 and isinstance(length, int) else total
            if not isinstance(data, bytes) or not data:
                raise TransportError(f"the board gives nothing of {name} behind {offset} bytes")
            parts.append(data)
            offset += len(data)
        return b"".join(parts)

    def stream(
        self,
        group: int,
        command: int,
        source: Stream,
        start: int,
        on_sent: Callable[[int], None] = lambda _size: None,
    ) -> dict[str, Scalar]:
        """Send a stream from an offset on; return the answer to its last bytes.

        Several requests are on their way at once. The board takes bytes in order alone and answers
        with the offset that it waits for, so what a bad line has lost is sent again from there.
        Raises SmpRefusedError; TransportError: the line is gone, or the board knows nothing of it.
        """
        window, silent = _SendWindow(start), 0
        while True:
            while len(window.waiting) < self._buffers_in_use:
                data = source.read(window.next, self._message_bytes)
                if not data:
                    break
                sequence = self._send(WRITE, group, command, {"off": window.next, "data": data})
                window.sent(sequence, len(data))
                on_sent(len(data))
            if not window.waiting:
                raise TransportError(
                    f"{self._line.name} waits for bytes that there are not: flash again"
                )
            messages = self._line.read(ANSWER_S + self._line_s(window.bytes))
            silent = 0 if messages else silent + 1
            if silent == TRIES:
                raise TransportError(f"{self._line.name} does not answer any more")
            if not messages:
                window.rewind(window.acknowledged)
            for message in messages:
                answer = self._answer_in(message, window)
                if answer is not None and answer.get("match") is not None:
                    return answer
                if answer is not None:
                    window.take(_offset_of(answer), source, rejected=bool(answer.get("bad")))

    @property
    def _message_bytes(self) -> int:
        """The data of one message of a stream."""
        budget = self._buffer_bytes * self._buffers // MIN_IN_FLIGHT
        return max(128, min(self._buffer_bytes, budget) - _PLAIN_BYTES)

    @property
    def _buffers_in_use(self) -> int:
        budget = self._buffer_bytes * self._buffers
        return max(1, budget // (self._message_bytes + _PLAIN_BYTES))

    def _line_s(self, size: int) -> float:
        """How long bytes take on a UART, in base64. USB has no rate, whatever is set: there the
        board takes whole messages."""
        rate = None if self._buffer_bytes >= MAX_MESSAGE else self._line.bytes_per_s
        return 0.0 if rate is None else 1.5 * size / rate

    def _send(self, operation: int, group: int, command: int, content: Mapping[str, Value]) -> int:
        self._sequence = (self._sequence + 1) % 256
        self._line.write(request(operation, group, command, self._sequence, content))
        return self._sequence

    def _await(self, sequences: Set[int], until_s: float) -> dict[str, Scalar] | None:
        while (remaining_s := until_s - time.monotonic()) > 0:
            for message in self._line.read(remaining_s):
                answered = _opened(message)
                if answered is not None and answered[0] in sequences:
                    return answered[1]
        return None

    def _answer_in(self, message: bytes, window: "_SendWindow") -> dict[str, Scalar] | None:
        """Return an answer to what is on its way; None: it is late, or an error of a bad line."""
        answered = _opened(message)
        if answered is None or not window.landed(answered[0]):
            return None
        try:
            return _checked(answered[1])
        except SmpRefusedError as error:
            if error.code == _FORGOTTEN:
                raise TransportError(str(error)) from error
            if error.code not in _GARBLED or window.garbled():
                raise
            return {"off": window.acknowledged}


class _SendWindow:
    """What of a stream is on its way: by sequence number, where each message ends."""

    def __init__(self, start: int) -> None:
        self.next = self.acknowledged = start
        self.waiting: dict[int, tuple[int, int]] = {}  # sequence -> offset behind it, and its size
        self._behind = start
        self._errors = 0

    @property
    def bytes(self) -> int:
        """The bytes that are on their way."""
        return sum(size for _, size in self.waiting.values())

    def sent(self, sequence: int, size: int) -> None:
        """Note a message."""
        self.next += size
        self.waiting[sequence] = self.next, size

    def landed(self, sequence: int) -> bool:
        """Take a message out; False: it is not waited for any more."""
        row = self.waiting.pop(sequence, None)
        if row is not None:
            self._behind = row[0]
        return row is not None

    def take(self, offset: int, source: Stream, *, rejected: bool) -> None:
        """Take the offset that the board waits for, from the answer that landed last."""
        if rejected:
            source.rejected(offset)
        if rejected or offset != self._behind:  # something before it was lost
            self.rewind(offset)
        self.acknowledged = offset
        source.acknowledged(offset)

    def rewind(self, offset: int) -> None:
        """Send from here on again; answers to what is on its way count no more."""
        self.waiting.clear()
        self.next = offset

    def garbled(self) -> bool:
        """Count an error that a bad line explains; whether there were too many."""
        self._errors += 1
        return self._errors > 50


class _Bytes:
    """A stream of bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def acknowledged(self, offset: int) -> None:
        """Nothing is kept for it."""

    def rejected(self, offset: int) -> None:
        raise TransportError(f"the board rejects the bytes at {offset}: flash again")


def _opened(message: bytes) -> tuple[int, dict[str, Scalar]] | None:
    """Return the sequence number and the content of an answer, None if it is none."""
    if len(message) < HEADER.size:
        return None
    header = read_header(message, 0, ANSWERS)
    if header is None or header.length != len(message) - HEADER.size:
        return None
    try:
        return header.sequence, decode_map(message[HEADER.size :])
    except ValueError:
        return None


def _checked(answer: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return an answer; SmpRefusedError if it is an error."""
    code, reason = answer.get("rc"), answer.get("rsn")
    if isinstance(code, int) and code:
        raise SmpRefusedError(code, reason if isinstance(reason, str) else "")
    return answer


def _offset_of(answer: dict[str, Scalar]) -> int:
    offset = answer.get("off")
    if not isinstance(offset, int) or offset < 0:
        raise TransportError("the board's answer has no offset: its agent must be of this version")
    return offset
