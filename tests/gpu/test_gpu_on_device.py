"""Arrays of PyTorch, CuPy and pycuda through one session on a GPU, on the caller's stream."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_graphs import Case, convolution, node

from device.errors import SessionError
from device.runtime.cuda import driver
from device.runtime.executors import cuda
from device.runtime.session import Session, open_session
from scripts.gpu_engine import build_on_gpu
from tandem import DeviceArray
from toolkit.gpu.codegen.triton_version import has_compiler

pytestmark = pytest.mark.gpu
BUILT = os.environ.get("TANDEM_ON_DEVICE_ENGINE")  # built elsewhere, for a GPU without a compiler
SHAPE = (2, 64, 30, 30)
LIBRARIES = ("torch", "cupy", "pycuda")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    if BUILT is not None:
        return Path(BUILT)
    if not has_compiler():
        pytest.skip("Triton is not installed")
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "kernels"))
        return build(folder)


def build(folder: Path) -> Path:
    """Write m.engine for an H200; it needs no GPU."""
    rng = np.random.default_rng(3)
    one: Case = convolution(rng, SHAPE, 128, (3, 3), node("Relu", "c", "y"))
    onnx.save(one.model(), folder / "m.onnx")
    build_on_gpu(folder / "m.onnx", folder / "m.engine", profile="h200", precision="fp16")
    return folder / "m.engine"


@pytest.fixture
def session(engine: Path) -> Iterator[Session]:
    with open_session(engine) as opened:
        assert [report.implementation for report in opened.reports] == ["cuda"]
        yield opened


def library(name: str) -> Any:
    if name == "pycuda":
        pytest.importorskip("pycuda.driver")
        import_module("pycuda.autoprimaryctx")
        return import_module("pycuda.gpuarray")
    return pytest.importorskip(name)


def on_gpu(name: str, values: np.ndarray) -> Any:
    module = library(name)
    if name == "torch":
        return module.from_numpy(values).cuda()
    return module.to_gpu(values) if name == "pycuda" else module.asarray(values)


def back(name: str, result: DeviceArray) -> np.ndarray:
    """Read a result with the library itself, without a copy on the GPU."""
    module = library(name)
    if name == "pycuda":
        array = module.GPUArray(result.shape, result.dtype, gpudata=int(result), base=result)
        assert int(array.gpudata) == result.address
        return array.get()
    array = module.from_dlpack(result)
    address = array.data_ptr() if name == "torch" else array.data.ptr
    assert address == result.address
    return array.cpu().numpy() if name == "torch" else module.asnumpy(array)


def new_stream(name: str) -> Any:
    if name == "torch":
        return library(name).cuda.Stream()
    if name == "cupy":
        return library(name).cuda.Stream(non_blocking=True)
    library(name)
    return import_module("pycuda.driver").Stream()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of the driver that copy to or from the host."""
    counts: dict[str, int] = {}
    functions = driver.load_driver().functions

    def count(name: str, function: Any) -> Any:
        def call(*arguments: object) -> int:
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments)

        return call

    for name in [name for name in functions if "HtoD" in name or "DtoH" in name]:
        monkeypatch.setitem(functions, name, count(name, functions[name]))
    return counts


@pytest.mark.parametrize("name", LIBRARIES)
def test_arrays_of_a_library_give_the_bits_of_infer_without_a_copy(
    name: str, session: Session, copies: dict[str, int], rng: np.random.Generator
) -> None:
    x, second = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    expected = [session.infer({"x": values})["y"] for values in (x, second)]
    arrays = [on_gpu(name, values) for values in (x, second)]
    session.infer_on_device({"x": arrays[0]})
    copies.clear()
    results = [session.infer_on_device({"x": array})["y"] for array in arrays]
    assert copies == {}
    for result, truth in zip(results, expected, strict=True):
        assert np.array_equal(back(name, result), truth)
    target = on_gpu(name, np.zeros_like(expected[0]))
    result = session.infer_on_device({"x": arrays[0]}, {"y": target})["y"]
    target_values = target.cpu().numpy() if name == "torch" else target.get()
    assert np.array_equal(target_values, expected[0])
    assert np.array_equal(result.numpy(), expected[0])


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_stream_of_the_caller_is_kept(
    name: str, session: Session, rng: np.random.Generator
) -> None:
    """The input is written on the stream just before; nobody waits until the end."""
    values = [rng.normal(size=SHAPE).astype(np.float32) for _ in range(20)]
    expected = [session.infer({"x": one})["y"] for one in values]
    sources = [on_gpu(name, one) for one in values]
    x, y = on_gpu(name, values[0]), [on_gpu(name, np.zeros_like(expected[0])) for _ in values]
    stream = new_stream(name)
    for source, target in zip(sources, y, strict=True):
        if name == "torch":
            with library(name).cuda.stream(stream):
                x.copy_(source)
        elif name == "cupy":
            with stream:
                x[...] = source
        else:
            transfer = import_module("pycuda.driver").memcpy_dtod_async
            transfer(x.gpudata, source.gpudata, source.nbytes, stream)
        session.infer_on_device({"x": x}, {"y": target}, stream=stream)
    stream.synchronize()
    for target, truth in zip(y, expected, strict=True):
        target_values = target.cpu().numpy() if name == "torch" else target.get()
        assert np.array_equal(target_values, truth)


def test_torch_reads_a_result_on_its_own_stream(session: Session, rng: np.random.Generator) -> None:
    torch = library("torch")
    x = rng.normal(size=SHAPE).astype(np.float32)
    expected = session.infer({"x": x})["y"]
    stream = torch.cuda.Stream()
    for _ in range(20):
        result = session.infer_on_device({"x": on_gpu("torch", x)}, stream=stream)["y"]
        doubled = torch.from_dlpack(result) * 2  # on torch's stream, which waits for the other
        del result
        assert np.array_equal(doubled.cpu().numpy(), expected * 2)


def test_addresses_of_mem_alloc_run_as_in_scripts_for_tensorrt(
    session: Session, rng: np.random.Generator
) -> None:
    library("pycuda")
    pycuda = import_module("pycuda.driver")
    x = rng.normal(size=SHAPE).astype(np.float32)
    expected = session.infer({"x": x})["y"]
    stream = pycuda.Stream()
    host = pycuda.pagelocked_empty(expected.shape, np.float32)
    d_x, d_y = pycuda.mem_alloc(x.nbytes), pycuda.mem_alloc(expected.nbytes)
    pycuda.memcpy_htod_async(d_x, x, stream)
    session.infer_on_device(
        {"x": DeviceArray(d_x, x.shape, x.dtype)},
        {"y": DeviceArray(d_y, expected.shape, expected.dtype)},
        stream=stream,
    )
    pycuda.memcpy_dtoh_async(host, d_y, stream)
    stream.synchronize()
    assert np.array_equal(host, expected)
    small = DeviceArray(pycuda.mem_alloc(1024), x.shape, x.dtype)
    with pytest.raises(SessionError, match=r"takes \d+ bytes, the memory at 0x[0-9a-f]+ has"):
        session.infer_on_device({"x": small})


def test_misuse_is_named(session: Session, rng: np.random.Generator) -> None:
    torch = library("torch")
    x = torch.zeros(SHAPE, device="cuda")
    for value, message in (
        (x.half(), "input 'x' has dtype float16, the engine takes float32"),
        (x.bfloat16(), "input 'x' is of bfloat16"),
        (x[:, :32].contiguous(), "input 'x' has the size 32 in dimension 1"),
        (x.permute(0, 1, 3, 2), "make it contiguous"),
        (x.cpu(), "input 'x' is on the CPU"),
        (x.cpu().numpy(), "is in the CPU's memory"),
        (torch.zeros(SHAPE, device="cuda", requires_grad=True), "cannot be shared by DLPack"),
        (DeviceArray(x.cpu().data_ptr(), SHAPE, "f4"), "is not in the GPU's memory"),
    ):
        with pytest.raises(SessionError, match=message):
            session.infer_on_device({"x": value})
    assert session.infer_on_device({"x": x})["y"].numpy().shape == (2, 128, 28, 28)


def test_pycudas_own_context_is_refused_by_name(session: Session) -> None:
    library("pycuda")
    pycuda = import_module("pycuda.driver")
    session.infer_on_device({"x": on_gpu("pycuda", np.zeros(SHAPE, np.float32))})
    context = pycuda.Device(0).make_context()
    try:
        memory = pycuda.mem_alloc(4 * int(np.prod(SHAPE)))
        with pytest.raises(SessionError, match=r"is not the primary one.*autoprimaryctx"):
            session.infer_on_device({"x": DeviceArray(memory, SHAPE, "f4")})
        memory.free()
    finally:
        context.pop()
        context.detach()


def test_a_plugins_kernel_is_tried_with_pycuda(tmp_path: Path) -> None:
    library("pycuda")
    example = Path(__file__).parents[2] / "examples" / "pycuda" / "try_kernel.py"
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "largest error" in done.stdout
