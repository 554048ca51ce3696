"""What clients that leave, lie or stall must not do to a server."""

import asyncio
import gzip
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from serving_fixtures import served, write_repository

from pipelines.serving import http as http_port
from pipelines.serving.http import Connection, HttpServer
from pipelines.serving.service import Service


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
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        data = data[size:]
        connection.buffer_updated(size)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", "")).encode()


def ask(port: int, data: bytes) -> tuple[int, bytes]:
    """Send bytes; return the status and the whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        one.sendall(data)
        answer = one.recv(1 << 20)
    return int(answer[9:12]), answer


def test_a_connection_that_breaks_gives_its_bytes_back() -> None:
    async def run() -> None:
        service = new_service()
        loop = asyncio.get_running_loop()
        transport = Transport(lambda: loop.call_soon(connection.connection_lost, None))
        connection = connect(service, transport)
        feed(connection, head("/v2/none") + head("/v2/none", "Content-Length: 500000") + b"x")
        await asyncio.sleep(0.05)
        assert transport.written.startswith(b"HTTP/1.1 404")
        assert service.in_flight_bytes == 0

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
        await asyncio.sleep(0.3)
        assert transport.written.startswith(b"HTTP/1.1 429")
        assert service.in_flight_bytes == 1 << 20

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
        await asyncio.sleep(0.3)
        assert transport.aborted
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
