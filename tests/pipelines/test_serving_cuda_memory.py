"""CUDA shared memory of stock clients, with tests/fixtures/cuda_double.py for the driver.

The double has the memory of clients in this process. `python -m scripts.bench_serve --cuda ENGINE`
has a client of its own process on a GPU.
"""

import asyncio
import base64
import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_double
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from engine_fixtures import single_network, write_network
from model_fixtures import small_convnet
from onnx import TensorProto
from serving_fixtures import identity, served
from tritonclient.utils import InferenceServerException

from device.runtime.cuda.driver import CudaError
from device.session import open_session
from pipelines.serving.cuda_memory import CudaRegion
from pipelines.serving.protocol import Parameters, Refusal, Status
from pipelines.serving.server import Ports
from pipelines.serving.shared_memory import Regions
from toolkit.engine.build import BuildOptions, build_engine

SHAPE = [1, 3, 8, 8]
REGION = 4096  # bytes: the input at 0, the output at 2048
OUTPUT_AT = 2048


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`gpu` as a whole on the GPU, `host` and `identity` on the CPU."""
    root = tmp_path_factory.mktemp("repository")
    model = small_convnet(root / "m", np.random.default_rng(5), size=SHAPE[-1])
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16")
        build_engine(model, "orin-nano-8gb", root / "gpu.engine", options)
    options = BuildOptions(precision="fp16", kernels=False)
    build_engine(model, "orin-nano-8gb", root / "host.engine", options)
    identity(root, "identity", TensorProto.FLOAT, ["batch", "n"])
    return root


@pytest.fixture(scope="module")
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double
        gc.collect()


@pytest.fixture(scope="module")
def ports(root: Path, gpu: cuda_double.CudaDouble) -> Iterator[Ports]:
    with served(root) as ports:
        assert ports.models == ("gpu", "host", "identity")
        yield ports


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, ports: Ports) -> Iterator[Any]:
    library = {"http": triton_http, "grpc": triton_grpc}[request.param]
    port = getattr(ports, request.param)
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.library = library
        yield client
        client.unregister_cuda_shared_memory()


@pytest.fixture
def memory(gpu: cuda_double.CudaDouble) -> int:
    return gpu.take(REGION)


def raw_handle(gpu: cuda_double.CudaDouble, address: int) -> bytes:
    return base64.b64encode(gpu.export(address))


def wait_for_imports(gpu: cuda_double.CudaDouble, addresses: list[int]) -> None:
    """Wait until the memory of these regions alone is open: threads may still end a request."""
    end_s = time.monotonic() + 60
    while gpu.imported != addresses:
        assert time.monotonic() < end_s, gpu.imported
        gc.collect()
        time.sleep(0.01)


def put(address: int, values: np.ndarray) -> None:
    ctypes.memmove(address, np.ascontiguousarray(values).ctypes.data, values.nbytes)


def floats(address: int, count: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, 4 * count), np.float32)


def ask(
    client: Any, model: str, shape: list[int], names: tuple[str, str], size: int,
    at: tuple[int, int] = (0, OUTPUT_AT), room: int = REGION - OUTPUT_AT,
) -> Any:  # fmt: skip
    given = client.library.InferInput(names[0], shape, "FP32")
    given.set_shared_memory("region", size, offset=at[0])
    requested = client.library.InferRequestedOutput(names[1])
    requested.set_shared_memory("region", room, offset=at[1])
    return client.infer(model, [given], outputs=[requested])


@pytest.mark.parametrize(
    ("model", "at", "copies"),
    [
        ("gpu", (0, OUTPUT_AT), False),
        ("gpu", (4, OUTPUT_AT), True),  # not where cuMemAlloc would have it
        ("gpu", (0, OUTPUT_AT - 4), True),
        ("gpu", (0, 0), True),  # over the input
        ("host", (0, OUTPUT_AT), True),
    ],
)
def test_answers_are_those_of_infer_and_stay_on_the_gpu(
    client: Any, root: Path, gpu: cuda_double.CudaDouble, memory: int, rng: np.random.Generator,
    model: str, at: tuple[int, int], copies: bool,
) -> None:  # fmt: skip
    x = rng.normal(size=SHAPE).astype(np.float32)
    with open_session(root / f"{model}.engine") as session:
        y = session.infer({"x": x})["y"]
    put(memory + at[0], x)
    client.register_cuda_shared_memory("region", raw_handle(gpu, memory), 0, REGION)
    ask(client, model, SHAPE, ("x", "y"), x.nbytes, at)  # captures its graph
    put(memory + at[0], x)
    gpu.calls.clear()
    answer = ask(client, model, SHAPE, ("x", "y"), x.nbytes, at)
    assert any("HtoD" in call or "DtoH" in call for call in gpu.calls) == copies
    assert np.array_equal(floats(memory + at[1], y.size), y.ravel())
    output = answer.get_output("y")
    parameters = output["parameters"] if isinstance(output, dict) else output.parameters
    assert set(parameters) == {
        "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
    } - ({"shared_memory_offset"} if at[1] == 0 else set())  # fmt: skip


def test_a_model_on_the_cpu_takes_what_is_on_the_gpu(
    client: Any, gpu: cuda_double.CudaDouble, memory: int
) -> None:
    x = np.arange(5, dtype=np.float32)
    put(memory, x)
    client.register_cuda_shared_memory("region", raw_handle(gpu, memory), 0, REGION)
    ask(client, "identity", [1, 5], ("INPUT0", "OUTPUT0"), 20)
    assert np.array_equal(floats(memory + OUTPUT_AT, 5), x)


def test_regions_are_listed_and_closed(
    client: Any, gpu: cuda_double.CudaDouble, memory: int
) -> None:
    as_json = {} if client.library is triton_http else {"as_json": True}

    def status(name: str = "") -> Any:
        rows = client.get_cuda_shared_memory_status(name, **as_json)
        return list(rows.get("regions", {}).values()) if isinstance(rows, dict) else rows

    client.register_cuda_shared_memory("region", raw_handle(gpu, memory), 0, REGION)
    assert [(row["name"], int(row["byte_size"])) for row in status()] == [("region", REGION)]
    assert len(status("region")) == 1
    wait_for_imports(gpu, [memory])
    client.unregister_system_shared_memory()  # of the other kind
    assert status()
    client.unregister_cuda_shared_memory("region")
    assert status() == []
    assert gpu.imported == []
    with pytest.raises(InferenceServerException, match="find cuda shared memory region: 'region'"):
        status("region")


def test_what_cannot_be_opened_is_refused(
    client: Any, gpu: cuda_double.CudaDouble, memory: int
) -> None:
    good = raw_handle(gpu, memory)
    for handle, device, size, sentence in (
        (good, 1, REGION, "is on GPU 1; this server uses GPU 0 alone"),
        (good[:8], 0, REGION, "has a raw_handle of 6 bytes; those of CUDA have 64"),
        (base64.b64encode(bytes(64)), 0, REGION, "cannot be opened: .*another process"),
        (good, 0, REGION + 1, "has a byte_size of 4097; the memory has 4096 bytes"),
    ):
        with pytest.raises(InferenceServerException, match=sentence):
            client.register_cuda_shared_memory("region", handle, device, size)
    wait_for_imports(gpu, [])
    client.register_cuda_shared_memory("region", good, 0, REGION - 1024)
    with pytest.raises(InferenceServerException, match="is registered already"):
        client.register_cuda_shared_memory("region", good, 0, REGION)
    for at, room, sentence in (
        ((2560, OUTPUT_AT), 16, "offset 2560 and 768 bytes end at 3328; .* has 3072 bytes"),
        ((0, OUTPUT_AT), 1025, "offset 2048 and 1025 bytes end at 3073; .* has 3072 bytes"),
        ((0, OUTPUT_AT), 3, r"output 'y' has \d+ bytes; 3 were given"),
    ):
        with pytest.raises(InferenceServerException, match=sentence):
            ask(client, "gpu", SHAPE, ("x", "y"), 768, at, room)
    with pytest.raises(InferenceServerException, match=r"has 764 bytes; FP32 of the shape .* 768"):
        ask(client, "gpu", SHAPE, ("x", "y"), 764)


def test_a_region_is_not_unregistered_while_a_request_uses_it(
    gpu: cuda_double.CudaDouble, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client of this request has gone: nothing but the queued arrays tells that it still runs.
    handle, regions = gpu.export(memory), Regions("")

    async def run() -> None:
        await regions.register_cuda("region", handle, 0, REGION)
        region = regions.find("region")
        assert isinstance(region, CudaRegion)
        queued = region.array(0, (4,), np.dtype(np.uint8))
        del region
        with monkeypatch.context() as hurried:
            hurried.setattr("pipelines.serving.shared_memory.CLOSE_S", 0.01)
            for name in ("region", ""):
                with pytest.raises(Refusal, match="'region' is still used by a request") as refusal:
                    await regions.unregister_cuda(name)
                assert refusal.value.status is Status.UNAVAILABLE
        with pytest.raises(Refusal, match="is being closed"):
            await regions.register_cuda("region", handle, 0, REGION)
        assert gpu.imported == [memory]
        unregistered = asyncio.create_task(regions.unregister_cuda("region"))
        await asyncio.sleep(0)
        assert not unregistered.done()
        del queued
        await unregistered
        assert gpu.imported == []
        await regions.register_cuda("region", handle, 0, REGION)
        region = regions.find("region")
        assert isinstance(region, CudaRegion)
        queued = region.array(0, (4,), np.dtype(np.uint8))
        del region
        with pytest.raises(asyncio.TimeoutError):  # its client does not wait
            await asyncio.wait_for(regions.unregister_cuda("region"), 0.05)
        del queued
        await regions.register_cuda("region", handle, 0, REGION)
        await regions.unregister_cuda("")

    asyncio.run(run())
    assert gpu.imported == []


def test_an_input_is_not_read_beyond_a_region_that_was_registered_anew(
    gpu: cuda_double.CudaDouble, memory: int
) -> None:
    handle, regions = gpu.export(memory), Regions("")
    row: Parameters = {"shared_memory_region": "region", "shared_memory_byte_size": 4096}

    async def run() -> None:
        await regions.register_cuda("region", handle, 0, REGION)
        x = regions.input("x", "FP32", (1024,), row)
        await regions.unregister_cuda("region")
        await regions.register_cuda("region", handle, 0, 16)
        with pytest.raises(Refusal, match="registered anew, with 16 bytes: 4096 are needed"):
            await regions.read(x)
        await regions.unregister_cuda("region")

    asyncio.run(run())


def test_without_a_driver_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_driver() -> None:
        raise CudaError("there is no NVIDIA driver here")

    monkeypatch.setattr("pipelines.serving.cuda_memory.load_driver", load_driver)
    write_network(tmp_path / "one.engine", single_network(1))
    with (
        served(tmp_path) as ports,
        triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client,
        pytest.raises(InferenceServerException, match="there is no NVIDIA driver here"),
    ):
        client.register_cuda_shared_memory("region", base64.b64encode(bytes(64)), 0, REGION)
