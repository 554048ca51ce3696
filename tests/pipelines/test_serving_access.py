"""Who may ask, and how much: tokens, TLS, limits; and trace context that is passed on."""

import gzip
import http.client
import json
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from geventhttpclient.response import HTTPConnectionClosed
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serving_fixtures import rows, served, write_repository
from tritonclient.utils import InferenceServerException

from device.errors import ConfigError
from pipelines.serving.messages import SERVICE, message
from pipelines.serving.protocol import Refusal, Status
from pipelines.serving.server import ServeOptions, check_reach
from pipelines.serving.service import Service
from pipelines.serving.spans import Spans

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def pair(library: Any) -> list[Any]:
    inputs = [library.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
    for one in inputs:
        one.set_data_from_numpy(rows(1))
    return inputs


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    key, pem = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    files = ("-nodes", "-days", "2", "-keyout", str(key), "-out", str(pem))
    subprocess.run([*words, *names, *files], check=True, capture_output=True)
    return pem, key


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_a_token_is_asked_for(tmp_path: Path, library: Any) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with served(write_repository(tmp_path / "models"), token_file=token) as ports:
        port = ports.http if library is triton_http else ports.grpc
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.is_server_ready()
            for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
                with pytest.raises(InferenceServerException, match="asks for a token"):
                    client.infer("simple", pair(library), headers=headers)
            right = {"authorization": "Bearer secret"}
            assert (
                client.infer("simple", pair(library), headers=right).as_numpy("OUTPUT0")[0, 1] == 2
            )


def test_tls_by_http_and_grpc(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    pem, key = certificate
    with served(write_repository(tmp_path / "models"), certificate=pem, key=key) as ports:
        options = {"ssl": True, "ssl_options": {"ca_certs": str(pem)}, "insecure": True}
        with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}", **options) as client:
            answer = client.infer("simple", pair(triton_http))
            assert np.array_equal(answer.as_numpy("OUTPUT0"), 2 * rows(1))
        with triton_grpc.InferenceServerClient(
            f"localhost:{ports.grpc}", ssl=True, root_certificates=str(pem)
        ) as client:
            assert client.is_model_ready("simple")


def test_clients_show_a_certificate_of_the_ca(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    pem, key = certificate
    root = write_repository(tmp_path / "models")
    with served(root, certificate=pem, key=key, client_ca=pem) as ports:
        client_files = {"certfile": str(pem), "keyfile": str(key)}
        for files, is_taken in ((client_files, True), ({}, False)):
            options = {"ssl": True, "ssl_options": {"ca_certs": str(pem), **files}}
            with triton_http.InferenceServerClient(
                f"127.0.0.1:{ports.http}", insecure=True, **options
            ) as client:
                if is_taken:
                    assert client.is_model_ready("simple")
                else:
                    with pytest.raises((OSError, HTTPConnectionClosed)):
                        client.is_model_ready("simple")
            with triton_grpc.InferenceServerClient(
                f"localhost:{ports.grpc}", ssl=True, root_certificates=str(pem),
                private_key=files.get("keyfile"), certificate_chain=files.get("certfile"),
            ) as client:  # fmt: skip
                if is_taken:
                    assert client.is_model_ready("simple")
                else:
                    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                        client.is_model_ready("simple")


def test_other_machines_are_answered_only_if_they_say_who_they_are(tmp_path: Path) -> None:
    check_reach(ServeOptions(repository=tmp_path))
    check_reach(ServeOptions(repository=tmp_path, host="::1"))
    check_reach(ServeOptions(repository=tmp_path, host="0.0.0.0", token_file=tmp_path))
    with pytest.raises(ConfigError, match=r"'0.0.0.0' can be reached by other machines"):
        check_reach(ServeOptions(repository=tmp_path, host="0.0.0.0"))


def test_connections_and_bytes_have_a_limit(tmp_path: Path) -> None:
    with served(write_repository(tmp_path), max_connections=2) as ports:
        address = ("127.0.0.1", ports.http)
        open_ones = [socket.create_connection(address, timeout=60) for _ in range(2)]
        for one in open_ones:
            one.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(4096).startswith(b"HTTP/1.1 200 OK")
        with socket.create_connection(address, timeout=60) as third:
            answer = third.recv(4096)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert "2 connections are open" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        for one in open_ones:
            one.close()
        channels = [
            grpc.insecure_channel(
                f"127.0.0.1:{ports.grpc}", options=(("grpc.use_local_subchannel_pool", 1),)
            )
            for _ in range(3)
        ]
        live = [one.unary_unary(f"/{SERVICE}/ServerLive") for one in channels]
        assert live[0](b"") == live[1](b"")
        with pytest.raises(grpc.RpcError) as refused:
            live[2](b"")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        for channel in channels:
            channel.close()


def test_a_fault_of_the_server_is_answered_and_the_connection_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(write_repository(tmp_path)) as ports:
        monkeypatch.delattr(Service, "server_metadata")
        connection = http.client.HTTPConnection("127.0.0.1", ports.http)
        connection.request("GET", "/v2")
        answer = connection.getresponse()
        assert (answer.status, "the server failed" in answer.read().decode()) == (500, True)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().status == 200
        connection.close()


def test_bytes_of_requests_that_are_answered_have_a_limit() -> None:
    service = Service(None, None, max_request_bytes=10, max_in_flight_bytes=15)  # type: ignore[arg-type]
    service.hold(10)
    with pytest.raises(Refusal, match="10 bytes are being answered, and this one has 6") as busy:
        service.hold(6)
    assert busy.value.status is Status.BUSY
    service.release(10)
    service.hold(6)


def test_a_large_message_is_refused_by_grpc(tmp_path: Path) -> None:
    with (
        served(write_repository(tmp_path), max_request_mb=1) as ports,
        triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client,
    ):
        one = triton_grpc.InferInput("INPUT0", [1, 2**18], "FP32")
        one.set_data_from_numpy(np.zeros((1, 2**18), np.float32))
        with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
            client.infer("identity_fp32", [one])


def test_trace_context_is_passed_on(tmp_path: Path) -> None:
    with (
        served(write_repository(tmp_path)) as ports,
        grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,
    ):
        request = message("ModelInferRequest")(model_name="identity_fp32")
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 2])
        request.raw_input_contents.append(bytes(8))
        ask = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        _, call = ask.with_call(request.SerializeToString(), metadata=(("traceparent", TRACE),))
        assert ("traceparent", TRACE) in [(key, value) for key, value in call.trailing_metadata()]


def test_spans_go_to_a_collector_below_those_of_the_client(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            unpacks = self.headers.get("Content-Encoding") == "gzip"
            bodies.append(gzip.decompress(body) if unpacks else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever).start()
        url = f"http://127.0.0.1:{collector.server_address[1]}"
        with (
            served(write_repository(tmp_path), otlp=url, name="triton") as ports,
            triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client,
        ):
            assert client.get_server_metadata()["name"] == "triton"
            client.infer("simple", pair(triton_http), headers={"traceparent": TRACE})
            with pytest.raises(InferenceServerException):
                client.infer("none", pair(triton_http))
        collector.shutdown()
    spans = [
        span
        for body in bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.attributes[0].value.string_value for span in spans] == ["simple", "none"]
    assert spans[0].trace_id.hex() == TRACE.split("-")[1]
    assert spans[0].parent_span_id.hex() == TRACE.split("-")[2]
    assert [span.status.code for span in spans] == [0, 2]  # unset, error
    with pytest.raises(ConfigError, match="'collector' is no collector"):
        Spans("collector")
