"""Calls of gRPC (its protocol over HTTP/2): messages, deadlines and statuses."""

import asyncio
import re
import ssl
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from pipelines.serving.coroutines import resumed
from pipelines.serving.grpc import OPEN_METHODS, infer, streamed, unary
from pipelines.serving.http2 import IDLE_S, Bytes, Connection, Stream, literal
from pipelines.serving.messages import METHODS, SERVICE
from pipelines.serving.protocol import Refusal, Status, refuse, trace_of
from pipelines.serving.service import Service, refusal_of
from pipelines.serving.unpacking import unpacked

ALIGNMENT = 64  # of the end of a message, where its last raw tensor ends
COPIED_BYTES = 16 * 1024  # a smaller message that is there at once is copied to bytes
MAX_STREAMED = 64  # requests of one stream that are being answered
CHUNK_BYTES = 256  # what each piece of a stream that waits takes beside its data
STOP_POLL_S = 0.01
TEXT_LENGTH = 2000  # clients take headers of 8 KB

CODES: Mapping[str, int] = {
    "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5, "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "UNIMPLEMENTED": 12, "INTERNAL": 13,
    "UNAVAILABLE": 14, "UNAUTHENTICATED": 16,
}  # fmt: skip
TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
UNITS_S: Mapping[str, float] = {"H": 3600, "M": 60, "S": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}
ENCODINGS = frozenset({"identity", "gzip", "deflate"})

PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
HEADERS = (
    literal(b":status", b"200")
    + literal(b"content-type", b"application/grpc")
    + literal(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
NO_GRPC = literal(b":status", b"415")
OK = literal(b"grpc-status", b"0")


@dataclass(frozen=True, slots=True)
class CallHead:
    """What the headers of a call say. `method` is empty where the service has none such;
    `is_grpc`: whether it is a call at all."""

    is_grpc: bool
    method: str
    path: str
    encoding: str
    timeout_s: float | None
    authorization: str
    trace: str
    trailers: bytes  # of a call that succeeds


def parse_headers(headers: Mapping[str, str]) -> CallHead:
    """Return the head of a call."""
    path, trace = headers.get(":path", ""), trace_of(headers.get("traceparent", ""))
    service, _, method = path.removeprefix("/").rpartition("/")
    is_known = service == SERVICE and method in {*METHODS, "ModelInfer", "ModelStreamInfer"}
    timeout = TIMEOUT.fullmatch(headers.get("grpc-timeout", ""))
    kind = headers.get("content-type", "")
    return CallHead(
        headers.get(":method") == "POST" and kind.startswith("application/grpc"),
        method if is_known else "", path,
        headers.get("grpc-encoding", "identity").lower(),
        int(timeout[1]) * UNITS_S[timeout[2]] if timeout else None,
        headers.get("authorization", ""), trace,
        OK + literal(b"traceparent", trace.encode()) if trace else OK,
    )  # fmt: skip


class _Call:
    """A call whose messages come in."""

    def __init__(
        self, server: "GrpcServer", connection: Connection, stream: Stream, head: CallHead
    ) -> None:
        self._server, self._service = server, server.service
        self._connection, self._stream, self._head = connection, stream, head
        self._prefix = b""  # what has come of the 5 bytes before a message
        self._message: memoryview | None = None
        self._got = self._held = 0
        self._done = False  # answered, or no answer is wanted
        self._timer: asyncio.TimerHandle | None = None

    def room(self) -> memoryview:
        """Return where the rest of the message goes."""
        if self._message is None or not self._reads_on():
            return memoryview(b"")
        return self._message[self._got :]

    def wrote(self, size: int) -> None:
        """Take what was written to `room`."""
        if self._message is None:  # it was refused meanwhile
            return
        try:
            self._take_part(size)
        except Refusal as refusal:
            self._fail(refusal)
        self._connection.read_on(self._stream)

    def feed(self, data: memoryview) -> None:
        """Take bytes of messages."""
        try:
            while data and not self._done:
                data = data[self._take(data) :]
        except Refusal as refusal:
            self._fail(refusal)
        self._connection.read_on(self._stream)

    def sent(self) -> None:
        """Go on: the client has taken what was sent."""

    def check(self) -> None:
        """Answer at once where the headers are refused."""
        head = self._head
        if not head.is_grpc:
            self._connection.send(self._stream, HEADERS, (), NO_GRPC)
            self.cancel()
        elif not head.method:
            self._refuse(f"{head.path[:200]!r} is no method of {SERVICE}")
        elif head.encoding not in ENCODINGS:
            self._refuse(f"{head.encoding[:40]!r} is no encoding that this server takes")
        elif head.method not in OPEN_METHODS:
            try:
                self._service.authorize(head.authorization)
            except Refusal as refusal:
                self._fail(refusal)

    def _refuse(self, sentence: str) -> None:
        self._fail(Refusal(Status.UNIMPLEMENTED, sentence))

    def cancel(self) -> None:
        """Stop all work for the call."""
        self._done = True
        self._message = None
        self._release()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks():
            # By the next turn the task runs, so that it hands the end on to what it waits for.
            self._server.loop.call_soon(task.cancel)

    @abstractmethod
    def end(self) -> None:
        """Take the end of the messages."""

    @abstractmethod
    def _take_message(self, data: Bytes, held: int, *, packed: bool) -> None:
        """Take a message, of which `held` bytes are counted. Raises Refusal."""

    @abstractmethod
    def _tasks(self) -> Sequence["asyncio.Task[Any]"]:
        """Return the tasks that work for the call."""

    def _reads_on(self) -> bool:
        """Whether the next message is to be read now."""
        return not self._done

    def _take(self, data: memoryview) -> int:
        """Take up to the end of a message; return how many bytes. Raises Refusal."""
        used = 0
        if self._message is None:
            used = min(5 - len(self._prefix), len(data))
            self._prefix += bytes(data[:used])
            if len(self._prefix) < 5:
                return used
            size = int.from_bytes(self._prefix[1:], "big")
            if size <= min(COPIED_BYTES, len(data) - used):
                self._service.hold(size)
                packed, self._prefix = self._prefix[0] == 1, b""
                self._take_message(bytes(data[used : used + size]), size, packed=packed)
                return used + size
            self._service.hold(0, size)
            buffer = np.empty(size + ALIGNMENT, np.uint8)
            address: int = buffer.__array_interface__["data"][0]
            start = -(address + size) % ALIGNMENT
            self._message, self._got = buffer.data[start : start + size], 0
        size = min(len(self._message) - self._got, len(data) - used)
        self._message[self._got : self._got + size] = data[used : used + size]
        self._take_part(size)
        return used + size

    def _take_part(self, size: int) -> None:
        """Count what has come of a message. Raises Refusal."""
        assert self._message is not None
        self._service.hold(size, len(self._message))
        self._held += size
        self._got += size
        if self._got == len(self._message):
            data, held, packed = self._message, self._held, self._prefix[0] == 1
            self._message, self._held, self._prefix = None, 0, b""
            self._take_message(data, held, packed=packed)

    def _release(self) -> None:
        self._service.release(self._held)
        self._held = 0

    def _begin(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any] | None":
        """Run a coroutine, which raises nothing, to its end or its first wait; return the task that
        goes on."""
        rest: Coroutine[Any, Any, Any] | Any = work
        if not self._service.has_spans:  # a span is to begin and end in the same context
            try:
                rest = resumed(work, work.send(None))
            except StopIteration:
                return None
        return self._server.loop.create_task(rest)

    def _limit_time(self, since_s: float) -> None:
        """Begin to count the time that the client gives."""
        if self._head.timeout_s is not None:
            rest_s = self._head.timeout_s - (time.monotonic() - since_s)
            self._timer = self._server.loop.call_later(max(0.0, rest_s), self._expire)

    def _expire(self) -> None:
        self._end_with("DEADLINE_EXCEEDED", f"no answer within {self._head.timeout_s:g} s")
        self.cancel()

    def _fail(self, error: Exception) -> None:
        """Answer with a refusal."""
        refusal = refusal_of(error, self._head.method)
        self._end_with(refusal.status.value[1], str(refusal))
        self.cancel()

    def _end_with(self, code: str, text: str) -> None:
        """Send a status that is not OK."""
        trailers = literal(b"grpc-status", str(CODES[code]).encode()) + literal(
            b"grpc-message", quote(text[:TEXT_LENGTH], PRINTABLE).encode()
        )
        self._finish(trailers)

    def _finish(self, trailers: bytes) -> None:
        headers = b"" if self._stream.started else HEADERS
        self._connection.send(self._stream, HEADERS, (), headers + trailers)


def framed(parts: Sequence[Bytes]) -> list[Bytes]:
    """Return a message with the 5 bytes before it."""
    return [b"\0" + sum(map(len, parts)).to_bytes(4, "big"), *parts]


class UnaryCall(_Call):
    """A call of one message and one answer."""

    def __init__(
        self, server: "GrpcServer", connection: Connection, stream: Stream, head: CallHead
    ) -> None:
        super().__init__(server, connection, stream, head)
        self._request: Bytes | None = None
        self._packed = False
        self._task: asyncio.Task[None] | None = None
        self._since_s = time.monotonic() if head.timeout_s is not None else 0.0

    def end(self) -> None:
        """Answer: the message is there."""
        if self._done:
            return
        if self._request is None or self._prefix or self._message is not None:
            self._fail(Refusal(Status.INVALID, f"{self._head.method} was sent no whole message"))
            return
        self._task = self._begin(self._answer(self._request))
        self._request = None
        if self._task is not None:
            self._limit_time(self._since_s)

    def _take_message(self, data: Bytes, held: int, *, packed: bool) -> None:
        self._held += held
        if self._request is not None:
            refuse(f"{self._head.method} takes one message, and two were sent")
        self._request, self._packed = data, packed

    def _tasks(self) -> Sequence["asyncio.Task[None]"]:
        return () if self._task is None else (self._task,)

    async def _answer(self, data: Bytes) -> None:
        try:
            if self._packed:
                async with unpacked(self._service, self._head.encoding, data) as plain:
                    parts = await self._result(plain)
            else:
                parts = await self._result(data)
        except Exception as error:  # noqa: BLE001  (the client is to hear of it)
            self._task = None
            if not self._done:
                self._fail(error)
            return
        self._task = None
        if not self._done:
            self._done = True
            self._release()
            if self._timer is not None:
                self._timer.cancel()
            self._connection.send(self._stream, HEADERS, framed(parts), self._head.trailers)

    async def _result(self, data: Bytes) -> Sequence[Bytes]:
        if self._head.method == "ModelInfer":
            return await infer(self._service, data, self._head.trace)
        return (await unary(self._service, self._head.method, bytes(data)),)


class StreamCall(_Call):
    """A call of ModelStreamInfer: answers come in the order of its requests."""

    def __init__(
        self, server: "GrpcServer", connection: Connection, stream: Stream, head: CallHead
    ) -> None:
        super().__init__(server, connection, stream, head)
        self._answers: deque[_StreamAnswer] = deque()
        self._waiting: deque[tuple[memoryview, int]] = deque()  # what is not read yet, and its cost
        self._running: set[asyncio.Task[None]] = set()
        self._has_ended = self._is_reading = False
        self._limit_time(time.monotonic())

    def feed(self, data: memoryview) -> None:
        """Take bytes of messages; they wait where too many messages are being answered."""
        if self._done:
            return
        try:
            cost = len(data) + CHUNK_BYTES
            self._service.hold(cost)
        except Refusal as refusal:
            self._fail(refusal)
            return
        self._waiting.append((data, cost))
        self._read()
        if self._waiting and self._waiting[-1][0].obj is data.obj:
            data, cost = self._waiting.pop()
            self._waiting.append((memoryview(bytes(data)), cost))

    def sent(self) -> None:
        """Go on: the client has taken what was sent."""
        self._read()

    def end(self) -> None:
        """Take the end of the requests."""
        self._has_ended = True
        self._read()

    def cancel(self) -> None:
        """Stop all work for the call."""
        super().cancel()
        self._service.release(sum(cost for _, cost in self._waiting))
        self._waiting.clear()
        self._answers.clear()

    def _read(self) -> None:
        """Read what waits, as far as answers go out; end the call after the last."""
        if self._is_reading:
            return
        self._is_reading = True
        try:
            while self._waiting and self._reads_on():
                data, cost = self._waiting[0]
                data = data[self._take(data) :]
                if not self._waiting:  # the call has ended
                    return
                if data:
                    self._waiting[0] = data, cost
                else:
                    self._waiting.popleft()
                    self._service.release(cost)
        except Refusal as refusal:
            self._fail(refusal)
        finally:
            self._is_reading = False
        if self._done or self._waiting:
            return
        self._connection.read_on(self._stream)
        if self._has_ended and not self._answers:
            if self._prefix or self._message is not None:
                self._fail(Refusal(Status.INVALID, "the stream ends in the middle of a message"))
            else:
                self._done = True
                self._finish(self._head.trailers)

    def _reads_on(self) -> bool:
        sending = len(self._stream.unsent)
        return not self._done and len(self._answers) + sending < MAX_STREAMED

    def _take_message(self, data: Bytes, held: int, *, packed: bool) -> None:
        answer = _StreamAnswer()
        self._answers.append(answer)
        task = self._begin(self._answer(answer, data, held, packed))
        if task is not None:
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _tasks(self) -> Sequence["asyncio.Task[None]"]:
        return tuple(self._running)

    async def _answer(self, answer: "_StreamAnswer", data: Bytes, held: int, packed: bool) -> None:
        trace = self._head.trace
        try:
            if packed:
                async with unpacked(self._service, self._head.encoding, data) as plain:
                    answer.parts = await streamed(self._service, plain, trace)
            else:
                answer.parts = await streamed(self._service, data, trace)
        except Exception as error:  # noqa: BLE001  (the client is to hear of it)
            self._fail(error)
        finally:
            self._service.release(held)
        while self._answers and self._answers[0].parts is not None and not self._done:
            parts = self._answers.popleft().parts
            assert parts is not None
            self._connection.send(self._stream, HEADERS, framed(parts), None)
        self._read()


@dataclass(slots=True, eq=False)
class _StreamAnswer:
    """An answer of a stream; `parts` is None until it is there."""

    parts: Sequence[Bytes] | None = None


class GrpcServer:
    """Answers calls; `connections` are those that are open."""

    def __init__(self, service: Service, *, max_connections: int, max_streams: int) -> None:
        """`max_streams` limits the calls of a connection that are being answered."""
        self.service = service
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.max_connections = max_connections
        self.max_streams = max_streams
        self._listener: asyncio.Server | None = None
        self._check = self.loop.call_later(IDLE_S / 4, self._check_alive)

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen; return the port. Raises OSError."""
        if context is not None:
            context.set_alpn_protocols(["h2"])
        self._listener = await self.loop.create_server(
            lambda: Connection(self), host, port, ssl=context
        )
        number: int = self._listener.sockets[0].getsockname()[1]
        return number

    def head_of(self, headers: Mapping[str, str]) -> CallHead:
        """Return what the headers of a call say."""
        return parse_headers(headers)

    def open(self, connection: Connection, stream: Stream, head: CallHead) -> _Call:
        """Return the call of a stream, which was answered where it is refused by its headers."""
        kind = StreamCall if head.method == "ModelStreamInfer" else UnaryCall
        call: _Call = kind(self, connection, stream, head)
        call.check()
        return call

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and close all connections when theirs are answered, at last after
        `grace_s`."""
        self._check.cancel()
        if self._listener is not None:
            self._listener.close()
        end_s = self.loop.time() + grace_s
        while sum(one.drain() for one in list(self.connections)) and self.loop.time() < end_s:
            await asyncio.sleep(STOP_POLL_S)
        for connection in list(self.connections):
            if connection.drain():
                connection.abort()

    def _check_alive(self) -> None:
        for connection in list(self.connections):
            connection.check_alive(self.loop.time())
        self._check = self.loop.call_later(IDLE_S / 4, self._check_alive)
