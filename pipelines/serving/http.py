"""The HTTP port: each body is read into one buffer, and tensors are views of it."""

import asyncio
import types
import zlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from pipelines.host_header import answers
from pipelines.serving.http_messages import PHRASES, Answer, Chunks, Head, parse_head, refused
from pipelines.serving.http_routes import route
from pipelines.serving.mapped_memory import address_of
from pipelines.serving.protocol import Refusal, Status, refuse
from pipelines.serving.service import Service, refusal_of

HEAD_BYTES = 32 * 1024
KEPT_HEAD_BYTES = 2048  # of the last head, for as long as a connection is open
ALIGNMENT = 64  # of the first binary tensor: numpy and the engine read it in place
BYTES_ALIGNMENT = 16  # of what an object of bytes holds
IDLE_S = 60.0
LINGER_S = 2.0
MAX_LINGER_S = 30.0  # while a client still sends
SEND_S = 120.0  # a client that reads its answer slower than this is cut off
PIECE_BYTES = 1 << 20  # of a body that is unpacked
JOINED_BYTES = 64 * 1024  # smaller answers are one write


class Connection(asyncio.BufferedProtocol):
    """One connection: requests one after the other."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._head = bytearray(HEAD_BYTES)
        self._filled = 0
        self._last: tuple[bytes, Head] | None = None  # clients send the same head again and again
        self._request: Head | None = None
        self._body = memoryview(b"")
        self._got = 0
        self._chunks: Chunks | None = None
        self._held = 0
        self._task: asyncio.Task[None] | None = None
        self._transport: Any = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._heard_s = 0.0
        self._closing = False
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or answer 429 if `max_connections` are open."""
        self._transport = transport
        self._heard_s = self._server.loop.time()
        count = len(self._server.connections)
        if count >= self._server.max_connections:
            self._send(refused(Refusal(
                Status.BUSY,
                f"{count} connections are open; this server takes"
                f" {self._server.max_connections}: try again later",
            )), keeps_open=False)  # fmt: skip
            return
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the request and cancel its answer."""
        self._server.connections.discard(self)
        self._closing = True
        self._drained.set()
        if self._end_timer is not None:
            self._end_timer.cancel()  # it holds this connection and its buffer
        if self._task is not None:
            # A client that leaves is noticed when it is written to. By the next turn the task runs,
            # so that it hands the end on to what it waits for.
            self._server.loop.call_soon(self._task.cancel)
        self._forget_body()

    def pause_writing(self) -> None:
        """Let answers wait: the client reads slower than they are written."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Let answers go on."""
        self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: into a body of known length, else into the head."""
        if self._closing:
            return memoryview(self._head)
        if self._takes_body():
            return self._body[self._got :]
        if self._filled == len(self._head):  # TLS of Python 3.10 gives what it has read, at most
            self._head = self._head + bytes(HEAD_BYTES)  # 256 KiB, though reading is paused
        return memoryview(self._head)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take `nbytes` that were received into the last buffer."""
        self._heard_s = self._server.loop.time()
        if self._closing:
            return
        if self._takes_body():
            self._got += nbytes
        else:
            self._filled += nbytes
        self._advance()

    def _takes_body(self) -> bool:
        """Whether what comes is of a body of known length, not of a later request."""
        return self._request is not None and self._chunks is None and self._task is None

    def eof_received(self) -> bool:
        """Let the transport close: a client that sends no more gets no answer."""
        return False

    def close_if_idle(self, now_s: float) -> None:
        """Close it if nothing was heard for long and no answer is due."""
        if self._task is None and now_s - self._heard_s > IDLE_S:
            closing = self._transport.is_closing()  # its client does not read
            (self._transport.abort if closing else self._transport.close)()

    def _advance(self) -> None:
        """Go on with what has come."""
        if self._closing:
            return
        try:
            if self._task is None and self._request is None and not self._read_head():
                return
            if self._task is None and self._request is not None and self._has_body():
                self._answer(self._request)
        except Refusal as refusal:
            self._forget_body()
            self._send(refused(refusal), keeps_open=False)

    def _hold(self, received: int, total: int, what: str = "request size") -> None:
        """Count what has come of a body. Raises Refusal."""
        self._server.service.hold(received - self._held, total, what)
        self._held = received

    def _read_head(self) -> bool:
        end = self._head.find(b"\r\n\r\n", 0, min(self._filled, HEAD_BYTES))
        if end < 0:
            if self._filled >= HEAD_BYTES:
                refuse(
                    f"the head of the request has more than {HEAD_BYTES} bytes",
                    Status.HEADER_TOO_LARGE,
                )
            return False
        blob = bytes(self._head[:end])
        begin, filled = end + 4, self._filled
        self._filled = 0
        if self._last is None or self._last[0] != blob:
            head = parse_head(blob)
            self._server.check(head)
            self._last = (blob, head) if end <= KEPT_HEAD_BYTES else None
        else:
            head = self._last[1]
        if filled - begin == head.size and not head.chunked:  # all of it, as of small requests
            self._hold(head.size, head.size, _what(head))
            padding = -(head.header_length or 0) % BYTES_ALIGNMENT
            with memoryview(self._head) as view:
                self._body = memoryview(bytes(view[begin - padding : filled]))[padding:]
            self._got = head.size
        else:
            self._begin_body(head, bytes(self._head[begin:filled]))
        self._request = head
        if head.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _begin_body(self, head: Head, rest: bytes) -> None:
        """Take `rest`, the begin of a body or more than it, and make room for what comes."""
        if head.chunked:
            self._chunks = Chunks(self._server.service.max_request_bytes)
            self._head[: len(rest)] = rest
            self._filled = len(rest)
            return
        size = head.size or 0
        self._got = min(size, len(rest))
        self._hold(self._got, size, _what(head))
        buffer = np.empty(size + ALIGNMENT, np.uint8)
        start = -(address_of(buffer.data) + (head.header_length or 0)) % ALIGNMENT
        self._body = buffer.data[start : start + size]
        self._body[: self._got] = rest[: self._got]
        self._filled = len(rest) - self._got
        self._head[: self._filled] = rest[self._got :]

    def _has_body(self) -> bool:
        if self._chunks is None:
            self._hold(self._got, len(self._body))
            return self._got == len(self._body)
        used = self._chunks.feed(memoryview(self._head)[: self._filled])
        self._head[: self._filled - used] = self._head[used : self._filled]
        self._filled -= used
        self._hold(len(self._chunks.body), len(self._chunks.body))
        if not self._chunks.done:
            return False
        self._body = memoryview(self._chunks.body)
        return True

    def _answer(self, head: Head) -> None:
        """Answer at once where nothing has to be waited for, else in a task."""
        answering = self._server.answer(head, self._body)
        rest: Awaitable[Answer] | None = answering
        if not self._server.service.has_spans:  # a span is to begin and end in the same context
            try:
                rest = _resumed(answering, answering.send(None))
            except StopIteration as end:
                rest = None
                self._send(end.value, keeps_open=head.keeps_open)
                if self._drained.is_set():
                    self._end_request(head)
                    return
        if not self._closing:
            self._transport.pause_reading()
        self._task = self._server.loop.create_task(self._finish(head, rest))

    async def _finish(self, head: Head, rest: Awaitable[Answer] | None) -> None:
        try:
            if rest is not None:
                self._send(await rest, keeps_open=head.keeps_open)
            if not self._drained.is_set():
                await asyncio.wait_for(self._drained.wait(), SEND_S)
        except asyncio.TimeoutError:
            self._transport.abort()
        finally:
            self._task = None
            self._end_request(head)

    def _end_request(self, head: Head) -> None:
        """Go on to the next request."""
        self._forget_body()
        if not head.keeps_open or self._closing:
            return
        if len(self._head) > HEAD_BYTES >= self._filled:
            self._head = self._head[:HEAD_BYTES]
        if self._filled:
            self._transport.pause_reading()  # TLS of Python 3.10 may read on before _read_on
            self._server.loop.call_soon(self._read_on)
        else:
            self._transport.resume_reading()

    def _read_on(self) -> None:
        if not self._closing and self._task is None:
            self._transport.resume_reading()
            self._advance()

    def _forget_body(self) -> None:
        self._server.service.release(self._held)
        self._held = 0
        self._body, self._got = memoryview(b""), 0
        self._request = self._chunks = None

    def _send(self, answer: Answer, *, keeps_open: bool = True) -> None:
        if self._closing:
            return
        size = sum(len(part) for part in answer.parts)
        head = _answer_head(answer.status, answer.headers, size, keeps_open)
        if size <= JOINED_BYTES:
            self._transport.write(b"".join((head, *answer.parts)))
        else:
            self._transport.write(head)
            for part in answer.parts:
                self._transport.write(part)
        if not keeps_open:
            self._closing = True
            self._end()

    def _end(self) -> None:
        """Close once the client has: what it still sends, as the body of a request that was
        refused, is read and dropped, else it would lose the answer."""
        if not self._transport.can_write_eof():  # TLS
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        loop = self._server.loop
        # One over the limit is not counted, so that it may not stay while others come.
        longest_s = MAX_LINGER_S if self in self._server.connections else LINGER_S
        self._end_timer = loop.call_later(LINGER_S, self._linger, loop.time() + longest_s)

    def _linger(self, end_s: float) -> None:
        now_s = self._server.loop.time()
        if now_s < end_s and now_s - self._heard_s < LINGER_S:
            self._end_timer = self._server.loop.call_later(LINGER_S, self._linger, end_s)
        else:
            self._transport.close()


def _what(head: Head) -> str:
    return "request JSON size" if head.header_length is None else "request size"


@lru_cache(128)
def _answer_head(
    status: int,
    headers: tuple[tuple[str, str], ...],
    size: int,
    keeps_open: bool,
) -> bytes:
    """Return the head of an answer with a body of `size` bytes."""
    text = f"HTTP/1.1 {status} {PHRASES[status]}\r\n"
    for name, value in headers:
        text += f"{name}: {value}\r\n"
    closes = "" if keeps_open else "Connection: close\r\n"
    return f"{text}Content-Length: {size}\r\n{closes}\r\n".encode("latin-1")


@types.coroutine
def _resumed(
    coroutine: Coroutine[Any, None, Answer],
    future: Any,  # noqa: ANN401
) -> Generator[Any, None, Answer]:
    """Go on with a coroutine that ran to its first wait, which is for `future`."""
    while True:
        try:
            try:
                yield future
            except BaseException as error:  # noqa: BLE001  (of the future, or to cancel)
                future = coroutine.throw(error)
            else:
                future = coroutine.send(None)
        except StopIteration as end:
            answer: Answer = end.value
            return answer


class HttpServer:
    """Answers requests; `connections` are those that are open."""

    def __init__(self, service: Service, host: str, max_connections: int) -> None:
        self.service = service
        self.max_connections = max_connections
        self.connections: set[Connection] = set()
        self.loop = asyncio.get_running_loop()
        self._host = host
        self._idle = self.loop.call_later(IDLE_S / 4, self._close_idle)

    def close(self) -> None:
        """Close all connections."""
        self._idle.cancel()
        for connection in list(self.connections):
            connection._transport.close()

    def _close_idle(self) -> None:
        for connection in list(self.connections):
            connection.close_if_idle(self.loop.time())
        self._idle = self.loop.call_later(IDLE_S / 4, self._close_idle)

    async def answer(self, head: Head, body: memoryview) -> Answer:
        """Return the answer to a request that was checked."""
        try:
            handler, names = route(head.method, head.path)
            if not head.headers.get("content-encoding"):
                return await handler(self.service, head, body, **names)
            async with self._plain(head, body) as plain:
                return await handler(self.service, head, plain, **names)
        except Exception as error:  # noqa: BLE001  (the client is to hear of it)
            return refused(refusal_of(error, f"{head.method} {head.path}"))

    def check(self, head: Head) -> None:
        """Raise Refusal: the request is not for this server, or has no token."""
        if not answers(self._host, head.headers.get("host", "")):
            refuse(
                f"the request is for {head.headers.get('host', '')!r}; this server is for this"
                " machine alone",
                Status.MISDIRECTED,
            )
        if head.chunked or head.size or not head.path.startswith("/v2/health/"):
            self.service.authorize(head.headers.get("authorization", ""))

    @asynccontextmanager
    async def _plain(self, head: Head, body: memoryview) -> AsyncIterator[memoryview]:
        """Unpack a body; its size is held inside the block. Raises Refusal."""
        encoding = head.headers["content-encoding"].lower()
        if encoding == "identity":
            yield body
            return
        if encoding not in {"gzip", "deflate"}:
            refuse(f"the content-encoding is {encoding[:40]!r}; this server takes gzip and deflate")
        limit = self.service.max_request_bytes
        data, counted = bytearray(), 0
        try:
            async for piece in _unpacked(encoding, body):
                if len(data) + len(piece) > limit:
                    refuse(
                        f"the request has more than {limit} bytes when it is unpacked, which this"
                        " server takes",
                        Status.TOO_LARGE,
                    )
                self.service.hold(len(piece), len(data) + len(piece))
                counted += len(piece)
                data += piece
            yield memoryview(data)
        finally:
            self.service.release(counted)


async def _unpacked(encoding: str, body: memoryview) -> AsyncIterator[bytes]:
    """Unpack in another thread, piece by piece. Raises Refusal."""
    unpack = zlib.decompressobj(47)
    for start in range(0, len(body), PIECE_BYTES):
        packed: bytes | memoryview = body[start : start + PIECE_BYTES]
        full = True
        while packed or full:
            try:
                piece = await asyncio.to_thread(unpack.decompress, packed, PIECE_BYTES)
            except zlib.error as error:
                refuse(f"the body is no {encoding}: {error}")
            yield piece
            packed, full = unpack.unconsumed_tail, len(piece) == PIECE_BYTES
    if not unpack.eof:
        refuse(f"the body ends before its {encoding} does")
