"""gRPC over HTTP/2, frame by frame: what clients may send, and what they must not do."""

import asyncio
import gzip
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hpack import Decoder, Encoder

from pipelines.serving.grpc_calls import MAX_STREAMED, GrpcServer
from pipelines.serving.http2 import (
    CONNECTION_WINDOW,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    IDLE_S,
    INITIAL_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SEND_S,
    SETTINGS,
    STREAM_WINDOW,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Connection,
    frame,
)
from pipelines.serving.messages import SERVICE, message
from pipelines.serving.protocol import InferRequest, InferResponse
from pipelines.serving.service import Service

MIB = 1 << 20


class Transport:
    """A double that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = self.closed = False
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Sequence[bytes]) -> None:
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Take what was written, as (kind, flags, stream, payload)."""
        rows, at = [], 0
        while at < len(self.written):
            high, low, kind, flags, ident = struct.unpack_from(">BHBBI", self.written, at)
            end = at + 9 + (high << 16 | low)
            rows.append((kind, flags, ident, self.written[at + 9 : end]))
            at = end
        assert at == len(self.written)
        self.written = b""
        return rows


class Client:
    """The other side of a connection to a service without models."""

    def __init__(self, service: Service, max_streams: int = 1024) -> None:
        self.transport, self.encoder = Transport(), Encoder()
        self.server = GrpcServer(service, max_connections=8, max_streams=max_streams)
        self.connection = Connection(self.server)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def begin(self, settings: Mapping[int, int] | None = None) -> None:
        rows = [struct.pack(">HI", *row) for row in (settings or {}).items()]
        self.send(PREFACE + frame(SETTINGS, 0, 0, b"".join(rows)))
        self.transport.frames()

    def send(self, data: bytes, most: int = 1 << 30) -> None:
        """Feed bytes as a transport does, at most so many at once."""
        while data and not self.transport.closed:
            buffer = self.connection.get_buffer(len(data))
            assert len(buffer)
            size = min(len(buffer), len(data), most)
            buffer[:size] = data[:size]
            data = data[size:]
            self.connection.buffer_updated(size)

    def headers(self, method: str, stream: int, flags: int = END_HEADERS, **extra: str) -> bytes:
        named = {name.replace("_", "-"): value for name, value in extra.items()}
        rows = {
            ":method": "POST", ":scheme": "http", ":path": f"/{SERVICE}/{method}",
            ":authority": "localhost", "content-type": "application/grpc", **named,
        }  # fmt: skip
        return frame(HEADERS, flags, stream, self.encoder.encode(rows.items()))

    def call(self, stream: int, *messages: bytes, method: str = "ModelInfer", **extra: str) -> None:
        body = b"".join(map(framed, messages))
        self.send(self.headers(method, stream, END_HEADERS, **extra))
        for start in range(0, len(body), MIB):
            self.send(frame(DATA, 0, stream, body[start : start + MIB]))
        self.send(frame(DATA, END_STREAM, stream))


def framed(content: bytes, packed: int = 0) -> bytes:
    return bytes([packed]) + len(content).to_bytes(4, "big") + content


def rows_of(payload: bytes) -> dict[str, str]:
    return {str(name): str(value) for name, value in Decoder().decode(payload)}


def status(frames: Sequence[tuple[int, int, int, bytes]], stream: int = 1) -> tuple[str, str]:
    """Return the status of a call, and its sentence."""
    last = [row for row in frames if row[0] == HEADERS and row[2] == stream][-1]
    assert last[1] & END_STREAM
    headers = rows_of(last[3])
    return headers["grpc-status"], headers.get("grpc-message", "")


def new_service(megabytes: int = 1, token: str = "") -> Service:
    size = megabytes * MIB
    return Service(
        None, None, token=token, max_request_bytes=size, max_in_flight_bytes=4 * size  # type: ignore[arg-type]
    )  # fmt: skip


def request(data: np.ndarray, ident: str = "") -> bytes:
    one = message("ModelInferRequest")(model_name="m", id=ident)
    one.inputs.add(name="x", datatype="FP32", shape=data.shape)
    one.raw_input_contents.append(data.tobytes())
    content: bytes = one.SerializeToString()
    return content


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer with the inputs."""

    async def infer(_: Service, request: InferRequest) -> InferResponse:
        return InferResponse(request.model, "1", request.inputs, request.id)

    monkeypatch.setattr(Service, "infer", infer)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Future[None]]:
    """Let requests wait, each for a future of its own."""
    waits: list[asyncio.Future[None]] = []

    async def infer(_: Service, request: InferRequest) -> InferResponse:
        waits.append(asyncio.get_running_loop().create_future())
        await waits[-1]
        return InferResponse(request.model, "1", request.inputs, request.id)

    monkeypatch.setattr(Service, "infer", infer)
    return waits


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


OPEN = END_HEADERS | END_STREAM


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (lambda c: frame(PING, 0, 0, bytes(7)), 6, "has 7 bytes"),
        (lambda c: frame(PUSH_PROMISE, 0, 1), 1, "pushes nothing"),
        (lambda c: frame(DATA, 0, 1, b"x"), 1, "stream 1, which is not open"),
        (lambda c: frame(RST_STREAM, 0, 1, bytes(4)), 1, "came for stream 1"),
        (lambda c: frame(WINDOW_UPDATE, 0, 1, bytes([0, 0, 0, 1])), 1, "came for stream 1"),
        (lambda c: frame(WINDOW_UPDATE, 0, 0, bytes(4)), 1, "is 0"),
        (lambda c: frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), 3, "is too large"),
        (lambda c: frame(SETTINGS, 0, 0, bytes(5)), 6, "no size that they may have"),
        (lambda c: frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), 3, "initial window"),
        (lambda c: frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 16)), 1, "largest frame is 16"),
        (lambda c: frame(CONTINUATION, END_HEADERS, 1, b"x"), 1, "does not go on with headers"),
        (lambda c: c.headers("ServerLive", 2), 1, "stream 2 is not a client's"),
        (lambda c: c.headers("ServerLive", 0), 1, "came for stream 0"),
        (lambda c: c.headers("ServerLive", 1, 0) + frame(PING, 0, 0, bytes(8)), 1, "kind 6 does"),
        (lambda c: frame(HEADERS, OPEN, 1, b"\xff\xff\xff\xff\x7f"), 9, "are not HPACK's"),
        (lambda c: frame(HEADERS, OPEN | PADDED, 1, b"\x09abc"), 1, "padding of HEADERS"),
        (lambda c: frame(HEADERS, 0, 1, bytes(16385)), 6, "16385 bytes; at most 16384"),
        (
            lambda c: frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, bytes(16384)) * 5,
            11, "exceed 65536 bytes",
        ),
        (lambda c: frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1), 11, "exceed"),
        (
            lambda c: frame(HEADERS, OPEN, 1, c.encoder.encode([("a", "b" * 3000)]) + b"\xbe" * 30),
            9, "header list larger than 65536",
        ),
        (
            lambda c: c.headers("ModelStreamInfer", 1) + frame(DATA, PADDED, 1, b"\x09abc"),
            6, "has 9 of padding",
        ),
        (
            lambda c: c.headers("ModelInfer", 1, OPEN) + c.headers("ModelStreamInfer", 3)
            + c.headers("ModelStreamInfer", 3),
            1, "stream 3 has headers twice",
        ),
        (
            lambda c: c.headers("ModelStreamInfer", 1)
            + frame(DATA, END_STREAM, 1, framed(request(np.zeros(1, np.float32))))
            + frame(DATA, 0, 1, b"x"),
            5, "after its end",
        ),
    ],
)  # fmt: skip
def test_faults_end_the_connection_and_say_why(
    data: Callable[[Client], bytes], code: int, reason: str, gate: list[asyncio.Future[None]]
) -> None:
    async def run() -> None:
        service = new_service()
        client = Client(service)
        client.begin()
        client.send(data(client))
        kind, _, _, payload = client.transport.frames()[-1]
        assert kind == GOAWAY
        assert (payload[4:8], client.transport.closed) == (code.to_bytes(4, "big"), True)
        assert reason in payload[8:].decode()
        client.connection.connection_lost(None)
        await turns()
        assert service.in_flight_bytes == 0
        assert not client.server.connections

    asyncio.run(run())


@pytest.mark.parametrize(
    "first", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", PREFACE + bytes(9)]
)
def test_what_is_no_http2_is_closed(first: bytes) -> None:
    async def run() -> None:
        client = Client(new_service())
        client.send(first)
        assert client.transport.closed

    asyncio.run(run())


@pytest.mark.parametrize("most", [1, 7, 100, 20_000, 1 << 30])
def test_a_message_is_the_same_however_it_is_cut(most: int, rng: np.random.Generator) -> None:
    async def run() -> None:
        service = new_service(8)
        client = Client(service)
        client.begin({INITIAL_WINDOW: 1 << 30})
        sizes = (0, 1, 5000) if most < 1000 else (0, 1, 5000, 1_000_000)
        for number, size in enumerate(sizes):
            data, stream = rng.random(size, np.float32), 2 * number + 1
            body, frames = framed(request(data)), client.headers("ModelInfer", stream)
            while body:
                cut = int(rng.integers(1, 100_000))
                padding = int(rng.integers(0, 256))
                payload = bytes([padding]) + body[:cut] + bytes(padding)
                frames += frame(DATA, PADDED, stream, payload) if cut % 2 else frame(
                    DATA, 0, stream, body[:cut]
                )  # fmt: skip
                frames += frame(PING, 0, 0, bytes(8)) + frame(99, 0, 0, b"unknown")
                body = body[cut:]
            client.send(frames + frame(DATA, END_STREAM, stream), most)
            client.send(frame(WINDOW_UPDATE, 0, 0, (8 * MIB).to_bytes(4, "big")))
            rows = client.transport.frames()
            assert status(rows, stream) == ("0", "")
            answer = b"".join(row[3] for row in rows if row[0] == DATA)
            assert len(answer) == 5 + int.from_bytes(answer[1:5], "big")
            raw = message("ModelInferResponse").FromString(answer[5:]).raw_output_contents
            assert raw[0] == data.tobytes()
        assert service.in_flight_bytes == 0

    asyncio.run(run())


def test_windows_of_both_sides_are_kept() -> None:
    async def run() -> None:
        client = Client(new_service(8))
        client.begin({INITIAL_WINDOW: 100})
        data = np.arange(500_000, dtype=np.float32)  # 2 MB
        client.call(1, request(data))
        answer, granted = b"", 100
        for _ in range(100):
            rows = client.transport.frames()
            answer += b"".join(row[3] for row in rows if row[0] == DATA)
            assert len(answer) <= granted
            assert all(len(row[3]) <= 16384 for row in rows if row[0] == DATA)
            if rows and rows[-1][0] == HEADERS:
                break
            granted += 70_000
            for stream in (0, 1):
                client.send(frame(WINDOW_UPDATE, 0, stream, (70_000).to_bytes(4, "big")))
        assert status(rows) == ("0", "")
        raw = message("ModelInferResponse").FromString(answer[5:]).raw_output_contents
        assert raw[0] == data.tobytes()

    asyncio.run(run())


def test_a_client_that_sends_more_than_its_window_is_ended() -> None:
    async def run() -> None:
        client = Client(new_service(64))
        client.begin()
        client.send(client.headers("ModelInfer", 1) + frame(DATA, 0, 1, b"\0\x03\xff\xff\xff"))
        sent, size = 5, MIB
        for _ in range(40):
            client.send(frame(DATA, 0, 1, bytes(size)))
            sent += size
        rows = client.transport.frames()
        grants = {
            stream: [
                int.from_bytes(row[3], "big")
                for row in rows
                if row[0] == WINDOW_UPDATE and row[2] == stream
            ]
            for stream in (0, 1)
        }
        assert not client.transport.closed
        assert STREAM_WINDOW + sum(grants[1]) - sent <= STREAM_WINDOW
        assert CONNECTION_WINDOW + sum(grants[0]) - sent <= CONNECTION_WINDOW
        client.connection._streams[1].receive_window = 3  # as if nothing had been granted
        client.send(frame(DATA, 0, 1, b"abcd"))
        assert "exceed the window" in client.transport.frames()[-1][3].decode("latin-1")

    asyncio.run(run())


def test_the_same_bytes_of_headers_mean_what_the_table_says() -> None:
    async def run() -> None:
        client = Client(new_service(token="secret"))
        client.begin()
        statuses = []
        for stream, token in enumerate(("secret", "wrong", "secret", "secret", "wrong", "wrong")):
            number = 2 * stream + 1
            client.call(number, request(np.zeros(1, np.float32)), authorization=f"Bearer {token}")
            statuses.append(status(client.transport.frames(), number)[0])
        assert statuses == ["0", "16", "0", "0", "16", "16"]

    asyncio.run(run())


def test_a_call_without_a_token_is_refused_before_its_body() -> None:
    async def run() -> None:
        service = new_service(token="secret")
        client = Client(service)
        client.begin()
        client.send(client.headers("ModelInfer", 1) + frame(DATA, 0, 1, bytes(1000)))
        rows = client.transport.frames()
        assert status(rows)[0] == "16"
        assert (RST_STREAM, 0, 1, bytes(4)) in rows
        assert service.in_flight_bytes == 0
        client.call(3, b"", method="ServerLive")
        assert status(client.transport.frames(), 3) == ("0", "")

    asyncio.run(run())


def test_bytes_are_held_as_they_come_and_given_back() -> None:
    async def run() -> None:
        service = new_service()
        for end in ("reset", "lost", "none"):
            client = Client(service)
            client.begin()
            client.send(client.headers("ModelInfer", 1))
            client.send(frame(DATA, 0, 1, framed(bytes(500_000))[:1005]))
            assert service.in_flight_bytes == 1000
            if end == "reset":
                client.send(frame(RST_STREAM, 0, 1, bytes(4)))
            elif end == "lost":
                client.connection.connection_lost(None)
            else:
                client.send(frame(DATA, END_STREAM, 1))
                assert status(client.transport.frames())[1].endswith("was sent no whole message")
            assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "extra", "code", "sentence"),
    [
        (framed(bytes(MIB + 1)), {}, "8", "has 1048577 bytes; this server takes 1048576"),
        (b"", {}, "3", "was sent no whole message"),
        (framed(b"") * 2, {}, "3", "takes one message, and two were sent"),
        (framed(b"no gzip", 1), {"grpc_encoding": "gzip"}, "3", "the body is no gzip"),
        (framed(gzip.compress(bytes(2 * MIB)), 1), {"grpc_encoding": "gzip"}, "8", "unpacked"),
        (framed(b"\xff"), {}, "3", "the request is no ModelInferRequest"),
    ],
)
def test_messages_that_cannot_be_are_refused_by_a_sentence(
    body: bytes, extra: dict[str, str], code: str, sentence: str
) -> None:
    async def run() -> None:
        service = new_service()
        client = Client(service)
        client.begin()
        client.send(client.headers("ModelInfer", 1, END_HEADERS, **extra))
        client.send(frame(DATA, 0, 1, body[:MIB]) + frame(DATA, END_STREAM, 1, body[MIB:]))
        rows = client.transport.frames()
        while not rows:
            await asyncio.sleep(0.01)
            rows = client.transport.frames()
        assert status(rows)[0] == code
        assert sentence in status(rows)[1]
        assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"content-type": "text/html"}, {":status": "415"}),
        ({":method": "GET"}, {":status": "415"}),
        ({":path": "/other/ModelInfer"}, {"grpc-status": "12"}),
        ({"grpc-encoding": "snappy"}, {"grpc-status": "12"}),
    ],
)
def test_what_is_no_call_of_the_service_is_refused(
    extra: dict[str, str], expected: dict[str, str]
) -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        client.send(client.headers("ModelInfer", 1, OPEN, **extra))
        assert expected.items() <= rows_of(client.transport.frames()[0][3]).items()

    asyncio.run(run())


def test_priorities_and_trailers_of_a_client_are_taken() -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        block = client.headers("ModelInfer", 1)[9:]
        priority = bytes([2]) + bytes(5)
        client.send(frame(HEADERS, PADDED | WITH_PRIORITY, 1, priority + block[:20] + bytes(2)))
        client.send(frame(CONTINUATION, END_HEADERS, 1, block[20:]))
        client.send(frame(DATA, 0, 1, framed(request(np.zeros(2, np.float32)))))
        client.send(frame(HEADERS, OPEN, 1, client.encoder.encode([("x-end", "1")])))
        assert status(client.transport.frames()) == ("0", "")

    asyncio.run(run())


def test_a_call_ends_at_its_deadline(gate: list[asyncio.Future[None]]) -> None:
    async def run() -> None:
        service = new_service()
        client = Client(service)
        client.begin()
        client.call(1, request(np.zeros(1, np.float32)), grpc_timeout="10m")
        await asyncio.wait([gate[0]], timeout=60)
        assert gate[0].cancelled()
        assert status(client.transport.frames()) == ("4", "no answer within 0.01 s")
        assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_call_that_is_reset_is_not_computed_further(
    method: str, gate: list[asyncio.Future[None]]
) -> None:
    async def run() -> None:
        service = new_service()
        client = Client(service)
        client.begin()
        client.call(1, request(np.zeros(1, np.float32)), method=method)
        client.send(frame(RST_STREAM, 0, 1, bytes(4)))
        await turns()
        assert gate[0].cancelled()
        assert service.in_flight_bytes == 0
        assert not any(row[2] for row in client.transport.frames())

    asyncio.run(run())


def test_calls_beyond_the_limit_of_a_connection_are_refused(
    gate: list[asyncio.Future[None]],
) -> None:
    async def run() -> None:
        client = Client(new_service(), max_streams=2)
        client.begin()
        for stream in (1, 3, 5):
            client.call(stream, request(np.zeros(1, np.float32)))
        assert client.transport.frames() == [(RST_STREAM, 0, 5, bytes([0, 0, 0, 7]))]
        gate[0].set_result(None)
        await turns()
        assert status(client.transport.frames()) == ("0", "")
        client.call(7, request(np.zeros(1, np.float32)))
        assert len(gate) == 3

    asyncio.run(run())


def test_a_stream_reads_no_more_than_it_answers(gate: list[asyncio.Future[None]]) -> None:
    async def run() -> None:
        service, count = new_service(), 3 * MAX_STREAMED
        client = Client(service)
        client.begin({INITIAL_WINDOW: MIB})
        client.send(client.headers("ModelStreamInfer", 1))
        zeros = np.zeros(1, np.float32)
        body = b"".join(framed(request(zeros, str(number))) for number in range(count))
        for start in range(0, len(body), 1000):
            client.send(frame(DATA, 0, 1, body[start : start + 1000]))
        client.send(frame(DATA, END_STREAM, 1))
        assert len(gate) == MAX_STREAMED
        assert service.in_flight_bytes > len(body) // 2
        number = 0
        while number < len(gate):
            gate[number].set_result(None)
            number += 1
            await turns()
        assert number == count
        rows = client.transport.frames()
        answers = b"".join(row[3] for row in rows if row[0] == DATA)
        idents = []
        while answers:
            size = int.from_bytes(answers[1:5], "big")
            one = message("ModelStreamInferResponse").FromString(answers[5 : 5 + size])
            idents.append(one.infer_response.id)
            answers = answers[5 + size :]
        assert idents == [str(number) for number in range(count)]
        assert status(rows) == ("0", "")
        assert service.in_flight_bytes == 0

    asyncio.run(run())


def test_what_waits_of_a_stream_is_given_back_with_it(gate: list[asyncio.Future[None]]) -> None:
    async def run() -> None:
        service = new_service()
        client = Client(service)
        client.begin()
        client.call(1, *[request(np.zeros(1, np.float32))] * 300, method="ModelStreamInfer")
        assert service.in_flight_bytes
        client.connection.connection_lost(None)
        await turns()
        assert service.in_flight_bytes == 0
        assert len(gate) == MAX_STREAMED

    asyncio.run(run())


def test_a_server_that_ends_answers_what_it_has(gate: list[asyncio.Future[None]]) -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        client.call(1, request(np.zeros(1, np.float32)))
        stopping = asyncio.create_task(client.server.stop(60))
        await turns()
        assert [row[0] for row in client.transport.frames()] == [GOAWAY]
        client.call(3, request(np.zeros(1, np.float32)))
        assert client.transport.frames() == [(RST_STREAM, 0, 3, bytes([0, 0, 0, 7]))]
        gate[0].set_result(None)
        await stopping
        assert status(client.transport.frames()) == ("0", "")
        assert client.transport.closed

    asyncio.run(run())


def test_a_server_that_ends_waits_no_longer_than_it_may(gate: list[asyncio.Future[None]]) -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        client.call(1, request(np.zeros(1, np.float32)))
        await client.server.stop(0.0)
        assert client.transport.aborted

    asyncio.run(run())


def test_a_client_that_is_silent_or_does_not_read_is_cut_off() -> None:
    async def run() -> None:
        client = Client(new_service(8))
        client.begin()
        now_s = client.server.loop.time()
        client.connection.check_alive(now_s + IDLE_S + 1)
        client.connection.check_alive(now_s + IDLE_S + 2)
        assert [row[0] for row in client.transport.frames()] == [PING]
        client.connection.check_alive(now_s + 3 * IDLE_S + 1)
        assert client.transport.aborted

        slow = Client(new_service(8))
        slow.begin()
        slow.call(1, request(np.zeros(100_000, np.float32)))
        slow.connection.check_alive(now_s + SEND_S / 2)
        assert not slow.transport.aborted
        slow.connection._heard_s += SEND_S  # it sends, but takes no answer
        slow.connection.check_alive(now_s + SEND_S + 10)
        assert slow.transport.aborted

        mute = Client(new_service())
        mute.connection.check_alive(now_s + IDLE_S + 1)
        assert mute.transport.aborted

    asyncio.run(run())


def test_nothing_is_read_while_answers_are_not_taken() -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        client.connection.pause_writing()
        assert not client.transport.reading
        client.connection.resume_writing()
        assert client.transport.reading

    asyncio.run(run())


def test_known_headers_are_not_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = Client(new_service())
        client.begin()
        for stream in (1, 3):  # the second has all in the table
            client.call(stream, request(np.zeros(1, np.float32)))
        client.transport.frames()
        monkeypatch.delattr(Decoder, "decode")
        client.call(5, request(np.zeros(1, np.float32)))
        assert client.connection._streams == {}

    asyncio.run(run())
