"""Compares `tandem serve` with kserve and MLServer: `python -m scripts.bench_serve`.

All serve an identity model of FP32, each in a process of its own, and are asked by tritonclient
from this one, in turns. The peers run in environments of their own:

    python -m venv kserve && kserve/bin/pip install kserve==0.21.0
    python -m venv mlserver && mlserver/bin/pip install mlserver==1.7.1     # Python below 3.13
    python -m scripts.bench_serve --kserve kserve/bin/python --mlserver mlserver/bin/python

Requests a second depend on the client and on the machine's load; CPU milliseconds of the server for
each request hardly do. Where h2load is installed (Debian's nghttp2-client), rows of several
connections say what a server answers at most: a Python client is busier than the server.
`--floor` adds two servers of grpcio without a model, which copy the bytes of a request into a
prepared answer: what grpcio itself costs, in asyncio and in threads.
`--batching` compares 64 clients with and without it, on an engine with a simulated time of 20 ms.
`--cuda ENGINE` serves an engine on a GPU to one gRPC client with CUDA shared memory (needs
cuda-python), and measures `tandem bench` on it before and after.
"""

import argparse
import contextlib
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2
from tritonclient.utils import triton_to_np_dtype

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
NAME, INPUT, OUTPUT = "identity", "INPUT0", "OUTPUT0"
LIBRARIES = {"HTTP": triton_http, "gRPC": triton_grpc}
SIZES = {"16 floats": 16, "1.2 MB": 3 * 320 * 320}
START_S = 300.0
CONNECTIONS = 8
BOARD_S = 0.02
FLOOR_RUNS = 300
FLOOR_PAUSE_S = 0.003

KSERVE = """
import sys
from kserve import InferOutput, InferResponse, Model, ModelServer

class Identity(Model):
    def __init__(self):
        super().__init__("identity")
        self.ready = True

    async def predict(self, request, headers=None, response_headers=None):
        array = request.inputs[0].as_numpy()
        output = InferOutput("OUTPUT0", list(array.shape), "FP32")
        output.set_data_from_numpy(array, binary_data=True)
        return InferResponse(request.id or "1", "identity", [output])

if __name__ == "__main__":
    http, grpc = map(int, sys.argv[1:])
    server = ModelServer(http_port=http, grpc_port=grpc, workers=1)
    server.start([Identity()])
"""

MLSERVER = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Identity(MLModel):
    async def predict(self, payload):
        array = NumpyCodec.decode_input(payload.inputs[0])
        output = NumpyCodec.encode_output("OUTPUT0", array)
        return InferenceResponse(model_name=self.name, outputs=[output])
"""

FLOOR = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from tritonclient.grpc import service_pb2

kind, port, *sizes = sys.argv[1:]
answers = {}
for size in map(int, sizes):
    answer = service_pb2.ModelInferResponse(model_name="identity", model_version="1")
    answer.outputs.add(name="OUTPUT0", datatype="FP32", shape=[size])
    answer.raw_output_contents.append(bytes(4 * size))
    answers[4 * size] = answer.SerializeToString()[: -4 * size]

def infer(data, context):
    size = max(size for size in answers if size < len(data))
    return b"".join((answers[size], memoryview(data)[-size:]))

def ready(data, context):
    return service_pb2.ModelReadyResponse(ready=True).SerializeToString()

async def infer_later(data, context):
    return infer(data, context)

async def ready_later(data, context):
    return ready(data, context)

OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

def start(server, infer, ready):
    handlers = {"ModelInfer": infer, "ModelReady": ready}
    handlers = {key: grpc.unary_unary_rpc_method_handler(one) for key, one in handlers.items()}
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    return server.start()

async def serve():
    server = grpc.aio.server(options=OPTIONS)
    await start(server, infer_later, ready_later)
    await server.wait_for_termination()

from pipelines.serving.server import _keep_memory, run
_keep_memory()
if kind == "aio":
    run(serve())
else:
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    start(server, infer, ready)
    server.wait_for_termination()
"""

SLOW = f"""
import time
from device.runtime.session import Session

infer = Session.infer

def slow(self, feeds, outputs=None):
    time.sleep({BOARD_S})
    return infer(self, feeds, outputs)

Session.infer = slow
from toolkit.cli.main import main
main()
"""


@dataclass(frozen=True)
class Figures:
    """What was measured of one server, protocol and size."""

    server: str
    protocol: str
    size: str
    requests_per_s: float
    p50_ms: float
    server_cpu_ms: float


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def write_model(folder: Path) -> Path:
    """Write the identity model as a repository."""
    shape = ["n"]
    graph = helper.make_graph(
        [helper.make_node("Identity", [INPUT], [OUTPUT])],
        NAME,
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    path = folder / NAME / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(model, path)
    ports = ((which, f"{which.upper()}0") for which in ("input", "output"))
    config = (
        f'{key} {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}' for key, name in ports
    )
    (folder / NAME / "config.pbtxt").write_text("\n".join(config))
    return folder


@dataclass(frozen=True)
class Peer:
    """A server: its command for ports of HTTP and gRPC."""

    name: str
    command: Callable[[Path, int, int], list[str]]
    protocols: Sequence[str] = tuple(LIBRARIES)


def _ours(folder: Path, http: int, grpc: int) -> list[str]:
    repository = folder / "repository"
    if not repository.exists():
        write_model(repository)
    ports = ("--http", str(http), "--grpc", str(grpc), "--metrics", "0")
    code = "from toolkit.cli.main import main; main()"
    return [sys.executable, "-c", code, "serve", str(repository), *ports]


def kserve(python: Path) -> Peer:
    """kserve in an environment of its own."""

    def command(folder: Path, http: int, grpc: int) -> list[str]:
        (folder / "kserve_identity.py").write_text(KSERVE)
        return [str(python), str(folder / "kserve_identity.py"), str(http), str(grpc)]

    return Peer("kserve", command)


def mlserver(python: Path) -> Peer:
    """MLServer in an environment of its own."""

    def command(folder: Path, http: int, grpc: int) -> list[str]:
        models = folder / "mlserver"
        models.mkdir(exist_ok=True)
        (models / "identity_runtime.py").write_text(MLSERVER)
        settings = {"name": NAME, "implementation": "identity_runtime.Identity"}
        (models / "model-settings.json").write_text(json.dumps(settings))
        ports = {"http_port": http, "grpc_port": grpc, "metrics_port": free_port()}
        server_settings = {**ports, "parallel_workers": 0, "host": "127.0.0.1"}
        (models / "settings.json").write_text(json.dumps(server_settings))
        return [str(python.parent / "mlserver"), "start", str(models)]

    return Peer("MLServer", command)


def grpcio(kind: str) -> Peer:
    """A server of grpcio that runs no model, in asyncio ("aio") or in threads."""

    def command(_: Path, _http: int, grpc: int) -> list[str]:
        sizes = map(str, SIZES.values())
        return [sys.executable, "-c", FLOOR, kind, str(grpc), *sizes]

    return Peer(f"grpcio {kind}", command, ("gRPC",))


@contextlib.contextmanager
def started(peer: Peer, folder: Path) -> Iterator[tuple[int, int, int]]:
    """Start a server; give its process and its ports of HTTP and gRPC."""
    http, grpc = free_port(), free_port()
    with (folder / f"{peer.name}.log").open("wb") as log:
        process = subprocess.Popen(
            peer.command(folder, http, grpc), stdout=log, stderr=log, cwd=ROOT
        )
    try:
        end_s = time.monotonic() + START_S
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            while not _is_ready(client):
                if process.poll() is not None or time.monotonic() > end_s:
                    text = (folder / f"{peer.name}.log").read_text()[-2000:]
                    raise SystemExit(f"{peer.name} did not start: {text}")
                time.sleep(0.1)
        yield process.pid, http, grpc
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(client: Any) -> bool:  # noqa: ANN401
    try:
        return bool(client.is_model_ready(NAME))
    except triton_grpc.InferenceServerException:
        return False


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that run."""
    total = 0.0
    for one in [pid, *_children(pid)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def _children(pid: int) -> list[int]:
    rows = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for text in tasks.read_text().split():
            rows += [int(text), *_children(int(text))]
    return rows


def measured(ask: Callable[[], object], pid: int, seconds: float) -> tuple[float, float, float]:
    """Return requests a second, the median in ms, and CPU ms of the server for each."""
    for _ in range(3):
        ask()
    times: list[float] = []
    cpu_before, begin = cpu_s(pid), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 5:
        start = time.perf_counter()
        ask()
        times.append(time.perf_counter() - start)
    spent_s, cpu = time.perf_counter() - begin, cpu_s(pid) - cpu_before
    return len(times) / spent_s, median(times) * 1e3, cpu / len(times) * 1e3


def _http_load(port: int, tensor: Any, folder: Path) -> list[str]:  # noqa: ANN401
    body, json_size = triton_http.InferenceServerClient.generate_request_body([tensor])
    (folder / "request.bin").write_bytes(body)
    return [
        "--h1", "-d", str(folder / "request.bin"),
        "-H", f"Inference-Header-Content-Length: {json_size}",
        "-H", "Content-Type: application/octet-stream",
        f"http://127.0.0.1:{port}/v2/models/{NAME}/infer",
    ]  # fmt: skip


def _grpc_load(port: int, tensor: Any, folder: Path) -> list[str]:  # noqa: ANN401
    request = service_pb2.ModelInferRequest(
        model_name=NAME,
        inputs=[tensor._get_tensor()],
        raw_input_contents=[tensor._get_content()],
    ).SerializeToString()
    (folder / "request.bin").write_bytes(b"\0" + len(request).to_bytes(4, "big") + request)
    return [
        "-d", str(folder / "request.bin"), "-H", "Content-Type: application/grpc",
        "-H", "TE: trailers",
        f"http://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer",
    ]  # fmt: skip


def saturated(load: Sequence[str], pid: int, seconds: float) -> tuple[float, float, float]:
    """Return what `measured` does, of `CONNECTIONS` connections that h2load keeps busy.

    The time is the mean one, not the median. SystemExit if a request fails.
    """
    cpu_before = cpu_s(pid)
    report = subprocess.run(
        ["h2load", "-c", str(CONNECTIONS), "-D", f"{max(1, round(seconds))}", *load],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    cpu = cpu_s(pid) - cpu_before
    rate = re.search(r"finished in .*, ([\d.]+) req/s", report)
    counts = re.search(r"(\d+) succeeded, (\d+) failed", report)
    if rate is None or counts is None or int(counts[1]) == 0 or int(counts[2]) > 0:
        raise SystemExit(f"h2load: {report}")
    per_s = float(rate[1])
    return per_s, CONNECTIONS / per_s * 1e3, cpu / int(counts[1]) * 1e3


def bench(peers: Sequence[Peer], folder: Path, seconds: float) -> list[Figures]:
    """Measure servers by HTTP binary and by gRPC, in turns; ours by shared memory too."""
    rows = []
    with contextlib.ExitStack() as stack:
        running = [(peer, *stack.enter_context(started(peer, folder))) for peer in peers]
        for protocol, size, (peer, pid, *ports) in product(LIBRARIES, SIZES, running):
            if protocol not in peer.protocols:
                continue
            library, name = LIBRARIES[protocol], peer.name
            port = ports[list(LIBRARIES).index(protocol)]
            with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
                data = np.arange(SIZES[size], dtype=np.float32)
                one = library.InferInput(INPUT, [len(data)], "FP32")
                one.set_data_from_numpy(data)

                def ask(client: Any = client, one: Any = one) -> Any:  # noqa: ANN401
                    return client.infer(NAME, [one])

                try:
                    answer = ask().as_numpy(OUTPUT)
                except library.InferenceServerException as error:
                    print(f"{name} {protocol} {size}: {str(error)[:120]}", file=sys.stderr)
                    continue
                if not np.array_equal(np.asarray(answer).reshape(-1), data):
                    raise SystemExit(f"{name} answers something else by {protocol}")
                rows.append(Figures(name, protocol, size, *measured(ask, pid, seconds)))
                if size == "16 floats" and shutil.which("h2load"):
                    load = _http_load if protocol == "HTTP" else _grpc_load
                    figures = saturated(load(port, one, folder), pid, seconds)
                    rows.append(Figures(name, f"{protocol}, {CONNECTIONS} at once", size, *figures))
        _, pid, port, _ = running[0]
        rows.append(_by_shared_memory(pid, port, seconds))
    return rows


def _by_shared_memory(pid: int, port: int, seconds: float) -> Figures:
    size = SIZES["1.2 MB"]
    key = f"/tandem_bench_{os.getpid()}"
    handle = shm.create_shared_memory_region("bench", key, 8 * size)
    try:
        shm.set_shared_memory_region(handle, [np.arange(size, dtype=np.float32)])
        with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.register_system_shared_memory("bench", key, 8 * size)
            one = triton_http.InferInput(INPUT, [size], "FP32")
            one.set_shared_memory("bench", 4 * size)
            out = triton_http.InferRequestedOutput(OUTPUT)
            out.set_shared_memory("bench", 4 * size, offset=4 * size)
            figures = measured(lambda: client.infer(NAME, [one], outputs=[out]), pid, seconds)
    finally:
        shm.destroy_shared_memory_region(handle)
    return Figures("Tandem", "shared memory", "1.2 MB", *figures)


def floors_cpu_ms(folder: Path) -> dict[str, float]:
    """Return the CPU ms of the model itself on 1.2 MB, and of the two copies that the kernel makes
    for a request in shared memory. A pause before each leaves caches as cold as a request does."""
    from pipelines.serving.onnx_file import OnnxFile

    model = OnnxFile(folder / "repository" / NAME / "1" / "model.onnx")
    data = np.arange(SIZES["1.2 MB"], dtype=np.float32)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(2 * data.nbytes))
        file.flush()

        def copy() -> None:
            os.pread(file.fileno(), data.nbytes, 0)
            os.pwrite(file.fileno(), data.data, data.nbytes)

        parts: dict[str, Callable[[], object]] = {
            "model": lambda: model.infer({INPUT: data}), "copies": copy,
        }  # fmt: skip
        spent_ns = dict.fromkeys(parts, 0)
        for _ in range(FLOOR_RUNS):
            for name, part in parts.items():
                time.sleep(FLOOR_PAUSE_S)
                begin_ns = time.thread_time_ns()
                part()
                spent_ns[name] += time.thread_time_ns() - begin_ns
    return {name: total / FLOOR_RUNS / 1e6 for name, total in spent_ns.items()}


def batching(folder: Path, clients: int, requests: int) -> dict[str, float]:
    """Return requests a second of many clients, without and with dynamic batching."""
    from device.engine.manifest import DimRange
    from toolkit.engine.build import BuildOptions, build_engine

    rates = {}
    for name, text in (("alone", ""), ("batched", "dynamic_batching { }")):
        repository = folder / name
        model = write_model(repository) / NAME / "1" / "model.onnx"
        graph = onnx.load(model)
        for value in (*graph.graph.input, *graph.graph.output):
            value.type.tensor_type.shape.dim.add().dim_value = 16
        onnx.save(graph, model)
        dims = (DimRange(name="n", min=1, opt=8, max=8),)
        options = BuildOptions(precision="fp32", dims=dims)
        build_engine(model, "laptop", model.with_name("model.engine"), options)
        (repository / NAME / "config.pbtxt").write_text(f"max_batch_size: 8 {text}")

        def command(_: Path, http: int, grpc: int, where: Path = repository) -> list[str]:
            ports = ("--http", str(http), "--grpc", str(grpc), "--metrics", "0")
            return [sys.executable, "-c", SLOW, "serve", str(where), *ports]

        with started(Peer(name, command), folder) as (_, _, grpc):
            rates[name] = _rate(grpc, clients, requests)
    return rates


def _rate(port: int, clients: int, requests: int) -> float:
    done = threading.Barrier(clients + 1)

    def ask() -> None:
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            one = triton_grpc.InferInput(INPUT, [1, 16], "FP32")
            one.set_data_from_numpy(np.zeros((1, 16), np.float32))
            client.infer(NAME, [one])
            done.wait()
            for _ in range(requests):
                client.infer(NAME, [one])

    with ThreadPoolExecutor(clients) as threads:
        futures = [threads.submit(ask) for _ in range(clients)]
        done.wait()
        begin = time.perf_counter()
        for future in futures:
            future.result()
        return clients * requests / (time.perf_counter() - begin)


def cuda_shared_memory(
    engine: Path, folder: Path, seconds: float, depth: int, instances: int
) -> dict[str, float]:
    """Return inferences a second of `tandem bench`, before and after, and of a gRPC client that has
    `depth` requests in flight, with inputs and outputs in CUDA shared memory."""
    model = folder / "repository" / NAME
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.engine").symlink_to(engine.absolute())
    (model / "config.pbtxt").write_text(f"instance_group {{ count: {instances} }}\n")
    rates = {"bench before": _engine_rate(engine)}
    with (
        started(Peer("Tandem", _ours), folder) as (_, _, port),
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
        _cuda_requests(client, depth) as requests,
    ):
        for ask in requests:  # captures the graph, and shows that answers come
            ask(None)
        rates["served"] = _rate_in_flight(requests, seconds)
    rates["bench after"] = _engine_rate(engine)
    return rates


def _engine_rate(engine: Path) -> float:
    code = "from toolkit.cli.main import main; main()"
    command = [sys.executable, "-c", code, "bench", str(engine), "--json"]
    report = subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout
    rate: float = json.loads(report)["measured"]["throughput_qps"]
    return rate


@contextlib.contextmanager
def _cuda_requests(client: Any, depth: int) -> Iterator[Sequence[Callable[[Any], object]]]:  # noqa: ANN401
    """Give functions that ask with a region of their own; with None they wait for the answer."""
    import tritonclient.utils.cuda_shared_memory as cuda_shm

    metadata = client.get_model_metadata(NAME, as_json=True)
    places, total = [], 0
    for row in (*metadata["inputs"], *metadata["outputs"]):
        shape = [int(size) for size in row["shape"]]
        size = int(np.prod(shape)) * triton_to_np_dtype(row["datatype"])().itemsize
        places.append((row["name"], shape, row["datatype"], size, total))
        total += -(-size // 256) * 256
    count = len(metadata["inputs"])
    with contextlib.ExitStack() as stack:
        requests = []
        for number in range(depth):
            region = f"region{number}"
            handle = cuda_shm.create_shared_memory_region(region, total, 0)
            stack.callback(cuda_shm.destroy_shared_memory_region, handle)
            raw_handle = cuda_shm.get_raw_handle(handle)
            client.register_cuda_shared_memory(region, raw_handle, 0, total)
            stack.callback(client.unregister_cuda_shared_memory, region)
            inputs, outputs = [], []
            for name, shape, datatype, size, at in places[:count]:
                inputs.append(triton_grpc.InferInput(name, shape, datatype))
                inputs[-1].set_shared_memory(region, size, offset=at)
            for name, _, _, size, at in places[count:]:
                outputs.append(triton_grpc.InferRequestedOutput(name))
                outputs[-1].set_shared_memory(region, size, offset=at)

            def ask(done: Any, given: Any = inputs, requested: Any = outputs) -> object:  # noqa: ANN401
                if done is None:
                    return client.infer(NAME, given, outputs=requested)
                return client.async_infer(NAME, given, done, outputs=requested)

            requests.append(ask)
        yield requests


def _rate_in_flight(requests: Sequence[Callable[[Any], object]], seconds: float) -> float:
    """Return answers a second with all requests in flight, each asked again when it is answered."""
    free: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
    for number in range(len(requests)):
        free.put((number, None))
    answered, begin = -len(requests), time.perf_counter()
    while True:
        number, error = free.get()
        if error is not None:
            raise SystemExit(f"the server refuses: {error}")
        answered += 1
        spent_s = time.perf_counter() - begin
        if spent_s > seconds:
            return answered / spent_s
        requests[number](lambda result, error, number=number: free.put((number, error)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compare servers of KServe v2.")
    parser.add_argument("--kserve", type=Path, help="Python with kserve")
    parser.add_argument("--mlserver", type=Path, help="Python with MLServer")
    parser.add_argument("--floor", action="store_true", help="add servers of grpcio alone")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each measurement")
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--cuda", type=Path, metavar="ENGINE", help="by CUDA shared memory alone")
    parser.add_argument("--depth", type=int, default=4, help="requests in flight, with --cuda")
    parser.add_argument("--instances", type=int, default=1, help="of the model, with --cuda")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10, help="of each client, with --batching")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    peers = [Peer("Tandem", _ours)]
    peers += [grpcio("aio"), grpcio("threads")] if options.floor else []
    peers += [kserve(options.kserve)] if options.kserve else []
    peers += [mlserver(options.mlserver)] if options.mlserver else []
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as name:
        folder = Path(name)
        if options.cuda is not None:
            print(json.dumps(cuda_shared_memory(
                options.cuda, folder, options.seconds, options.depth, options.instances
            )))  # fmt: skip
            return 0
        if options.batching:
            rates = batching(folder, options.clients, options.requests)
            print(json.dumps(rates) if options.json else _batching_text(rates))
            return 0
        rows = bench(peers, folder, options.seconds)
        floors = floors_cpu_ms(folder)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "floors_cpu_ms": floors}))
        return 0
    print(
        f"{'server':14} {'protocol':16} {'size':10} {'requests/s':>10} {'p50 ms':>8} {'CPU ms':>8}"
    )
    for row in rows:
        print(
            f"{row.server:14} {row.protocol:16} {row.size:10} {row.requests_per_s:10.1f}"
            f" {row.p50_ms:8.2f} {row.server_cpu_ms:8.2f}"
        )
    print(
        f"CPU ms on 1.2 MB: the model itself {floors['model']:.2f}, the copies of shared memory"
        f" {floors['copies']:.2f}"
    )
    return 0


def _batching_text(rates: dict[str, float]) -> str:
    alone, batched = rates["alone"], rates["batched"]
    return f"alone {alone:.0f}/s, batched {batched:.0f}/s: {batched / alone:.1f} times"


if __name__ == "__main__":
    sys.exit(main())
