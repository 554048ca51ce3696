"""Connections of HTTP/2 (RFC 9113) as gRPC uses it: frames, headers and flow control.

What comes for a stream goes to its call, large bodies straight into the buffer of the message.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE = range(9)
CONTINUATION = 9
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11

HEADER_TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_HEADER_LIST = 1, 3, 4, 5, 6

MAX_WINDOW = (1 << 31) - 1
FIRST_WINDOW = 65535  # of a connection, and of streams before SETTINGS
STREAM_WINDOW = 4 << 20  # what a client may send of a stream before it is read
CONNECTION_WINDOW = 16 << 20
MAX_DATA_BYTES = 1 << 20  # of a frame
MAX_FRAME_BYTES = 1 << 14  # of any other frame, and of DATA before SETTINGS
MAX_HEADER_BYTES = 64 * 1024  # of a request
STAGE_BYTES = 64 * 1024
DIRECT_BYTES = 16 * 1024  # a larger rest of a frame is read into the message
JOINED_BYTES = 64 * 1024  # a smaller answer is one write
KNOWN_BLOCKS = 16  # of headers: clients send the same ones again and again
KNOWN_BLOCK_BYTES = 1024
IDLE_S = 60.0  # then a client is asked whether it lives
SEND_S = 120.0  # a client that reads its answers slower than this is cut off

Bytes = bytes | memoryview

_HEAD = struct.Struct(">BHBBI")  # size in 24 bits, kind, flags, stream


class Http2Error(Exception):
    """A fault that ends a connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Call(Protocol):
    """What a stream is for."""

    def room(self) -> memoryview:
        """Return where the next bytes of the body may be written; empty: give them to `feed`."""

    def wrote(self, size: int) -> None:
        """Take bytes that were written to `room`."""

    def feed(self, data: memoryview) -> None:
        """Take bytes of the body, which are not there later."""

    def end(self) -> None:
        """Take the end of the body."""

    def sent(self) -> None:
        """Go on: all that was to be sent of the answer is on its way."""

    def cancel(self) -> None:
        """Stop: the client has gone or wants no answer."""


class Calls(Protocol):
    """What a connection asks its server for."""

    loop: asyncio.AbstractEventLoop
    connections: "set[Connection]"
    max_connections: int
    max_streams: int

    def head_of(self, headers: Mapping[str, str]) -> Any:  # noqa: ANN401
        """Return what calls of these headers have in common."""

    def open(self, connection: "Connection", stream: "Stream", head: Any) -> Call:  # noqa: ANN401
        """Return the call of a stream; it may answer at once."""


class Stream:
    """A stream with its windows, and what waits to be sent on it."""

    __slots__ = (
        "call", "ended", "id", "receive_window", "send_window", "started", "trailers", "unsent",
    )  # fmt: skip

    def __init__(self, ident: int, send_window: int) -> None:
        self.id = ident
        self.call: Call | None = None
        self.ended = False  # by the client
        self.started = False  # headers were sent
        self.receive_window = STREAM_WINDOW
        self.send_window = send_window
        self.unsent: deque[memoryview] = deque()
        self.trailers: bytes | None = None


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the 9 bytes before a payload."""
    return (size << 48 | kind << 40 | flags << 32 | stream).to_bytes(9, "big")


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header that no table keeps (RFC 7541, 6.2.2)."""
    return b"".join((b"\0", _length(name), name, _length(value), value))


def _length(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size])
    parts, size = bytearray([127]), size - 127
    while size > 127:
        parts.append(size & 127 | 128)
        size >>= 7
    parts.append(size)
    return bytes(parts)


def _settings(max_streams: int) -> bytes:
    rows = (
        (MAX_STREAMS, max_streams), (INITIAL_WINDOW, STREAM_WINDOW), (MAX_FRAME, MAX_DATA_BYTES),
        (MAX_HEADER_LIST, MAX_HEADER_BYTES),
    )  # fmt: skip
    return b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in rows)


def _number(payload: Bytes) -> int:
    return int.from_bytes(payload, "big")


def _unpadded(flags: int, payload: bytes) -> bytes:
    """Return the block of a HEADERS frame. Raises Http2Error."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start = 1
        end -= payload[0] if payload else 0
    if flags & WITH_PRIORITY:
        start += 5
    if start > end:
        raise Http2Error(PROTOCOL_ERROR, "the padding of HEADERS is longer than the frame")
    return payload[start:end]


class Connection(asyncio.BufferedProtocol):
    """One connection, whose streams are calls."""

    def __init__(self, server: Calls) -> None:
        self._server = server
        self._transport: Any = None
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._filled = 0
        self._has_preface = self._has_settings = False
        self._closing = self._stalled = False
        self._heard_s = self._moved_s = 0.0
        self._asked_s: float | None = None  # when a client that is silent was sent PING
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._refuses_from = MAX_WINDOW  # the id of the first stream that is not taken any more
        # The DATA frame that is read: its stream, None if that has ended, and what is missing.
        self._data_stream: Stream | None = None
        self._data_left = self._padding_left = 0
        self._data_ends = self._in_data = self._is_direct = False
        self._header_stream = 0  # whose headers go on in CONTINUATION
        self._header_flags = 0
        self._header_block = bytearray()
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._known: dict[bytes, Any] = {}
        self._receive_window = CONNECTION_WINDOW
        self._send_window = FIRST_WINDOW
        self._stream_send_window = FIRST_WINDOW
        self._max_send = MAX_FRAME_BYTES
        self._blocked: dict[int, Stream] = {}

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or close it if `max_connections` are open."""
        self._transport = transport
        self._heard_s = self._moved_s = self._server.loop.time()
        if len(self._server.connections) >= self._server.max_connections:
            self._closing = True
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._write(
            frame(SETTINGS, 0, 0, _settings(self._server.max_streams))
            + frame(WINDOW_UPDATE, 0, 0, (CONNECTION_WINDOW - FIRST_WINDOW).to_bytes(4, "big"))
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all calls."""
        self._closing = True
        self._server.connections.discard(self)
        streams, self._streams = list(self._streams.values()), {}
        self._blocked.clear()
        for stream in streams:
            if stream.call is not None:
                stream.call.cancel()

    def pause_writing(self) -> None:
        """Read no more: the client takes no answers."""
        self._stalled = True
        self._moved_s = self._server.loop.time()
        if not self._closing:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        self._stalled = False
        if not self._closing:
            self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        self._is_direct = False
        if self._data_left >= DIRECT_BYTES and self._data_stream is not None:
            call = self._data_stream.call
            room = call.room() if call is not None else memoryview(b"")
            if len(room) >= DIRECT_BYTES:
                self._is_direct = True
                return room[: self._data_left]
        if self._closing:
            self._filled = 0
        return self._stage[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take `nbytes` that were received into the last buffer."""
        if self._closing:
            return
        self._heard_s, self._asked_s = self._server.loop.time(), None
        try:
            if self._is_direct:
                self._data_left -= nbytes
                if self._data_stream is not None and self._data_stream.call is not None:
                    self._data_stream.call.wrote(nbytes)
            else:
                self._filled += nbytes
            self._advance()
        except Http2Error as error:
            self._fail(error)

    def eof_received(self) -> bool:
        """Let the transport close."""
        return False

    # What comes in

    def _advance(self) -> None:
        """Take the frames that have come. Raises Http2Error."""
        end, at = self._filled, self._take_preface()
        while not self._closing and (used := self._take_next(self._stage[at:end])) is not None:
            at += used
        self._filled = end - at
        if at and self._filled:
            self._stage[: self._filled] = bytes(self._stage[at:end])

    def _take_preface(self) -> int:
        """Return how many bytes of the first ones are the preface. Raises Http2Error."""
        if self._has_preface:
            return 0
        size = min(self._filled, len(PREFACE))
        if self._stage[:size] != PREFACE[:size]:
            raise Http2Error(PROTOCOL_ERROR, "the connection does not begin as HTTP/2 does")
        self._has_preface = size == len(PREFACE)
        return size if self._has_preface else 0

    def _take_next(self, data: memoryview) -> int | None:
        """Take the next frame, or what has come of DATA; return how many bytes that is, None if
        more must come first. Raises Http2Error."""
        if self._in_data:
            used = self._take_data(data)
            return None if self._in_data and not used else used
        if len(data) < 9 or not self._has_preface:
            return None
        high, low, kind, flags, ident = _HEAD.unpack_from(data)
        size: int = high << 16 | low
        ident &= MAX_WINDOW
        if kind == DATA:
            padded = int(bool(flags & PADDED))
            if len(data) < 9 + padded:
                return None
            self._begin_data(size, flags, ident, data[9] if padded else None)
            return 9 + padded
        if size > MAX_FRAME_BYTES:
            raise Http2Error(
                FRAME_SIZE_ERROR, f"a frame has {size} bytes; at most {MAX_FRAME_BYTES}"
            )
        if len(data) < 9 + size:
            return None
        self._take_frame(kind, flags, ident, bytes(data[9 : 9 + size]))
        return 9 + size

    def _begin_data(self, size: int, flags: int, ident: int, padding: int | None) -> None:
        self._check_order(DATA, ident)
        if not ident or ident > self._last_id:
            raise Http2Error(PROTOCOL_ERROR, f"DATA came for stream {ident}, which is not open")
        payload = size if padding is None else size - 1 - padding
        if size > MAX_DATA_BYTES or payload < 0:
            raise Http2Error(FRAME_SIZE_ERROR, f"DATA of {size} bytes has {padding} of padding")
        self._receive_window -= size
        stream = self._streams.get(ident)
        if stream is not None:
            if stream.ended:
                raise Http2Error(STREAM_CLOSED, f"DATA came for stream {ident} after its end")
            stream.receive_window -= size
        if self._receive_window < 0 or (stream is not None and stream.receive_window < 0):
            raise Http2Error(FLOW_CONTROL_ERROR, f"DATA of stream {ident} exceed the window")
        if self._receive_window < CONNECTION_WINDOW // 2:
            self._grant(0, CONNECTION_WINDOW - self._receive_window)
            self._receive_window = CONNECTION_WINDOW
        self._data_stream, self._data_left = stream, payload
        self._padding_left = padding or 0
        self._data_ends, self._in_data = bool(flags & END_STREAM), True

    def _take_data(self, data: memoryview) -> int:
        """Take what has come of a DATA frame; return how many bytes that is."""
        stream, used = self._data_stream, min(len(data), self._data_left)
        if stream is not None and stream.id not in self._streams:  # answered or reset meanwhile
            stream = self._data_stream = None
        if used:
            self._data_left -= used
            if stream is not None and stream.call is not None:
                stream.call.feed(data[:used])
        if not self._data_left:
            padding = min(len(data) - used, self._padding_left)
            self._padding_left -= padding
            used += padding
            if not self._padding_left:
                self._in_data, self._data_stream = False, None
                if stream is not None and self._data_ends:
                    self._end(stream)
        return used

    def _end(self, stream: Stream) -> None:
        stream.ended = True
        if stream.call is not None and stream.id in self._streams:
            stream.call.end()

    def _check_order(self, kind: int, ident: int) -> None:
        """Raise Http2Error: a frame comes before SETTINGS, or between parts of headers."""
        if not self._has_settings and kind != SETTINGS:
            raise Http2Error(PROTOCOL_ERROR, f"a frame of kind {kind} comes before SETTINGS")
        if (kind == CONTINUATION) != bool(self._header_stream) or (
            kind == CONTINUATION and ident != self._header_stream
        ):
            raise Http2Error(PROTOCOL_ERROR, f"a frame of kind {kind} does not go on with headers")

    def _take_frame(self, kind: int, flags: int, ident: int, payload: bytes) -> None:
        """Take a frame that is not DATA. Raises Http2Error."""
        self._check_order(kind, ident)
        size = _SIZES.get(kind)
        if size is not None and len(payload) != size:
            raise Http2Error(FRAME_SIZE_ERROR, f"a frame of kind {kind} has {len(payload)} bytes")
        if kind in _OF_STREAM and (not ident or (kind == RST_STREAM and ident > self._last_id)):
            raise Http2Error(PROTOCOL_ERROR, f"a frame of kind {kind} came for stream {ident}")
        take = _FRAMES.get(kind)
        if take is not None:
            take(self, flags, ident, payload)

    def _take_headers(self, flags: int, ident: int, payload: bytes) -> None:
        if ident % 2 == 0:
            raise Http2Error(PROTOCOL_ERROR, f"stream {ident} is not a client's")
        self._header_stream, self._header_flags = ident, flags
        self._header_block = bytearray(_unpadded(flags, payload))
        if flags & END_HEADERS:
            self._end_headers()

    def _take_continuation(self, flags: int, ident: int, payload: bytes) -> None:
        self._header_block += payload
        if len(self._header_block) > MAX_HEADER_BYTES or not (payload or flags & END_HEADERS):
            raise Http2Error(
                ENHANCE_YOUR_CALM, f"the headers of stream {ident} exceed {MAX_HEADER_BYTES} bytes"
            )
        if flags & END_HEADERS:
            self._end_headers()

    def _end_headers(self) -> None:
        ident, block = self._header_stream, bytes(self._header_block)
        self._header_stream, self._header_block = 0, bytearray()
        head = self._head_of(block)
        stream = self._streams.get(ident)
        if stream is not None:  # these are trailers
            if stream.ended or not self._header_flags & END_STREAM:
                raise Http2Error(PROTOCOL_ERROR, f"stream {ident} has headers twice")
            self._end(stream)
        elif ident > self._last_id:
            self._last_id = ident
            if ident >= self._refuses_from or len(self._streams) >= self._server.max_streams:
                self._write(frame(RST_STREAM, 0, ident, REFUSED_STREAM.to_bytes(4, "big")))
                return
            stream = self._streams[ident] = Stream(ident, self._stream_send_window)
            stream.call = self._server.open(self, stream, head)
            if self._header_flags & END_STREAM:
                self._end(stream)

    def _head_of(self, block: bytes) -> Any:  # noqa: ANN401
        """Return what the server makes of headers. Raises Http2Error."""
        head = self._known.get(block)
        if head is not None:
            return head
        table = self._decoder.header_table
        before = table.maxsize, list(table.dynamic_entries)
        try:
            rows = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise Http2Error(COMPRESSION_ERROR, f"the headers are not HPACK's: {error}") from error
        headers = {
            bytes(name).decode("latin-1"): bytes(value).decode("latin-1")
            for name, value in reversed(list(rows))  # the first of a name counts
        }
        head = self._server.head_of(headers)
        if before != (table.maxsize, list(table.dynamic_entries)):
            self._known.clear()  # the same bytes mean something else now
        elif len(block) <= KNOWN_BLOCK_BYTES:
            if len(self._known) >= KNOWN_BLOCKS:
                self._known.clear()
            self._known[block] = head
        return head

    def _take_reset(self, _: int, ident: int, __: bytes) -> None:
        self._blocked.pop(ident, None)
        stream = self._streams.pop(ident, None)
        if stream is not None and stream.call is not None:
            stream.call.cancel()

    def _take_settings(self, flags: int, ident: int, payload: bytes) -> None:
        if ident or len(payload) % 6 or (flags & ACK and payload):
            raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS have no size that they may have")
        if flags & ACK:
            return
        self._has_settings = True
        for at in range(0, len(payload), 6):
            key, value = _number(payload[at : at + 2]), _number(payload[at + 2 : at + 6])
            if key == INITIAL_WINDOW:
                if value > MAX_WINDOW:
                    raise Http2Error(FLOW_CONTROL_ERROR, f"the initial window is {value}")
                for stream in self._streams.values():
                    stream.send_window += value - self._stream_send_window
                self._stream_send_window = value
            elif key == MAX_FRAME:
                if not MAX_FRAME_BYTES <= value < 1 << 24:
                    raise Http2Error(PROTOCOL_ERROR, f"the largest frame is {value}")
                self._max_send = value
        self._write(frame(SETTINGS, ACK, 0))
        self._flush_blocked()

    def _take_ping(self, flags: int, _: int, payload: bytes) -> None:
        if not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))

    def _take_window(self, _: int, ident: int, payload: bytes) -> None:
        size = _number(payload) & MAX_WINDOW
        if not size:
            raise Http2Error(PROTOCOL_ERROR, f"WINDOW_UPDATE of stream {ident} is 0")
        self._moved_s = self._server.loop.time()
        if not ident:
            self._send_window += size
            if self._send_window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, "the window of the connection is too large")
            self._flush_blocked()
        elif (stream := self._streams.get(ident)) is not None:
            stream.send_window += size
            if stream.send_window > MAX_WINDOW:
                raise Http2Error(FLOW_CONTROL_ERROR, f"the window of stream {ident} is too large")
            if stream.unsent:
                self._flush(stream)
        elif ident > self._last_id:
            raise Http2Error(PROTOCOL_ERROR, f"WINDOW_UPDATE came for stream {ident}")

    # What goes out

    def _write(self, data: bytes) -> None:
        self._transport.write(data)

    def _grant(self, ident: int, size: int) -> None:
        self._write(frame(WINDOW_UPDATE, 0, ident, size.to_bytes(4, "big")))

    def read_on(self, stream: Stream) -> None:
        """Let the client send more of a stream, now that what came was read."""
        if (
            stream.receive_window < STREAM_WINDOW // 2
            and not stream.ended
            and stream.id in self._streams
            and not self._closing
        ):
            self._grant(stream.id, STREAM_WINDOW - stream.receive_window)
            stream.receive_window = STREAM_WINDOW

    def send(
        self, stream: Stream, headers: bytes, parts: Sequence[Bytes], trailers: bytes | None
    ) -> None:
        """Send parts of a body, `headers` before the first, and end the stream with `trailers`.
        Without parts these are the headers, too."""
        if self._closing or stream.id not in self._streams:
            return
        size = sum(map(len, parts))
        out: list[Bytes] = []
        if not stream.started and (parts or trailers is None):
            out.append(frame(HEADERS, END_HEADERS, stream.id, headers))
            stream.started = True
        if (
            trailers is not None
            and size <= min(JOINED_BYTES, self._max_send, self._send_window, stream.send_window)
            and not stream.unsent
        ):
            if size:
                self._send_window -= size
                out += [frame_head(size, DATA, 0, stream.id), *parts]
            out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, trailers))
            self._write(b"".join(out))
            self._close_stream(stream)
            return
        stream.unsent.extend(memoryview(part) for part in parts if len(part))
        stream.trailers = trailers
        self._flush(stream, out)

    def _flush(self, stream: Stream, out: Sequence[Bytes] = ()) -> None:
        """Send frames, and what the windows let of a body."""
        out = list(out)
        while stream.unsent:
            part = stream.unsent[0]
            size = min(len(part), self._send_window, stream.send_window, self._max_send)
            if size <= 0:
                if not self._blocked:
                    self._moved_s = self._server.loop.time()
                self._blocked[stream.id] = stream
                break
            out += [frame_head(size, DATA, 0, stream.id), part[:size]]
            self._send_window -= size
            stream.send_window -= size
            if size == len(part):
                stream.unsent.popleft()
            else:
                stream.unsent[0] = part[size:]
        else:
            self._blocked.pop(stream.id, None)
            if stream.trailers is not None:
                flags = END_HEADERS | END_STREAM
                out.append(frame(HEADERS, flags, stream.id, stream.trailers))
        if out:
            self._transport.writelines(out)
        if not stream.unsent and stream.trailers is not None:
            self._close_stream(stream)
        elif not stream.unsent and stream.call is not None:
            stream.call.sent()

    def _flush_blocked(self) -> None:
        for stream in list(self._blocked.values()):
            if self._send_window <= 0:
                break
            self._flush(stream)

    def _close_stream(self, stream: Stream) -> None:
        del self._streams[stream.id]
        if not stream.ended:  # what the client still sends of it is not read
            self._write(frame(RST_STREAM, 0, stream.id, NO_ERROR.to_bytes(4, "big")))

    def _fail(self, error: Http2Error) -> None:
        """End the connection, and say why."""
        self._say_goodbye(error.code, str(error))
        self._closing = True
        self._transport.close()

    def _say_goodbye(self, code: int, reason: str = "") -> None:
        payload = self._last_id.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode()[:200]
        self._write(frame(GOAWAY, 0, 0, payload))

    def drain(self) -> bool:
        """Take no more calls; close if none is being answered. Return whether one is."""
        if self._refuses_from == MAX_WINDOW and not self._closing:
            self._refuses_from = self._last_id + 1
            self._say_goodbye(NO_ERROR)
        if not self._streams:
            self._closing = True
            self._transport.close()
        return bool(self._streams)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def check_alive(self, now_s: float) -> None:
        """Ask a client that is silent whether it lives, and cut off one that does not answer, or
        does not read."""
        stuck = (self._stalled or bool(self._blocked)) and now_s - self._moved_s > SEND_S
        if stuck or now_s - self._heard_s > 3 * IDLE_S or (
            now_s - self._heard_s > IDLE_S and (self._closing or not self._has_settings)
        ):  # fmt: skip
            self._transport.abort()
        elif now_s - self._heard_s > IDLE_S and self._asked_s is None and not self._closing:
            self._asked_s = now_s
            self._write(frame(PING, 0, 0, bytes(8)))


_SIZES: Mapping[int, int] = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_STREAM = frozenset({HEADERS, PRIORITY, RST_STREAM, CONTINUATION})


def _refuse_push(*_: object) -> None:
    raise Http2Error(PROTOCOL_ERROR, "a client pushes nothing")


# What takes each kind of frame; others are left out (RFC 9113, 4.1).
_FRAMES: Mapping[int, Any] = {
    HEADERS: Connection._take_headers, RST_STREAM: Connection._take_reset,
    SETTINGS: Connection._take_settings, PUSH_PROMISE: _refuse_push, PING: Connection._take_ping,
    WINDOW_UPDATE: Connection._take_window, CONTINUATION: Connection._take_continuation,
}  # fmt: skip
