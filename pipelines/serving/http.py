"""The HTTP port: each body is read into one buffer, and tensors are views of it."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec
import numpy as np

from pipelines.host_header import answers
from pipelines.serving.codec import (
    REQUEST,
    JsonRequest,
    JsonTensor,
    decode_json,
    from_bytes,
    from_json,
    from_values,
    to_bytes,
    to_values,
)
from pipelines.serving.protocol import (
    BYTES,
    DATATYPES,
    InferRequest,
    InferResponse,
    Refusal,
    Status,
    Tensor,
    Wanted,
    refuse,
    trace_of,
    whole,
)
from pipelines.serving.service import Service, refusal_of, wants_binary

HEAD_BYTES = 32 * 1024
ALIGNMENT = 64  # of the first binary tensor: numpy and the engine read it in place
IDLE_S = 60.0
LINGER_S = 2.0
SEND_S = 120.0  # a client that reads its answer slower than this is cut off
PIECE_BYTES = 1 << 20  # of a body that is unpacked
HEADER_LENGTH = "inference-header-content-length"
JOINED_BYTES = 64 * 1024  # smaller answers are one write

_PHRASES = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found",
    405: "Method Not Allowed", 413: "Content Too Large", 421: "Misdirected Request",
    429: "Too Many Requests", 431: "Request Header Fields Too Large",
    500: "Internal Server Error", 501: "Not Implemented", 503: "Service Unavailable",
    504: "Gateway Timeout",
}  # fmt: skip
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\0\r\n]")


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    keeps_open: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back: `parts` of the body, and headers beside their length."""

    parts: Sequence[bytes | memoryview] = ()
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


def parse_head(blob: bytes) -> Head:
    """Return a head. Raises Refusal."""
    first, *lines = blob.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        refuse(f"{first[:100]!r} is no request line of HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _HEADER.fullmatch(name) or _CONTROL.search(value):
            refuse(f"{line[:100]!r} is no header")
        name, value = name.lower(), value.strip()
        if name in headers:
            if name in {"content-length", "transfer-encoding", "host", HEADER_LENGTH}:
                refuse(f"the header {name!r} is given twice")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    connection = headers.get("connection", "").lower()
    keeps_open = "close" not in connection and (
        words[2] != "HTTP/1.0" or "keep-alive" in connection
    )
    return Head(words[0], words[1].partition("?")[0], headers, keeps_open)


def length_of(headers: Mapping[str, str], name: str) -> int | None:
    """Return a header that is a length. Raises Refusal."""
    text = headers.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        refuse(f"the header {name!r} is {text[:100]!r}: give a whole number of bytes, 0 or more")
    return int(text)


class Connection(asyncio.BufferedProtocol):
    """One connection: requests one after the other."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._head = bytearray(HEAD_BYTES)
        self._filled = 0
        self._request: Head | None = None
        self._body = memoryview(b"")
        self._got = 0
        self._chunks: _Chunks | None = None
        self._held = 0
        self._task: asyncio.Task[None] | None = None
        self._transport: Any = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._heard_s = 0.0
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._heard_s = self._server.loop.time()
        count = len(self._server.connections)
        if count >= self._server.max_connections:
            self._send(_refused(Refusal(
                Status.BUSY,
                f"{count} connections are open; this server takes"
                f" {self._server.max_connections}: try again later",
            )), keeps_open=False)  # fmt: skip
            return
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._closing = True
        self._drained.set()
        if self._task is not None:
            self._task.cancel()  # a client that leaves is noticed when it is written to
        self._forget_body()

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._closing:
            return memoryview(self._head)
        if self._request is not None and self._chunks is None:
            return self._body[self._got :]
        return memoryview(self._head)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = self._server.loop.time()
        if self._closing:
            return
        if self._request is not None and self._chunks is None:
            self._got += nbytes
        else:
            self._filled += nbytes
        self._advance()

    def eof_received(self) -> bool:
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
                self._transport.pause_reading()
                self._task = self._server.loop.create_task(self._answer(self._request))
        except Refusal as refusal:
            self._forget_body()
            self._send(_refused(refusal), keeps_open=False)

    def _hold(self, got: int, total: int) -> None:
        """Count what has come of a body. Raises Refusal."""
        self._server.service.hold(got - self._held, total)
        self._held = got

    def _read_head(self) -> bool:
        end = self._head.find(b"\r\n\r\n", 0, self._filled)
        if end < 0:
            if self._filled == HEAD_BYTES:
                refuse(
                    f"the head of the request has more than {HEAD_BYTES} bytes",
                    Status.HEADER_TOO_LARGE,
                )
            return False
        head = parse_head(bytes(self._head[:end]))
        rest = bytes(self._head[end + 4 : self._filled])
        self._filled = 0
        encoding = head.headers.get("transfer-encoding", "").lower()
        size = length_of(head.headers, "content-length")
        self._server.check(head, has_body=bool(encoding or size))
        if encoding:
            if encoding != "chunked" or size is not None:
                refuse(
                    f"the transfer-encoding is {encoding!r}"
                    f"{' beside a content-length' if size is not None else ''}: this server takes"
                    " 'chunked' alone"
                )
            self._chunks = _Chunks(self._server.service.max_request_bytes)
            self._head[: len(rest)] = rest
            self._filled = len(rest)
        else:
            size = size or 0
            self._hold(min(size, len(rest)), size)
            shift = -(length_of(head.headers, HEADER_LENGTH) or 0) % ALIGNMENT
            buffer = np.empty(size + 2 * ALIGNMENT, np.uint8).data
            start = -_address(buffer) % ALIGNMENT + shift
            start -= ALIGNMENT if start + size > len(buffer) else 0
            self._body = buffer[start : start + size]
            self._got = min(size, len(rest))
            self._body[: self._got] = rest[: self._got]
            self._filled = len(rest) - self._got
            self._head[: self._filled] = rest[self._got :]
        self._request = head
        if head.headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

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

    async def _answer(self, head: Head) -> None:
        keeps_open = head.keeps_open
        try:
            try:
                answer = await self._server.answer(head, self._body)
            except Exception as error:  # noqa: BLE001  (the client is to hear of it)
                answer = _refused(refusal_of(error, f"{head.method} {head.path}"))
            self._send(answer, keeps_open=keeps_open)
            await asyncio.wait_for(self._drained.wait(), SEND_S)
        except asyncio.TimeoutError:
            self._transport.abort()
        finally:
            self._forget_body()
            self._task = None
        if keeps_open and not self._closing:
            self._transport.resume_reading()
            if self._filled:
                self._server.loop.call_soon(self._advance)

    def _forget_body(self) -> None:
        self._server.service.release(self._held)
        self._held = 0
        self._body, self._got = memoryview(b""), 0
        self._request = self._chunks = None

    def _send(self, answer: Answer, *, keeps_open: bool = True) -> None:
        if self._closing:
            return
        size = sum(len(part) for part in answer.parts)
        lines = [f"HTTP/1.1 {answer.status} {_PHRASES[answer.status]}"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        lines += [f"Content-Length: {size}", *(() if keeps_open else ("Connection: close",))]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
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
        self._server.loop.call_later(LINGER_S, self._transport.close)


def _address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


class _Chunks:
    """A body in chunks."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self.done = False
        self._limit = limit
        self._missing = 0  # of the chunk and the line end behind it
        self._trailer = False

    def feed(self, data: memoryview) -> int:
        """Take what has come; return how many bytes of it are used. Raises Refusal."""
        used = 0
        while not self.done:
            if self._missing > 2:
                part = data[used : used + self._missing - 2]
                if not part:
                    return used
                self.body += part
                self._missing -= len(part)
                used += len(part)
                continue
            end = bytes(data[used : used + 1024]).find(b"\r\n")
            if end < 0:
                if len(data) - used > 512:
                    refuse("a chunk's size is a line of more than 512 bytes")
                return used
            self._take_line(bytes(data[used : used + end]))
            used += end + 2
        return used

    def _take_line(self, line: bytes) -> None:
        if self._missing == 2:
            if line:
                refuse("a chunk is longer than its size says")
            self._missing = 0
            return
        if self._trailer:
            self.done = not line
            return
        text = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", text):
            refuse(f"{line[:40]!r} is no size of a chunk")
        size = int(text, 16)
        if len(self.body) + size > self._limit:
            refuse(
                f"the request has {len(self.body) + size} bytes or more; this server takes"
                f" {self._limit}",
                Status.TOO_LARGE,
            )
        self._missing, self._trailer = (size + 2, False) if size else (0, True)


def _refused(refusal: Refusal) -> Answer:
    body = msgspec.json.encode({"error": str(refusal)})
    return Answer((body,), refusal.status.value[0])


def _json(value: object) -> Answer:
    return Answer((msgspec.json.encode(value),))


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
        """Return the answer to a request that was checked. Raises Refusal."""
        allowed = []
        for method, pattern, handler in ROUTES:
            if match := pattern.fullmatch(head.path):
                if method == head.method:
                    names = {key: unquote(text or "") for key, text in match.groupdict().items()}
                    async with self._plain(head, body) as plain:
                        answer: Answer = await handler(self.service, head, plain, **names)
                    return answer
                allowed.append(method)
        if allowed:
            refuse(
                f"{head.path[:200]} takes {' and '.join(allowed)}, not {head.method[:20]}",
                Status.NO_METHOD,
            )
        raise Refusal(Status.NOT_FOUND, f"{head.path[:200]!r} is no path of this server")

    def check(self, head: Head, *, has_body: bool) -> None:
        """Raise Refusal: the request is not for this server, or has no token."""
        if not answers(self._host, head.headers.get("host", "")):
            refuse(
                f"the request is for {head.headers.get('host', '')!r}; this server is for this"
                " machine alone",
                Status.MISDIRECTED,
            )
        if has_body or not head.path.startswith("/v2/health/"):
            self.service.authorize(head.headers.get("authorization", ""))

    @asynccontextmanager
    async def _plain(self, head: Head, body: memoryview) -> AsyncIterator[memoryview]:
        """Unpack a body; its size is held inside the block. Raises Refusal."""
        encoding = head.headers.get("content-encoding", "").lower()
        if encoding in {"", "identity"}:
            yield body
            return
        if encoding not in {"gzip", "deflate"}:
            refuse(f"the content-encoding is {encoding[:40]!r}; this server takes gzip and deflate")
        limit = self.service.max_request_bytes
        data, held = bytearray(), 0
        try:
            async for piece in _unpacked(encoding, body):
                if len(data) + len(piece) > limit:
                    refuse(
                        f"the request has more than {limit} bytes when it is unpacked, which this"
                        " server takes",
                        Status.TOO_LARGE,
                    )
                self.service.hold(len(piece), len(data) + len(piece))
                held += len(piece)
                data += piece
            yield memoryview(data)
        finally:
            self.service.release(held)


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


Handler = Callable[..., Awaitable[Answer]]


async def _live(service: Service, head: Head, body: memoryview) -> Answer:
    return _json({"live": True})


async def _ready(service: Service, head: Head, body: memoryview) -> Answer:
    if not service.ready:
        refuse("the server is loading its models", Status.UNAVAILABLE)
    return _json({"ready": True})


async def _metadata(service: Service, head: Head, body: memoryview) -> Answer:
    return _json(service.server_metadata())


async def _model_metadata(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    return _json(service.model_metadata(model, version))


async def _model_ready(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    service.repository.find(model, version)
    return _json({"name": model, "ready": True})


async def _model_config(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    return _json(service.model_config(model, version))


async def _statistics(
    service: Service, head: Head, body: memoryview, model: str = "", version: str = ""
) -> Answer:
    return _json(service.statistics(model, version))


async def _index(service: Service, head: Head, body: memoryview) -> Answer:
    ready = bool(_object(body).get("ready", False))
    rows = await service.repository.index()
    return _json([row for row in rows if not ready or row["state"] == "READY"])


async def _load(service: Service, head: Head, body: memoryview, model: str) -> Answer:
    parameters = _parameters(body)
    files = {}
    for key, value in parameters.items():
        if key.startswith("file:"):
            try:
                files[key.removeprefix("file:")] = msgspec.convert(value, bytes)
            except msgspec.ValidationError as error:
                refuse(f"failed to load {model!r}: {key!r} is no base64 ({error})")
    await service.repository.load(model, str(parameters.get("config", "")), files)
    return Answer()


async def _unload(service: Service, head: Head, body: memoryview, model: str) -> Answer:
    with_steps = _parameters(body).get("unload_dependents", False) is True
    await service.repository.unload(model, with_steps=with_steps)
    return Answer()


async def _regions(
    service: Service, head: Head, body: memoryview, kind: str, region: str = ""
) -> Answer:
    if kind == "cuda":
        return _json([])
    return _json([one.as_json() for one in service.regions.status(region).values()])


async def _register(
    service: Service, head: Head, body: memoryview, kind: str, region: str
) -> Answer:
    if kind == "cuda":
        refuse(NO_CUDA, Status.UNIMPLEMENTED)
    request = _object(body)
    key, where = request.get("key"), f"shared memory region {region!r}"
    if not isinstance(key, str):
        refuse(f"{where} has the key {key!r}: give the name of a shared memory")
    offset = whole(request, "offset", where)
    if "byte_size" not in request:
        refuse(f"{where} has no byte_size")
    service.regions.register(region, key, offset, whole(request, "byte_size", where))
    return Answer()


async def _unregister(
    service: Service, head: Head, body: memoryview, kind: str, region: str = ""
) -> Answer:
    if kind == "system":
        service.regions.unregister(region)
    return Answer()


async def _trace(service: Service, head: Head, body: memoryview, model: str = "") -> Answer:
    changes = {}
    for name, value in _object(body).items():
        values = value if isinstance(value, list) else [value]
        changes[name] = None if value is None else tuple(map(str, values))
    rows = service.trace_settings(model, changes)
    return _json({
        name: list(values) if name == "trace_level" else values[0] for name, values in rows.items()
    })  # fmt: skip


async def _logging(service: Service, head: Head, body: memoryview) -> Answer:
    return _json(service.log_settings(_object(body)))


async def _infer(
    service: Service, head: Head, body: memoryview, model: str, version: str = ""
) -> Answer:
    size = length_of(head.headers, HEADER_LENGTH)
    trace = trace_of(head.headers.get("traceparent", ""))
    if size == 0:
        request, raw = _raw_request(service, body, model, version, trace), True
    else:
        if size is not None and size > len(body):
            refuse(f"the header {HEADER_LENGTH!r} is {size}; the body has {len(body)} bytes")
        raw, rest = False, len(body) if size is None else size
        parsed: JsonRequest = decode_json(REQUEST, body[:rest])
        request = InferRequest(
            model, version, _inputs(service, parsed.inputs, body[rest:]),
            [Wanted(one.name, one.parameters) for one in parsed.outputs],
            parsed.id, parsed.parameters, trace,
        )  # fmt: skip
    answer = encode_response(await service.infer(request), request, all_binary=raw)
    if trace:
        headers = (*answer.headers, ("traceparent", trace))
        return Answer(answer.parts, answer.status, headers)
    return answer


def _inputs(service: Service, tensors: Sequence[JsonTensor], binary: memoryview) -> list[Tensor]:
    """Return the inputs of a request. Raises Refusal."""
    inputs, at = [], 0
    for one in tensors:
        parameters, where = one.parameters, f"input {one.name!r}"
        if "shared_memory_region" in parameters:
            inputs.append(service.regions.input(one.name, one.datatype, one.shape, parameters))
        elif "binary_data_size" in parameters:
            if one.data:
                refuse(f"{where} has both `data` and `binary_data_size`: give one of them")
            size = whole(parameters, "binary_data_size", where)
            if at + size > len(binary):
                refuse(
                    f"{where} has a binary_data_size of {size}; {len(binary) - at} bytes are left"
                    " in the body"
                )
            inputs.append(from_bytes(one.name, one.datatype, one.shape, binary[at : at + size]))
            at += size
        else:
            inputs.append(from_json(one))
    if at != len(binary):
        refuse(f"the inputs have {at} bytes of binary data; the body has {len(binary)}")
    return inputs


def _raw_request(
    service: Service, body: memoryview, name: str, version: str, trace: str
) -> InferRequest:
    """Return a request whose body is the bytes of the only input. Raises Refusal."""
    model = service.repository.find(name, version)
    if len(model.inputs) != 1:
        refuse(
            f"a raw binary request was sent; model {name!r} has {len(model.inputs)} inputs and not"
            " one"
        )
    port = next(iter(model.inputs.values()))
    shape = [1, *port.shape()] if model.max_batch else port.shape()
    if port.datatype == BYTES:
        if shape.count(-1) == 1:
            shape[shape.index(-1)] = 1
        if any(size != 1 for size in shape):
            refuse(
                f"a raw binary request was sent; input {port.name!r} of BYTES has the shape"
                f" {shape} and must have one element"
            )
        tensor = from_values(port.name, BYTES, tuple(shape), [bytes(body)])
    else:
        if shape.count(-1) == 1:
            place = shape.index(-1)
            known = DATATYPES[port.datatype].numpy.itemsize
            known *= int(np.prod([size for size in shape if size != -1]))
            shape[place] = len(body) // known if known else 0
        tensor = from_bytes(port.name, port.datatype, tuple(shape), body)
    return InferRequest(name, version, [tensor], traceparent=trace)


def encode_response(response: InferResponse, request: InferRequest, *, all_binary: bool) -> Answer:
    """Return the answer with JSON first, then the binary outputs. Raises Refusal."""
    wanted = {one.name: one for one in request.outputs}
    rows, parts = [], []
    for tensor in response.outputs:
        row: dict[str, Any] = {
            "name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape,
        }  # fmt: skip
        if tensor.place is not None:
            region, offset, size = tensor.place
            row["parameters"] = {
                "shared_memory_region": region, "shared_memory_byte_size": size,
                **({"shared_memory_offset": offset} if offset else {}),
            }  # fmt: skip
        elif all_binary or wants_binary(wanted.get(tensor.name), request.parameters):
            data = to_bytes(tensor)
            parts.append(data)
            row["parameters"] = {"binary_data_size": len(data)}
        else:
            row["data"] = to_values(tensor)
        rows.append(row)
    body: dict[str, Any] = {
        "model_name": response.model, "model_version": response.version, "outputs": rows,
    }  # fmt: skip
    if response.id:
        body["id"] = response.id
    head = msgspec.json.encode(body)
    if not parts:
        return Answer((head,))
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Inference-Header-Content-Length", str(len(head))),
    )
    return Answer((head, *parts), headers=headers)


def _object(body: memoryview) -> dict[str, Any]:
    """Return a JSON object; an empty body is an empty one. Raises Refusal."""
    result: dict[str, Any] = decode_json(_OBJECT, body) if body else {}
    return result


def _parameters(body: memoryview) -> dict[str, Any]:
    parameters = _object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        refuse("`parameters` of the request is no object")
    return parameters


_OBJECT = msgspec.json.Decoder(dict[str, Any])
NO_CUDA = "CUDA shared memory is not served: use system shared memory, or send the bytes"

_M = "/v2/models/(?P<model>[^/]+)"
_MV = _M + "(?:/versions/(?P<version>[^/]+))?"
_S = "/v2/(?P<kind>system|cuda)sharedmemory"
_SR = _S + "/region/(?P<region>[^/]+)"
ROUTES: tuple[tuple[str, re.Pattern[str], Handler], ...] = tuple(
    (method, re.compile(path + "/?"), handler)
    for method, path, handler in (
        ("POST", f"{_MV}/infer", _infer),
        ("GET", "/v2/health/live", _live),
        ("GET", "/v2/health/ready", _ready),
        ("GET", "/v2", _metadata),
        ("GET", "/v2/models/stats", _statistics),
        ("GET", f"{_MV}/ready", _model_ready),
        ("GET", f"{_MV}/config", _model_config),
        ("GET", f"{_MV}/stats", _statistics),
        ("GET", f"{_M}/trace/setting", _trace),
        ("POST", f"{_M}/trace/setting", _trace),
        ("GET", _MV, _model_metadata),
        ("POST", "/v2/repository/index", _index),
        ("POST", "/v2/repository/models/(?P<model>[^/]+)/load", _load),
        ("POST", "/v2/repository/models/(?P<model>[^/]+)/unload", _unload),
        ("GET", f"{_S}(?:/region/(?P<region>[^/]+))?/status", _regions),
        ("POST", f"{_SR}/register", _register),
        ("POST", f"{_S}(?:/region/(?P<region>[^/]+))?/unregister", _unregister),
        ("GET", "/v2/trace/setting", _trace),
        ("POST", "/v2/trace/setting", _trace),
        ("GET", "/v2/logging", _logging),
        ("POST", "/v2/logging", _logging),
    )
)
