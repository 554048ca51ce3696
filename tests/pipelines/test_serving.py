"""The server's answers are those of stock clients' expectations and of `session.infer`."""

import asyncio
import http.client
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import tritonclient.utils.shared_memory as shm
from engine_fixtures import picture
from onnx import TensorProto
from serving_fixtures import identity, rows, served, write_repository
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from device.runtime.session import Session
from device.session import open_session
from pipelines.serving.messages import METHODS, message
from pipelines.serving.server import Ports

CLIENTS = {"http": triton_http, "grpc": triton_grpc}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def ports(root: Path) -> Iterator[Ports]:
    with served(root) as ports:
        yield ports


@pytest.fixture(params=list(CLIENTS))
def client(request: pytest.FixtureRequest, ports: Ports) -> Iterator[Any]:
    library = CLIENTS[request.param]
    port = getattr(ports, request.param)
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.library = library
        yield client


def tensor(library: Any, name: str, data: np.ndarray, kind: str, **options: Any) -> Any:
    one = library.InferInput(name, list(data.shape), kind)
    one.set_data_from_numpy(data, **options)
    return one


def pair(library: Any, first: np.ndarray, second: np.ndarray, kind: str = "INT32") -> list[Any]:
    return [tensor(library, f"INPUT{i}", one, kind) for i, one in enumerate((first, second))]


def body(port: int, path: str, data: bytes | None = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    method = "GET" if data is None else "POST"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, names)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content else None


def infer_body(**changes: Any) -> bytes:
    inputs = [
        {"name": f"INPUT{i}", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
        for i in (0, 1)
    ]
    return json.dumps({"inputs": inputs, **changes}).encode()


def test_messages_have_the_numbers_and_types_of_the_stock_client() -> None:
    seen = set()

    def compare(ours: Any, theirs: Any) -> None:
        if (ours.full_name, theirs.full_name) in seen:
            return
        seen.add((ours.full_name, theirs.full_name))
        their_fields = {field.number: field for field in theirs.fields}
        for field in ours.fields:
            second = their_fields[field.number]
            assert (field.name, field.type) in {(second.name, second.type), ("live", second.type)}
            assert field.is_repeated == second.is_repeated
            if field.message_type is not None:
                compare(field.message_type, second.message_type)

    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, (request, answer) in METHODS.items():
        compare(message(request).DESCRIPTOR, methods[name].input_type)
        compare(message(answer).DESCRIPTOR, methods[name].output_type)
    compare(message("ModelInferRequest").DESCRIPTOR, methods["ModelInfer"].input_type)
    assert set(methods) - set(METHODS) == {"ModelInfer", "ModelStreamInfer"}


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.is_model_ready("simple", "1")
    assert not client.is_model_ready("simple", "2")
    options = {"as_json": True} if client.library is triton_grpc else {}
    assert client.get_server_metadata(**options)["name"] == "tandem"
    metadata = client.get_model_metadata("simple", **options)
    assert [int(size) for size in metadata["inputs"][0]["shape"]] == [-1, 16]
    config = client.get_model_config("simple", **options)
    config = config.get("config", config)
    assert (config["max_batch_size"], config["input"][0]["data_type"]) == (8, "TYPE_INT32")
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'none' is not"):
        client.get_model_metadata("none")


def test_an_inference_adds_and_subtracts(client: Any) -> None:
    first, second = rows(2), rows(2, 5)
    requested = [client.library.InferRequestedOutput(name) for name in ("OUTPUT1", "OUTPUT0")]
    answer = client.infer(
        "simple", pair(client.library, first, second), outputs=requested, request_id="7"
    )
    assert np.array_equal(answer.as_numpy("OUTPUT0"), first + second)
    assert np.array_equal(answer.as_numpy("OUTPUT1"), first - second)
    response = answer.get_response()
    assert (response["id"] if isinstance(response, dict) else response.id) == "7"


def test_answers_are_bit_for_bit_those_of_the_session(client: Any, root: Path) -> None:
    frame = picture(3)
    with open_session(root / "picture.engine") as session:
        expected = session.infer({"x": frame})["y"]
    answer = client.infer("picture", [tensor(client.library, "x", frame, "FP32")])
    assert np.array_equal(answer.as_numpy("y"), expected)


@pytest.mark.parametrize("binary", [True, False])
def test_texts_and_json(ports: Ports, binary: bool) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        texts = rows(1).astype(str).astype(object)
        inputs = [
            tensor(triton_http, f"INPUT{i}", texts, "BYTES", binary_data=binary) for i in (0, 1)
        ]
        requested = [triton_http.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        answer = client.infer("simple_string", inputs, outputs=requested)
        sums = [int(one) for one in answer.as_numpy("OUTPUT0").reshape(-1)]
        assert sums == list(range(0, 32, 2))


def test_texts_over_grpc(ports: Ports) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        texts = np.array([["", "ä", "\0"] + ["x" * 300] * 13], object)
        answer = client.infer("simple_identity", [tensor(triton_grpc, "INPUT0", texts, "BYTES")])
        assert [one.decode() for one in answer.as_numpy("OUTPUT0")[0]] == list(texts[0])


def test_typed_contents(ports: Ports) -> None:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        request = service_pb2.ModelInferRequest(model_name="simple")
        for number in (0, 1):
            one = request.inputs.add(name=f"INPUT{number}", datatype="INT32", shape=[1, 16])
            one.contents.int_contents.extend(range(16))
        answer = client._client_stub.ModelInfer(request)
        assert list(np.frombuffer(answer.raw_output_contents[0], np.int32)) == list(range(0, 32, 2))
        request.raw_input_contents.append(bytes(64))
        with pytest.raises(Exception, match="raw_input_contents: give one of them"):
            client._client_stub.ModelInfer(request)


def test_a_stream_answers_in_order_and_goes_on_after_a_refusal(ports: Ports) -> None:
    answers: list[Any] = []
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for number in range(20):
            name = "simple" if number != 7 else "none"
            one = pair(triton_grpc, rows(1, number), rows(1))
            client.async_stream_infer(name, one, request_id=str(number))
        client.stop_stream()
    assert isinstance(answers.pop(7), InferenceServerException)
    assert [one.get_response().id for one in answers] == [str(n) for n in range(20) if n != 7]


@pytest.mark.parametrize("library", [triton_http_aio, triton_grpc_aio])
def test_clients_of_asyncio(ports: Ports, library: Any) -> None:
    async def run() -> list[np.ndarray]:
        port = ports.http if library is triton_http_aio else ports.grpc
        async with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            inputs = [pair(library, rows(1, n), rows(1)) for n in range(30)]
            answers = await asyncio.gather(*(client.infer("simple", one) for one in inputs))
            return [one.as_numpy("OUTPUT0") for one in answers]

    sums = asyncio.run(run())
    assert all(np.array_equal(one, rows(1, n) + rows(1)) for n, one in enumerate(sums))


def test_a_body_without_binary_and_one_of_the_raw_tensor_alone(ports: Ports) -> None:
    status, answer = body(ports.http, "/v2/models/simple/infer", infer_body(id="a"))
    assert (status, answer["id"]) == (200, "a")
    assert answer["outputs"][0]["data"] == list(range(0, 32, 2))
    data = np.arange(5, dtype=np.float32).tobytes()
    path = "/v2/models/identity_fp32/infer"
    connection = http.client.HTTPConnection("127.0.0.1", ports.http)
    connection.request("POST", path, data, {"Inference-Header-Content-Length": "0"})
    answer = connection.getresponse()
    content = answer.read()
    assert content[int(answer.headers["Inference-Header-Content-Length"]) :] == data
    # The same in chunks, on the same connection.
    headers = {"Inference-Header-Content-Length": "0", "Transfer-Encoding": "chunked"}
    connection.request("POST", path, iter([data[:7], data[7:]]), headers, encode_chunked=True)
    assert connection.getresponse().read().endswith(data)
    connection.close()


def test_a_length_beside_chunks_does_not_count_and_ends_the_connection(ports: Ports) -> None:
    data = np.arange(2, dtype=np.float32).tobytes()
    connection = http.client.HTTPConnection("127.0.0.1", ports.http)
    headers = {"Inference-Header-Content-Length": "0", "Transfer-Encoding": "chunked"}
    content = b"8\r\n%b\r\n0\r\n\r\n" % data
    smuggled = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    length = {"Content-Length": str(len(content + smuggled))}
    path = "/v2/models/identity_fp32/infer"
    connection.request("POST", path, content + smuggled, {**headers, **length})
    stream = connection.sock.makefile("rb")
    answer = stream.read()  # to the end of the connection
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(data)
    assert b"Connection: close" in answer
    connection.close()


@pytest.mark.parametrize(
    ("kind", "shape", "data", "sentence"),
    [
        (TensorProto.FLOAT, ["batch", "n", "m"], b"\0" * 16, "more than one variable-sized"),
        (TensorProto.STRING, ["batch", "n"], b"text", "must have input shape [1]"),
    ],
)
def test_a_raw_body_whose_shape_is_not_known_is_refused(
    tmp_path: Path, kind: int, shape: list[int | str], data: bytes, sentence: str
) -> None:
    identity(tmp_path, "same", kind, shape)
    with served(tmp_path) as ports:
        code, answer = body(
            ports.http, "/v2/models/same/infer", data, Inference_Header_Content_Length="0"
        )
    assert (code, sentence in answer["error"]) == (400, True), answer


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(ports: Ports, algorithm: str) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        answer = client.infer(
            "simple",
            pair(triton_http, rows(1), rows(1)),
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert np.array_equal(answer.as_numpy("OUTPUT0"), 2 * rows(1))


def nested(depth: int) -> list[Any]:
    values: list[Any] = list(range(16))
    for _ in range(depth - 1):
        values = [values]
    return values


ROW = {"name": "INPUT0", "shape": [1, 16], "datatype": "INT32", "data": list(range(16))}
OTHER = {**ROW, "name": "INPUT1"}


@pytest.mark.parametrize(
    ("request_body", "status", "sentence"),
    [
        (b"{", 400, "failed to parse the request JSON"),
        (b"[" * 5000, 400, "failed to parse"),
        (b'{"inputs": 3}', 400, "inputs"),
        (infer_body(inputs=[ROW]), 400, "but missing required input(s) ['INPUT1']"),
        (infer_body(inputs=[ROW, ROW, OTHER]), 400, "'INPUT0' of model 'simple' is given more"),
        (infer_body(inputs=[{**ROW, "name": "X"}, OTHER]), 400, "unexpected inference input 'X'"),
        (infer_body(inputs=[{**ROW, "datatype": "FP99"}, OTHER]), 400, "FP99"),
        (infer_body(inputs=[{**ROW, "datatype": "INT64"}, OTHER]), 400, "takes INT32"),
        (infer_body(inputs=[{**ROW, "shape": [1, -16]}, OTHER]), 400, "must be 0 or more"),
        (infer_body(inputs=[{**ROW, "shape": [1, 15]}, OTHER]), 400, "has 16 elements; the shape"),
        (infer_body(inputs=[{**ROW, "shape": [16]}, OTHER]), 400, "1 dimensions and not 2"),
        (infer_body(inputs=[{**ROW, "shape": [0, 16], "data": []}, OTHER]), 400, "got 0"),
        (infer_body(inputs=[{**ROW, "data": [2**31] * 16}, OTHER]), 400, "INT32 takes -2147483648"),
        (infer_body(inputs=[{**ROW, "data": [1.5] * 16}, OTHER]), 400, "Expected `int`"),
        (infer_body(inputs=[{**ROW, "data": [[1], 2]}, OTHER]), 400, "lists beside values"),
        (infer_body(inputs=[{**ROW, "data": nested(101)}, OTHER]), 400, "allowed limit (100)"),
        (
            infer_body(inputs=[{**ROW, "parameters": {"binary_data_size": 64}}, OTHER]),
            400,
            "both `data` and `binary_data_size`",
        ),
        (infer_body(outputs=[{"name": "Y"}]), 400, "unexpected inference output 'Y'"),
        (infer_body(outputs=[{"name": "OUTPUT0"}] * 2), 400, "already exists in request"),
        (infer_body(parameters={"priority": -1}), 400, "'priority'"),
    ],
)
def test_refusals_are_sentences(
    ports: Ports, request_body: bytes, status: int, sentence: str
) -> None:
    code, answer = body(ports.http, "/v2/models/simple/infer", request_body)
    assert (code, sentence in answer["error"]) == (status, True), answer


def test_refusals_of_paths_sizes_and_headers(ports: Ports, root: Path) -> None:
    port = ports.http
    assert body(port, "/v2/models/none/infer", b"{}")[0] == 400  # the body comes first
    assert body(port, "/v2/models/none/infer", infer_body())[0] == 404
    assert body(port, "/v2/models/simple/versions/9/infer", infer_body())[0] == 404
    assert body(port, "/v3")[0] == 404
    assert body(port, "/v2", b"")[0] == 405
    long = {"Inference_Header_Content_Length": "99999"}
    assert body(port, "/v2/models/simple/infer", infer_body(), **long)[0] == 400
    negative = {"Inference_Header_Content_Length": "-1"}
    assert body(port, "/v2/models/simple/infer", infer_body(), **negative)[0] == 400
    assert body(port, "/v2", Host="evil.example")[0] == 421
    assert body(port, "/v2", X="y" * 40000)[0] == 431
    deep = b'{"ready": %b}' % (b"[" * 250_000 + b"]" * 250_000)
    for request in (b'{"ready": [true]}', b'{"ready": null}', deep):
        code, answer = body(port, "/v2/repository/index", request)
        assert (code, "'ready': expected a boolean" in answer["error"]) == (400, True)
    assert body(port, "/v2/repository/index", b"{")[0] == 400
    assert body(port, "/v2/repository/index", b'{"other": {}}')[0] == 200
    with served(root, max_request_mb=1) as small:
        code, answer = body(small.http, "/v2/models/simple/infer", b" " * (2**20 + 1))
        limit = "JSON size of 1048577 bytes exceeds the maximum allowed input size of 1048576"
        assert (code, limit in answer["error"]) == (413, True)


def test_classification(ports: Ports) -> None:
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        data = np.array([[0.5, 4.0, 2.0]], np.float32)
        requested = [triton_http.InferRequestedOutput("OUTPUT0", class_count=2)]
        answer = client.infer(
            "identity_fp32", [tensor(triton_http, "INPUT0", data, "FP32")], outputs=requested
        )
        assert [one.decode() for one in answer.as_numpy("OUTPUT0")[0]] == [
            "4.000000:1",
            "2.000000:2",
        ]


@pytest.mark.parametrize("library", [triton_http, triton_grpc])
def test_objects_of_requests_are_used_again_with_and_without_shared_memory(
    ports: Ports, library: Any
) -> None:
    port = ports.http if library is triton_http else ports.grpc
    handle = shm.create_shared_memory_region("texts", "/tandem_test_texts", 4096)
    data = [np.array([[str(n + low).encode() for n in range(16)]], object) for low in (0, 100)]
    packed = serialize_byte_tensor(data[1])
    size = len(packed.item())
    try:
        with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
            shm.set_shared_memory_region(handle, [packed])
            client.register_system_shared_memory("texts", "/tandem_test_texts", 4096)
            inputs = pair(library, data[0], data[0], "BYTES")
            output = library.InferRequestedOutput("OUTPUT0")
            for _ in range(2):
                answer = client.infer("simple_string", inputs, outputs=[output])
                assert answer.as_numpy("OUTPUT0")[0, 1] == b"2"
                for one in inputs:
                    one.set_shared_memory("texts", size)
                output.set_shared_memory("texts", 2048, offset=2048)
                client.infer("simple_string", inputs, outputs=[output])
                texts = shm.get_contents_as_numpy(handle, np.object_, [1, 16], offset=2048)
                assert texts[0, 1] == b"202"
                for one in inputs:
                    one.set_data_from_numpy(data[0])
                output.unset_shared_memory()
            client.unregister_system_shared_memory()
            assert len(client.get_system_shared_memory_status(**(
                {} if library is triton_http else {"as_json": True}
            ))) == 0  # fmt: skip
    finally:
        shm.destroy_shared_memory_region(handle)


def test_requests_that_are_not_waited_for(ports: Ports) -> None:
    url = f"127.0.0.1:{ports.http}"
    with triton_http.InferenceServerClient(url, concurrency=4) as client:
        waiting = [client.async_infer("simple", pair(triton_http, rows(1, n), rows(1)))
                   for n in range(8)]  # fmt: skip
        for number, one in enumerate(waiting):
            sums = one.get_result().as_numpy("OUTPUT0")
            assert np.array_equal(sums, rows(1, number) + rows(1))
    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        for name in ("simple", "none"):
            client.async_infer(
                name, pair(triton_grpc, rows(1), rows(1)),
                callback=lambda result, error: answers.put(error or result),
            )  # fmt: skip
        both = [answers.get(timeout=60) for _ in range(2)]
        both.sort(key=lambda one: type(one).__name__)
    assert np.array_equal(both[0].as_numpy("OUTPUT0"), 2 * rows(1))
    assert isinstance(both[1], InferenceServerException)


def test_options_of_grpc_clients(ports: Ports) -> None:
    keep_alive = triton_grpc.KeepAliveOptions(
        keepalive_time_ms=100, keepalive_timeout_ms=5000, keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )  # fmt: skip
    limits = [("grpc.max_receive_message_length", 1 << 20)]
    for options in ({"keepalive_options": keep_alive}, {"channel_args": limits}):
        url = f"127.0.0.1:{ports.grpc}"
        with triton_grpc.InferenceServerClient(url, **options) as client:  # type: ignore[arg-type]
            inputs = pair(triton_grpc, rows(1), rows(1))
            for algorithm in (None, "gzip", "deflate"):
                answer = client.infer(
                    "simple", inputs, compression_algorithm=algorithm, client_timeout=60,
                    headers={"any": "header"}, parameters={"own": 1},
                )  # fmt: skip
                assert np.array_equal(answer.as_numpy("OUTPUT1"), rows(1) - rows(1))


def test_clients_wait_no_longer_than_they_say(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, infer = threading.Event(), Session.infer

    def held(self: Session, feeds: Any, outputs: Any = None) -> Any:
        go_on.wait()
        return infer(self, feeds, outputs)

    monkeypatch.setattr(Session, "infer", held)
    try:
        with (
            triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client,
            triton_http.InferenceServerClient(
                f"127.0.0.1:{ports.http}", network_timeout=0.1
            ) as impatient,
        ):
            with pytest.raises(InferenceServerException) as late:
                client.infer("simple", pair(triton_grpc, rows(1), rows(1)), client_timeout=0.1)
            assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            with pytest.raises(TimeoutError):
                impatient.infer("simple", pair(triton_http, rows(1), rows(1)))
    finally:
        go_on.set()


def test_a_stream_of_the_asyncio_client(ports: Ports) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(5):
            inputs = pair(triton_grpc_aio, rows(1, number), rows(1))
            yield {"model_name": "simple", "inputs": inputs, "request_id": str(number)}

    async def run() -> list[str]:
        async with triton_grpc_aio.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
            return [
                result.get_response().id
                async for result, error in client.stream_infer(requests())
                if error is None
            ]

    assert asyncio.run(run()) == ["0", "1", "2", "3", "4"]
