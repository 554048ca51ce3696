"""What a server spends beside its models: memory and the thread of its event loop."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto
from serving_fixtures import identity, served

from pipelines.serving.grpc import KEPT_BYTES, _known_head, parse_request
from pipelines.serving.messages import message
from pipelines.serving.protocol import InferRequest, InferResponse, Refusal
from pipelines.serving.server import run
from pipelines.serving.service import Service

REQUESTS = 20_000
COUNT_GARBAGE = f"""
import asyncio, gc, sys, weakref
from pathlib import Path
from typing import BinaryIO
from pipelines.serving.server import ServeOptions, serve

class Cycle:
    def __init__(self):
        self.itself = self

gc.set_threshold(200_000, 10, 10)  # as the command line has it
alive = weakref.WeakSet()
stop = asyncio.Event()

def on_ready(ports):
    assert ports.models == ("one",)
    for _ in range({REQUESTS}):
        alive.add(Cycle())
    print(len(alive))
    stop.set()

options = ServeOptions(
    repository=Path(sys.argv[1]), http_port=0, grpc_port=None, metrics_port=None
)
asyncio.run(serve(options, stop, on_ready))
print(gc.get_threshold())
"""


def test_garbage_of_requests_is_collected_while_the_server_runs(tmp_path: Path) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["n"])
    command = [sys.executable, "-c", COUNT_GARBAGE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    alive, thresholds = run.stdout.splitlines()
    assert int(alive) < REQUESTS // 4
    assert thresholds == "(200000, 10, 10)"


@pytest.fixture(params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The event loop that a server gets, with uvloop installed or not."""
    name: str = request.param
    if name == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    return name


def test_a_server_runs_in_uvloop_where_it_is_installed(loop: str) -> None:
    names = []

    async def main() -> None:
        names.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    run(main())
    assert names == [loop]


@pytest.mark.parametrize(
    "code", ["raise ImportError('of another libc')", "__version__ = '0.17'"], ids=["broken", "old"]
)
def test_a_server_runs_in_asyncio_where_uvloop_does_not_fit(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text(code)
    monkeypatch.setitem(sys.modules, "uvloop", None)  # restored at the end, whatever is there then
    monkeypatch.delitem(sys.modules, "uvloop")
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    async def main() -> None:
        names.append(type(asyncio.get_running_loop()).__module__.partition(".")[0])

    run(main())
    assert names == ["asyncio"]


def test_answers_are_those_of_the_model_by_both_loops(loop: str, tmp_path: Path) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["batch", "n"])
    with served(tmp_path) as ports:
        for library, port in ((triton_http, ports.http), (triton_grpc, ports.grpc)):
            with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
                for size in (16, 16, 500_000, 500_000, 16, 0):
                    data = np.random.default_rng(size).random(size, np.float32)
                    one = library.InferInput("INPUT0", [1, size], "FP32")
                    one.set_data_from_numpy(data.reshape(1, size))
                    answer = client.infer("one", [one]).as_numpy("OUTPUT0")
                    assert answer.tobytes() == data.tobytes()


@pytest.mark.parametrize(("size", "alignment"), [(2, 16), (100_000, 64)])
def test_binary_tensors_lie_where_the_engine_takes_them_in_place(
    size: int, alignment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity(tmp_path, "one", TensorProto.DOUBLE, ["batch", "n"])
    addresses = []
    infer = Service.infer

    async def note(service: Service, request: InferRequest) -> InferResponse:
        addresses.append(request.inputs[0].data.ctypes.data)
        return await infer(service, request)

    monkeypatch.setattr(Service, "infer", note)
    with (
        served(tmp_path) as ports,
        triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client,
    ):
        one = triton_http.InferInput("INPUT0", [1, size], "FP64")
        one.set_data_from_numpy(np.zeros((1, size)))
        for length in range(1, 17):
            client.infer("one", [one], request_id="7" * length)
    assert len(addresses) == 16
    assert all(address % alignment == 0 for address in addresses)


def read_answer(answers: BinaryIO) -> bytes:
    assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
    size = 0
    while (line := answers.readline()) != b"\r\n":
        if line.startswith(b"Content-Length: "):
            size = int(line.split()[1])
    return answers.read(size)


def test_requests_that_come_together_are_answered_in_order(loop: str, tmp_path: Path) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["batch", "n"])
    sizes = [1, 200_000, 2, 3, 3, 100_000, 4] * 3  # the large ones fill the buffers of the socket
    requests = b""
    for size in sizes:
        row = {"name": "INPUT0", "shape": [1, size], "datatype": "FP32", "data": [0.5] * size}
        body = json.dumps({"inputs": [row]}).encode()
        requests += (
            b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    requests += b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with served(tmp_path) as ports:
        assert ports.http is not None
        with socket.create_connection(("127.0.0.1", ports.http), timeout=120) as one:
            sender = threading.Thread(target=one.sendall, args=(requests,))
            sender.start()
            with one.makefile("rb") as answers:
                shapes = [json.loads(read_answer(answers))["outputs"][0]["shape"] for _ in sizes]
                assert shapes == [[1, size] for size in sizes]
                assert json.loads(read_answer(answers)) == {"live": True}
                assert answers.read() == b""
            sender.join()


def test_requests_of_one_head_have_their_own_tensors_and_refusals() -> None:
    service: Any = None  # it is asked for shared memory alone
    head = {"model_name": "m", "id": "7"}
    for value in (1.0, 2.0):
        raw = np.full(4, value, np.float32).tobytes()
        one = message("ModelInferRequest")(**head, raw_input_contents=[raw])
        one.inputs.add(name="x", datatype="FP32", shape=[4])
        request = parse_request(one.SerializeToString(), service, "")
        assert (request.model, request.id, request.inputs[0].shape) == ("m", "7", (4,))
        assert (request.inputs[0].data == value).all()
    one.raw_input_contents[0] = raw[:12]
    with pytest.raises(Refusal, match="has 12 bytes"):
        parse_request(one.SerializeToString(), service, "")
    del one.raw_input_contents[:]
    with pytest.raises(Refusal, match="has no data"):
        parse_request(one.SerializeToString(), service, "")


def test_a_large_head_is_not_kept() -> None:
    service: Any = None
    one = message("ModelInferRequest")(model_name="m" * (KEPT_BYTES + 1))
    known = _known_head.cache_info().currsize
    assert parse_request(one.SerializeToString(), service, "").model == one.model_name
    assert _known_head.cache_info().currsize == known
