"""The conformance suite finds what is wrong, the fuzzer ends well, the bench measures."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet
from serving_fixtures import served, write_repository

from scripts import bench_cpu_peers, bench_serve, fuzz_serve, serve_conformance
from scripts.serve_conformance import CHECKS, EXTENSIONS, Server, run


@pytest.mark.parametrize("model", ["simple", "simple_string", "picture", "identity_fp32"])
def test_tandem_passes_every_check(tmp_path: Path, model: str) -> None:
    with served(write_repository(tmp_path)) as ports:
        rows = run(Server(f"http://127.0.0.1:{ports.http}", model), CHECKS + EXTENSIONS)
        assert [row for row in rows if row[1]] == []


@pytest.fixture
def lax_server() -> Iterator[str]:
    """A server that answers everything with 200 and {}."""

    class Lax(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Lax)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_server_that_answers_anything_fails(
    lax_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_conformance.main([lax_server, "--model", "simple", "--extensions"]) == 1
    text = capsys.readouterr().out
    assert "ok   model ready" in text
    assert "FAIL unknown model: status 200 and not (400, 404)" in text


def test_a_short_fuzz_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz_serve.main(["--seconds", "1", "--seed", "7"]) == 0, capsys.readouterr().out


def test_the_bench_measures_each_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serve.main(["--seconds", "0.1", "--floor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["protocol"], row["size"]) for row in rows if row["server"] == "Tandem"] == [
        ("HTTP", "16 floats"),
        ("HTTP, 8 at once", "16 floats"),
        ("HTTP", "1.2 MB"),
        ("gRPC", "16 floats"),
        ("gRPC, 8 at once", "16 floats"),
        ("gRPC", "1.2 MB"),
        ("shared memory", "1.2 MB"),
    ]
    for server in ("grpcio aio", "grpcio threads"):
        sizes = {row["size"] for row in rows if row["server"] == server}
        assert sizes == {"16 floats", "1.2 MB"}
    assert all(row["requests_per_s"] > 0 for row in rows)


def test_runtimes_of_this_cpu_give_the_same_and_a_missing_one_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_convnet(tmp_path / "net.onnx", np.random.default_rng())
    words = [str(tmp_path / "net.onnx"), "--seconds", "0.05", "--tvm", sys.executable, "--json"]
    assert bench_cpu_peers.main(words) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 6
    for row in rows:
        if row["runtime"] == "tvm":
            assert "tvm" in row["problem"]
        else:
            assert row["cpu_ms"] > 0
            assert row["apart"] < 1e-5


def test_requests_in_flight_are_asked_again_and_a_refusal_ends_the_bench() -> None:
    counts = [0, 0]

    def ask(number: int, done: Callable[[object, object], None]) -> None:
        counts[number] += 1
        done("answer", "no such region" if counts[0] == 100 and number == 0 else None)

    requests = [partial(ask, number) for number in (0, 1)]
    with pytest.raises(SystemExit, match="the server refuses: no such region"):
        bench_serve._rate_in_flight(requests, seconds=3600)
    assert counts == [100, 100]
