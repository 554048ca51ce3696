"""What clients that leave, lie or stall must not do to a server."""

import asyncio
import errno
import gc
import gzip
import json
import os
import re
import socket
import threading
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace
from serving_fixtures import served, write_repository

from device.errors import ConfigError, PipelineError
from pipelines.serving import http as http_port
from pipelines.serving import release, scheduler
from pipelines.serving.codec import from_bytes
from pipelines.serving.grpc import _known_response_head
from pipelines.serving.grpc import encode_response as encode_grpc
from pipelines.serving.http import HEAD_BYTES, Connection, HttpServer
from pipelines.serving.http_messages import MAX_HEADERS, Answer, Head
from pipelines.serving.http_routes import _known_response_json
from pipelines.serving.http_routes import encode_response as encode_http
from pipelines.serving.instances import ModelInstances
from pipelines.serving.messages import SERVICE, message
from pipelines.serving.model_config import Port, parse_config
from pipelines.serving.protocol import (
    KEPT_ID,
    InferRequest,
    InferResponse,
    Parameters,
    Refusal,
    Status,
    Tensor,
    whole,
)
from pipelines.serving.queued_model import QueuedModel
from pipelines.serving.service import Service
from pipelines.serving.shared_memory import Regions


class Transport:
    """Takes what is written; `on_write` is called then."""

    def __init__(self, on_write: Any = None) -> None:
        self.written = b""
        self.aborted = False
        self._on_write = on_write

    def write(self, data: bytes) -> None:
        self.written += data
        if self._on_write:
            self._on_write()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    pause_reading = resume_reading = close


class Reading(Transport):
    """Says whether it reads. What `feed` gives meanwhile is what TLS of Python 3.10 had read."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def new_service(megabytes: int = 1, token: str = "") -> Service:
    size = megabytes << 20
    return Service(
        None, None, token=token, max_request_bytes=size, max_in_flight_bytes=size  # type: ignore[arg-type]
    )  # fmt: skip


def connect(service: Service, transport: Transport) -> Connection:
    connection = Connection(HttpServer(service, "127.0.0.1", 8))
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection


def feed(connection: Connection, data: bytes) -> None:
    while data:
        buffer = connection.get_buffer(len(data))
        assert len(buffer)  # asyncio ends a connection that gives no room
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        connection.buffer_updated(size)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come in a minute")


def ask(port: int | None, data: bytes) -> tuple[int, bytes]:
    """Send bytes; return the status and the whole answer."""
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        one.sendall(data)
        answer = one.recv(1 << 20)
    return int(answer[9:12]), answer


def test_a_connection_that_breaks_gives_its_bytes_back() -> None:
    async def run() -> None:
        service = new_service()
        loop = asyncio.get_running_loop()
        transport = Transport(lambda: loop.call_soon(connection.connection_lost, None))
        connection: Connection = connect(service, transport)
        feed(connection, head("/v2/none") + head("/v2/none", "Content-Length: 500000") + b"x")
        await until(lambda: transport.written)
        await asyncio.sleep(0.05)
        assert transport.written.startswith(b"HTTP/1.1 404")
        assert service.in_flight_bytes == 0

    asyncio.run(run())


def test_what_waits_for_nothing_is_answered_in_the_same_turn_of_the_loop() -> None:
    async def run() -> None:
        service, transport = new_service(), Transport()
        connection = connect(service, transport)
        for count in (1, 2):  # the second has the head of the first
            feed(connection, head("/v2/none", "Content-Length: 1000") + bytes(1000))
            assert transport.written.count(b"HTTP/1.1 404") == count
        assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_request_that_waits_ends_with_its_connection(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def answer(*_: object) -> Any:
        try:
            await asyncio.get_running_loop().create_future()
        except BaseException as error:
            ended.append(type(error))
            raise

    async def run() -> None:
        service = new_service()
        connection = connect(service, Transport())
        monkeypatch.setattr(HttpServer, "answer", answer)
        feed(connection, head("/v2/none", "Content-Length: 1000") + bytes(1000))
        assert service.in_flight_bytes == 1000
        for _ in range(turns):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await until(lambda: ended)
        assert service.in_flight_bytes == 0

    asyncio.run(run())
    assert ended == [asyncio.CancelledError]


def test_a_head_of_many_headers_is_refused() -> None:
    async def run() -> None:
        service, transport = new_service(), Transport()
        most = [f"X{number}:" for number in range(MAX_HEADERS - 1)]  # and Host
        feed(connect(service, transport), head("/v2/none", *most))
        assert transport.written.startswith(b"HTTP/1.1 404")
        transport.written = b""
        feed(connect(service, transport), head("/v2/none", *most, "Y:"))
        assert transport.written.startswith(b"HTTP/1.1 431")
        assert b"the request has 101 headers; this server takes 100" in transport.written

    asyncio.run(run())


def test_open_connections_keep_no_large_heads() -> None:
    async def run() -> None:
        service = new_service(token="secret")
        data = head("/v2/health/live", "X: " + "y" * 30_000)
        connections = [connect(service, Transport()) for _ in range(41)]
        feed(connections.pop(), data)  # what is made once is there then
        tracemalloc.start()
        try:
            for connection in connections:
                feed(connection, data)
            gc.collect()
            size = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert size < 40 * 10_000

    asyncio.run(run())


def test_requests_that_come_while_reading_is_paused_are_answered_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        waits = asyncio.get_running_loop().create_future()

        async def answer(_: HttpServer, head: Head, body: memoryview) -> Answer:
            if head.path.startswith("/wait"):
                await waits
            return Answer((head.path.encode() + bytes(body) + b";",))

        monkeypatch.setattr(HttpServer, "answer", answer)
        transport = Reading()
        connection = connect(new_service(), transport)
        feed(connection, head("/1") + head("/2"))
        # The second _read_on is queued, which must not resume what /wait has paused.
        feed(connection, head("/wait", "Content-Length: 3") + b"abc")
        assert not transport.reading
        for _ in range(4):
            await asyncio.sleep(0)
            assert not transport.reading
        paths = [f"/{number}" for number in range(3, 2000)]
        data = b"".join(map(head, paths)) + head("/body", "Content-Length: 200000") + b"x" * 70_000
        for start in range(0, len(data), 16384):
            feed(connection, data[start : start + 16384])
        assert transport.written.endswith(b"/2;")
        waits.set_result(None)
        await until(lambda: b"/1999;" in transport.written)
        await until(lambda: transport.reading)
        feed(connection, b"x" * 130_000)
        await until(lambda: transport.written.endswith(b"x;"))
        bodies = [part.decode() for part in re.findall(b"\r\n\r\n([^;]*);", transport.written)]
        assert bodies == ["/1", "/2", "/waitabc", *paths, "/body" + "x" * 200_000]
        assert len(connection._head) == HEAD_BYTES

    asyncio.run(run())


def test_a_head_holds_nothing_and_a_body_what_has_come() -> None:
    async def run() -> None:
        service = new_service()
        connection = connect(service, Transport())
        feed(connection, head("/v2/none", "Content-Length: 500000"))
        assert service.in_flight_bytes == 0
        feed(connection, bytes(1000))
        assert service.in_flight_bytes == 1000
        connection.connection_lost(None)
        assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v2/models/x/infer", "/v2/health/live"])
@pytest.mark.parametrize("line", ["Content-Length: 500000", "Transfer-Encoding: chunked"])
def test_a_body_without_a_token_is_not_read(path: str, line: str) -> None:
    async def run() -> None:
        service, transport = new_service(token="secret"), Transport()
        connection = connect(service, transport)
        feed(connection, head(path, line) + b"3e8\r\n" + bytes(1000))
        assert transport.written.startswith(b"HTTP/1.1 401")
        assert service.in_flight_bytes == 0

    asyncio.run(run())


def test_chunks_are_held_as_they_come() -> None:
    async def run() -> None:
        service, transport = new_service(), Transport()
        connection = connect(service, transport)
        feed(connection, head("/v2/none", "Transfer-Encoding: chunked"))
        feed(connection, b"80000\r\n" + bytes(0x80000))
        assert service.in_flight_bytes == 0x80000
        second = connect(service, transport)
        feed(second, head("/v2/none", "Transfer-Encoding: chunked") + b"fffff\r\n")
        feed(second, bytes(0xFFFFF))
        assert transport.written.startswith(b"HTTP/1.1 429")
        assert service.in_flight_bytes == 0x80000

    asyncio.run(run())


def test_what_is_unpacked_is_held() -> None:
    async def run() -> None:
        service, transport = new_service(4), Transport()
        service.hold(1 << 20)
        connection = connect(service, transport)
        body = gzip.compress(bytes((3 << 20) + 1))
        lines = ("Content-Encoding: gzip", f"Content-Length: {len(body)}")
        feed(connection, head("/v2/logging", *lines) + body)
        await until(lambda: transport.written)
        assert transport.written.startswith(b"HTTP/1.1 429")
        await until(lambda: service.in_flight_bytes == 1 << 20)

    asyncio.run(run())


def test_a_packed_body_of_many_pieces_is_read(tmp_path: Path) -> None:
    text = json.dumps({"x": "y" * (3 << 20)}).encode()
    body = gzip.compress(text)
    with served(write_repository(tmp_path)) as ports:
        lines = ("Content-Encoding: gzip", f"Content-Length: {len(body)}")
        status, answer = ask(ports.http, head("/v2/logging", *lines) + body)
    assert status == 400
    assert b"log setting 'x'" in answer


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "SEND_S", 0.05, raising=False)

    async def run() -> None:
        service, transport = new_service(), Transport()
        connection = connect(service, transport)
        connection.pause_writing()
        feed(connection, head("/v2/none", "Content-Length: 3") + b"abc")
        await until(lambda: transport.aborted)
        await asyncio.sleep(0)
        assert service.in_flight_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize("trace", ["x\nSet-Cookie: y", "x", "00-" + "g" * 32 + "-" + "0" * 19])
def test_only_trace_context_is_sent_back(tmp_path: Path, trace: str) -> None:
    data = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    body = json.dumps(data).encode()
    with served(write_repository(tmp_path)) as ports:
        lines = (f"Content-Length: {len(body)}", f"traceparent: {trace}")
        status, answer = ask(ports.http, head("/v2/models/identity_fp32/infer", *lines) + body)
    assert status == (400 if "\n" in trace else 200)
    assert trace.encode() not in answer


def infer_request(**changes: Any) -> Any:
    request = message("ModelInferRequest")(model_name="identity_fp32", **changes)
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(bytes(8))
    return request


def send_slowly(one: socket.socket, times: int) -> None:
    for _ in range(times):
        one.sendall(bytes(10_000))
        time.sleep(0.05)


def test_a_client_that_sends_on_after_a_refusal_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "LINGER_S", 0.3)
    monkeypatch.setattr(http_port, "MAX_LINGER_S", 2.0)
    refused = head("/v2/models/none/infer", "Content-Length: 900000000")
    with served(tmp_path, max_request_mb=1) as ports:
        with socket.create_connection(("127.0.0.1", ports.http), timeout=10) as one:
            one.sendall(refused)
            send_slowly(one, 20)  # longer than LINGER_S
            assert one.recv(1 << 20).startswith(b"HTTP/1.1 413 ")
        with socket.create_connection(("127.0.0.1", ports.http), timeout=10) as one:
            one.sendall(refused)
            with pytest.raises(ConnectionError):  # not forever
                send_slowly(one, 200)


def test_a_refused_client_that_is_gone_holds_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "LINGER_S", 60.0)
    connections = weakref.WeakSet[Connection]()
    begin = Connection.__init__

    def counted(self: Connection, server: HttpServer) -> None:
        begin(self, server)
        connections.add(self)

    monkeypatch.setattr(Connection, "__init__", counted)
    with served(tmp_path, max_request_mb=1) as ports:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", ports.http), timeout=10) as one:
                one.sendall(head("/v2/models/none/infer", "Content-Length: 900000000"))
                assert one.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        until_s = time.monotonic() + 10
        while len(connections) > 0:
            assert time.monotonic() < until_s, f"{len(connections)} connections are held"
            gc.collect()
            time.sleep(0.1)


def test_a_connection_over_the_limit_stays_no_longer_because_its_client_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_port, "LINGER_S", 0.3)
    with (
        served(tmp_path, max_connections=1) as ports,
        socket.create_connection(("127.0.0.1", ports.http), timeout=10) as first,
    ):
        first.sendall(head("/v2/none")[:5])
        with socket.create_connection(("127.0.0.1", ports.http), timeout=10) as second:
            assert second.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
            with pytest.raises(ConnectionError):
                send_slowly(second, 100)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ([0, 2**62], "byte size overflow for input 'x'"),
        ([4, 2**60 + 2], "byte size overflow for input 'x'"),
        ([16, 2**60 + 2], "causes total element count to exceed maximum size of"),
        ([10**30, 0], "causes total element count to exceed maximum size of"),
        ([1] * 70, "a tensor has at most 32 dimensions"),
        ([0] * 70, "a tensor has at most 32 dimensions"),
    ],
)
def test_a_shape_that_no_array_has_is_refused(shape: list[int], sentence: str) -> None:
    with pytest.raises(Refusal, match=sentence):
        from_bytes("x", "FP32", tuple(shape), b"")


def test_what_a_client_names_at_length_is_not_kept(region: tuple[Regions, Path]) -> None:
    tensor = from_bytes("y", "FP32", (1,), bytes(4))
    request = InferRequest("of this test", "", [])
    encode: Callable[[InferResponse], object]
    for cached, encode in (
        (_known_response_head, encode_grpc),
        (_known_response_json, partial(encode_http, request=request, all_binary=True)),
    ):
        for ident, added in (("1" * KEPT_ID, 1), ("2" * (KEPT_ID + 1), 0)):
            before = cached.cache_info().currsize
            encode(InferResponse("of this test", "1", [tensor], ident))
            assert cached.cache_info().currsize == before + added
    with pytest.raises(Refusal, match="a name of 1025 characters; at most 1024"):
        region[0].register("x" * 1025, region[1].name, 0, 8)


@pytest.mark.parametrize("value", [10**400, 1 << 63], ids=["10**400", "2**63"])
def test_a_number_that_no_clock_takes_is_refused(value: int) -> None:
    with pytest.raises(Refusal, match=r"'timeout' of the request is .*at most"):
        whole({"timeout": value}, "timeout", "the request")


def test_faults_of_grpc_clients_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        served(write_repository(tmp_path)) as ports,
        grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
    ):
        ask = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError) as unknown:
            ask(infer_request(model_version="9" * 5000).SerializeToString())
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        monkeypatch.delattr(Service, "server_metadata")
        with pytest.raises(grpc.RpcError, match="the server failed") as internal:
            channel.unary_unary(f"/{SERVICE}/ServerMetadata")(b"")
        assert internal.value.code() is grpc.StatusCode.INTERNAL

        def fail(*_: object) -> None:
            raise ValueError("of ours")

        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        good = infer_request().SerializeToString()
        kind = message("ModelStreamInferResponse")
        with monkeypatch.context() as patch:
            patch.setattr(Service, "infer", fail)
            answers = [kind.FromString(one) for one in stream(iter([good] * 70), timeout=10)]
        assert len(answers) == 70
        assert all("of ours" in one.error_message for one in answers)
        monkeypatch.setattr(Service, "infer", fail)
        with pytest.raises(grpc.RpcError) as broken:
            ask(good)
        assert broken.value.code() is grpc.StatusCode.INTERNAL


@pytest.fixture
def region() -> Iterator[tuple[Regions, Path]]:
    path = Path(f"/dev/shm/tandem-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    regions = Regions("")
    regions.register("r", path.name, 0, 4096)
    yield regions, path
    regions.close()
    path.unlink()


def test_an_input_is_not_read_before_its_size_fits(
    region: tuple[Regions, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    row: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4096}
    with pytest.raises(Refusal, match=r"has 4096 bytes; FP32 of the shape \[2\] has 8"):
        region[0].input("x", "FP32", (2,), row)


def test_inputs_in_shared_memory_are_held(region: tuple[Regions, Path]) -> None:
    row: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4096}

    async def run() -> None:
        with sleeping_model(Sleeper()) as model:
            service = new_service()
            service.regions = region[0]
            service.repository = SimpleNamespace(find=lambda *_: model)  # type: ignore[assignment]
            request = replace(model.sample(), inputs=[region[0].input("x", "UINT8", (4096,), row)])
            service.hold((1 << 20) - 4095)
            with pytest.raises(Refusal, match="this one has 4096") as refusal:
                await service.infer(request)
            assert refusal.value.status is Status.BUSY
            service.release(1)
            with pytest.raises(Refusal, match="data-type UINT8"):
                await service.infer(request)
            assert service.in_flight_bytes == (1 << 20) - 4096

    asyncio.run(run())


def test_an_output_goes_only_to_the_region_that_was_asked_for(
    region: tuple[Regions, Path],
) -> None:
    regions, path = region
    row: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
    place = regions.place("output 'y'", row)
    regions.unregister("r")
    regions.register("r", path.name, 0, 4096)
    with pytest.raises(Refusal, match="was unregistered since"):
        asyncio.run(regions.write("y", place, memoryview(b"abcd")))
    assert path.read_bytes() == bytes(4096)


def test_a_full_shared_memory_is_a_refusal(
    region: tuple[Regions, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    place = region[0].place("y", {"shared_memory_region": "r", "shared_memory_byte_size": 4})
    with pytest.raises(Refusal, match="No space left") as refusal:
        asyncio.run(region[0].write("y", place, memoryview(b"abcd")))
    assert refusal.value.status is Status.BUSY


class Sleeper:
    """An instance that hangs in each run but the first."""

    def __init__(self) -> None:
        self.closed = False
        self.awake = threading.Event()
        self.awake.set()

    def infer(self, feeds: Any, /) -> Any:
        self.awake.wait()
        return {"y": np.zeros(2, np.float32)}

    def close(self) -> None:
        self.closed = True


def sleeping_model(
    runner: Sleeper, text: str = "", inner: tuple[int | None, ...] = (2,)
) -> QueuedModel:
    ports = (Port("x", "FP32", inner),), (Port("y", "FP32", (2,)),)
    for name, which in (("x", "input"), ("y", "output")):
        if which not in text:
            text += f' {which} {{ name: "{name}" data_type: TYPE_FP32 dims: 2 }}'
    config = parse_config(text, "m")
    return QueuedModel(1, config, ModelInstances([runner], *ports), Path(), 8)


def test_a_timer_ends_with_its_request() -> None:
    async def run() -> int:
        with sleeping_model(Sleeper()) as model:
            request = replace(model.sample(), parameters={"timeout": 10**9})
            for _ in range(5):
                await model.infer(request)
            loop: Any = asyncio.get_running_loop()
            return sum(not timer.cancelled() for timer in loop._scheduled)

    assert asyncio.run(run()) == 0


class OnCpu(Sleeper):
    """An instance of portable code, which keeps the sizes that ran in the thread of the loop."""

    reports = (SimpleNamespace(implementation="portable"),)

    def __init__(self) -> None:
        super().__init__()
        self.in_loop: list[int] = []

    def infer(self, feeds: Any, /) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.in_loop.append(feeds["x"].size)
        return super().infer(feeds)


def test_only_sizes_that_were_quick_run_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.serving.queued_model.SHORT_NS", 10**15)  # all, on any machine
    runner = OnCpu()

    async def run() -> None:
        text = 'input { name: "x" data_type: TYPE_FP32 dims: -1 }'
        with sleeping_model(runner, text, (None,)) as model:
            for size in (2, 2, 9, 9, 2):
                data = np.zeros(size, np.float32)
                inputs = [Tensor("x", "FP32", (size,), data)]
                await model.infer(replace(model.sample(), inputs=inputs))

    asyncio.run(run())
    assert runner.in_loop == [2, 9, 2]


class ByValue(OnCpu):
    """An instance that takes the CPU milliseconds that its input says."""

    def infer(self, feeds: Any, /) -> Any:
        end_ns = time.thread_time_ns() + int(feeds["x"][0] * 1e6)
        while time.thread_time_ns() < end_ns:
            pass
        return super().infer(feeds)


def test_what_costs_by_its_values_leaves_the_loop_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.serving.queued_model.SHORT_NS", 20_000_000)
    runner = ByValue()

    async def run() -> None:
        text = 'input { name: "x" data_type: TYPE_FP32 dims: -1 }'
        with sleeping_model(runner, text, (None,)) as model:
            for cpu_ms in (0, 0, 0, 200, *[0] * 60):  # the usual time is short again after 36
                data = np.full(1, cpu_ms, np.float32)
                await model.infer(replace(model.sample(), inputs=[Tensor("x", "FP32", (1,), data)]))

    asyncio.run(run())
    assert len(runner.in_loop) == 3  # the second, the third and the long one


def test_a_reshape_that_cannot_be_is_refused() -> None:
    text = 'input { name: "x" data_type: TYPE_FP32 dims: -1 reshape { shape: [ 2 ] } }'

    async def run() -> None:
        with sleeping_model(Sleeper(), text) as model:
            data = np.zeros(3, np.float32)
            request = replace(model.sample(), inputs=[Tensor("x", "FP32", (3,), data)])
            with pytest.raises(Refusal, match="does not become") as refusal:
                await model.infer(request)
            assert refusal.value.status is Status.INVALID

    asyncio.run(run())


@pytest.mark.parametrize(
    ("which", "dims", "shape"),
    [("input", "[ 4 ]", "[ -1, -1 ]"), ("output", "[ -1, -1 ]", "[ 2 ]")],
)
def test_a_reshape_to_two_unknown_dimensions_is_refused_at_load(
    which: str, dims: str, shape: str
) -> None:
    name = {"input": "x", "output": "y"}[which]
    text = (
        f'{which} {{ name: "{name}" data_type: TYPE_FP32 dims: {dims}'
        f" reshape {{ shape: {shape} }} }}"
    )
    with (
        pytest.raises(ConfigError, match=r"one dimension may be -1, 2 are"),
        sleeping_model(Sleeper(), text, (None,) * (shape.count("-1") or 1)),
    ):
        pass


def test_an_instance_that_hangs_does_not_keep_the_model_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "CLOSE_S", 0.1, raising=False)
    runner = Sleeper()

    async def run() -> None:
        model = sleeping_model(runner)
        runner.awake.clear()
        task = asyncio.create_task(model.infer(model.sample()))
        await asyncio.sleep(0.05)
        closing = threading.Thread(target=model.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, 2)
        try:
            assert not closing.is_alive()
            assert not runner.closed
        finally:
            runner.awake.set()
            await task

    asyncio.run(run())


def test_one_engine_of_several_that_hangs_ends_the_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def nothing(*_: object) -> AsyncIterator[None]:
        yield

    for name, value in (("PROBE_S", 0.01), ("HANG_S", 0.2), ("HEARTBEAT_S", 0.02)):
        monkeypatch.setattr(release, name, value, raising=False)
    monkeypatch.setattr(release, "serving", nothing)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that was set back
    runners = [Sleeper(), Sleeper()]

    async def run() -> None:
        models = [sleeping_model(runner) for runner in runners]
        repository: Any = SimpleNamespace(models=models, reasons={})

        def begin(models: Any, _: float) -> Any:
            runners[1].awake.clear()
            return SimpleNamespace(tick=lambda: None)

        with pytest.raises(PipelineError, match="its engine hangs"):
            await asyncio.wait_for(
                release._run(Any, repository, begin, threading.Event()), 5  # type: ignore[arg-type]
            )  # fmt: skip
        runners[1].awake.set()
        for model in models:
            model.close()

    asyncio.run(run())
