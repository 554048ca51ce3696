"""Inference on arrays in the GPU's memory: what is taken, what is refused, and what is copied.

tests/fixtures/cuda_double.py stands for the driver; tests/gpu/test_gpu_on_device.py has the
libraries' own arrays on a GPU.
"""

import ctypes
import difflib
import gc
import json
import re
import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import cuda_double
import numpy as np
import onnx
import pycuda_double
import pytest
from model_fixtures import small_convnet
from onnx import TensorProto, helper

from device.engine.manifest import DimRange
from device.errors import SessionError
from device.runtime.cuda.dlpack import read_capsule
from device.runtime.session import Session, open_session
from tandem import DeviceArray
from toolkit.engine.build import BuildOptions, build_engine

SHAPE = (1, 3, 8, 8)
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double
        gc.collect()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network on the GPU, and one that runs on the host's arrays alone."""
    folder, rng = tmp_path_factory.mktemp("engines"), np.random.default_rng(5)
    model = small_convnet(folder / "m.onnx", rng, size=SHAPE[-1])
    with cuda_double.interpreted_cubins():
        for name, kernels in (("gpu", True), ("host", False)):
            options = BuildOptions(precision="fp16", kernels=kernels)
            build_engine(model, "orin-nano-8gb", folder / f"{name}.engine", options)
    return folder


@pytest.fixture
def session(engines: Path, gpu: cuda_double.CudaDouble) -> Iterator[Session]:
    with open_session(engines / "gpu.engine") as opened:
        assert [report.implementation for report in opened.reports] == ["cuda"]
        yield opened


class Foreign:
    """An array of another library: `changes` are made to its `__cuda_array_interface__`."""

    def __init__(self, gpu: cuda_double.CudaDouble, values: np.ndarray, **changes: object) -> None:
        self.address = gpu.take(values.nbytes)
        ctypes.memmove(self.address, np.ascontiguousarray(values).ctypes.data, values.nbytes)
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "data": (self.address, False),
            "strides": None, "stream": None, "version": 3, **changes,
        }  # fmt: skip


class WithDlpack:
    """An array of another library, by DLPack; `asked` are the streams of its consumers."""

    def __init__(self, gpu: cuda_double.CudaDouble, values: np.ndarray, device=(2, 0)) -> None:
        address = gpu.take(values.nbytes)
        memory = (ctypes.c_ubyte * values.nbytes).from_address(address)
        self.values = np.frombuffer(memory, values.dtype).reshape(values.shape)
        self.values[...] = values
        self.device = device
        self.streams: list[int] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int) -> object:
        self.streams.append(stream)
        return self.values.__dlpack__()


def image(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=SHAPE).astype(np.float32)


def test_arrays_of_both_protocols_give_what_infer_gives(
    session: Session, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    x = image(rng)
    expected = session.infer({"x": x})["y"]
    session.infer_on_device({"x": Foreign(gpu, x)})  # captures its graph
    gpu.calls.clear()
    by_dlpack = WithDlpack(gpu, x)
    for given in (Foreign(gpu, x), by_dlpack, DeviceArray(Foreign(gpu, x).address, SHAPE, "f4")):
        result = session.infer_on_device({"x": given})["y"]
        assert not any("HtoD" in call or "DtoH" in call for call in gpu.calls)
        assert np.array_equal(result.numpy(), expected)
        gpu.calls.clear()
    (stream,) = by_dlpack.streams
    assert stream in gpu.streams
    assert "cuStreamBeginCapture_v2" not in gpu.calls  # other addresses need no other graph


def test_outputs_go_where_the_caller_wants_them(
    session: Session, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    x = image(rng)
    expected = session.infer({"x": x})["y"]
    target = Foreign(gpu, np.zeros_like(expected))
    result = session.infer_on_device({"x": Foreign(gpu, x)}, {"y": target})["y"]
    assert result.address == target.address
    assert np.array_equal(result.numpy(), expected)


def test_everything_is_enqueued_on_the_stream_of_the_caller(
    session: Session, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    first, second = image(rng), image(rng)
    expected = [session.infer({"x": x})["y"] for x in (first, second)]
    session.infer_on_device({"x": Foreign(gpu, first)})
    stream, another = ctypes.c_void_p(), ctypes.c_void_p()
    for handle in (stream, another):
        gpu.cuStreamCreate(ctypes.byref(handle), 1)
    results = []
    for x, handle in ((first, stream.value), (second, another.value)):
        # The stream still has to write the input when the session reads it.
        written = Foreign(gpu, np.zeros_like(x), stream=handle)
        late = x.copy()
        gpu.enqueue(
            handle, lambda at=written.address, v=late: ctypes.memmove(at, v.ctypes.data, v.nbytes)
        )
        results.append(session.infer_on_device({"x": written}, stream=handle)["y"])
        assert gpu.streams[handle]  # nobody waited
        assert results[-1].__cuda_array_interface__["stream"] == handle
    # The second inference waits for the first, which is on the other stream: one workspace.
    values = [result.numpy() for result in reversed(results)][::-1]
    assert all(np.array_equal(*pair) for pair in zip(values, expected, strict=True))
    # What the host asks for comes after what is in flight, too.
    session.infer_on_device({"x": Foreign(gpu, first)}, stream=stream.value)
    assert np.array_equal(session.infer({"x": second})["y"], expected[1])


def test_results_keep_the_stream_that_writes_them(
    session: Session, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    handle = ctypes.c_void_p()
    gpu.cuStreamCreate(ctypes.byref(handle), 1)
    x = image(rng)
    expected = session.infer({"x": x})["y"]
    for targets in ({}, {"y": Foreign(gpu, np.zeros_like(expected))}):
        stream = Named(handle=handle.value)
        alive = weakref.ref(stream)
        result = session.infer_on_device({"x": Foreign(gpu, x)}, targets, stream=stream)["y"]
        del stream
        gc.collect()
        assert alive() is not None  # pycuda and CuPy destroy a stream with its object
        assert np.array_equal(result.numpy(), expected)
        del result
        gc.collect()
        assert alive() is None


def test_an_inference_that_fails_keeps_no_array_of_the_caller(
    session: Session, gpu: cuda_double.CudaDouble, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    x = Foreign(gpu, image(rng))
    session.infer_on_device({"x": x})  # captures its graph

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the graph cannot be launched")

    alive = weakref.ref(x)
    with monkeypatch.context() as faulty:
        faulty.setattr(gpu, "_cuGraphLaunch", fail, raising=False)
        with pytest.raises(SessionError, match="cannot be launched"):
            session.infer_on_device({"x": x})
    del x
    gc.collect()
    assert alive() is None


def test_a_session_closes_its_segments_after_a_fault_on_the_gpu(
    engines: Path, gpu: cuda_double.CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(engines / "gpu.engine")
    session.infer_on_device({"x": Foreign(gpu, FLOAT)})
    (executor,) = session.executors

    def fail(*_arguments: object) -> None:
        raise RuntimeError("the GPU has a fault")

    with monkeypatch.context() as faulty:
        faulty.setattr(gpu, "_cuEventSynchronize", fail, raising=False)
        with pytest.raises(SessionError, match="the GPU has a fault"):
            session.close()
    with pytest.raises(SessionError, match="is closed"):
        executor.run({}, {}, {})


def test_new_sizes_wait_for_the_inference_that_is_in_flight(
    gpu: cuda_double.CudaDouble, tmp_path: Path
) -> None:
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", rows[:1], rows[1:])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    dims = (DimRange(name="n", min=1, opt=2, max=4),)
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16", dims=dims)
        build_engine(tmp_path / "m.onnx", "orin-nano-8gb", tmp_path / "m.engine", options)
    stream = ctypes.c_void_p()
    gpu.cuStreamCreate(ctypes.byref(stream), 1)
    with open_session(tmp_path / "m.engine") as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        arrays = {n: Foreign(gpu, np.full((n, 8), -1, np.float32)) for n in (2, 3)}
        results = []  # freeing one waits for the GPU
        for n, waits in ((2, True), (2, False), (3, True), (3, False)):
            gpu.calls.clear()
            results.append(session.infer_on_device({"x": arrays[n]}, stream=stream.value)["y"])
            assert ("cuEventSynchronize" in gpu.calls) == waits
            assert gpu.streams[stream.value]  # nobody waits for this one


def test_results_outlive_the_session_and_are_freed_with_the_last_reference(
    engines: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    x = image(rng)
    given = Foreign(gpu, x)
    with open_session(engines / "gpu.engine") as session:
        expected = session.infer({"x": x})["y"]
        result = session.infer_on_device({"x": given})["y"]
    capsule = result.__dlpack__()
    address = result.address
    assert np.array_equal(result.numpy(), expected)
    assert read_capsule(capsule).shape == result.shape
    del result
    gc.collect()
    assert address in gpu.memory  # the capsule keeps it
    del capsule
    gc.collect()
    assert address not in gpu.memory


def test_a_segment_without_kernels_has_its_arrays_copied(
    engines: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    x = image(rng)
    with open_session(engines / "host.engine") as session:
        result = session.infer_on_device({"x": Foreign(gpu, x)})["y"]
        assert np.array_equal(result.numpy(), session.infer({"x": x})["y"])


HALF = np.zeros(SHAPE, np.float16)
FLOAT = np.zeros(SHAPE, np.float32)
REFUSED = [
    (lambda gpu: FLOAT, r"input 'x' is a numpy array, which is in the CPU's memory"),
    (lambda gpu: [1.0], r"input 'x' is a list, which has neither __dlpack__ nor"),
    (lambda gpu: gpu.take(8), r"input 'x' is a int.*tandem\.DeviceArray\(address, shape, dtype\)"),
    (lambda gpu: Foreign(gpu, HALF), r"input 'x' has dtype float16, the engine takes float32"),
    (lambda gpu: Foreign(gpu, FLOAT[:, :2]), r"'x' has the size 2 in dimension 1.*takes 3"),
    (
        lambda gpu: Foreign(gpu, FLOAT, strides=(4, 4, 12, 96)),
        r"'x' of shape \(1, 3, 8, 8\) has the strides \(1, 1, 3, 24\).*make it contiguous",
    ),
    (
        lambda gpu: Foreign(gpu, FLOAT, data=(FLOAT.ctypes.data, False)),
        r"input 'x' at 0x[0-9a-f]+ is not in the GPU's memory",
    ),
    (lambda gpu: WithDlpack(gpu, FLOAT, (1, 0)), r"input 'x' is on the CPU; sessions run on GPU 0"),
    (lambda gpu: WithDlpack(gpu, FLOAT, (2, 1)), r"input 'x' is on GPU 1; sessions run on GPU 0"),
    (lambda gpu: DeviceArray(gpu.take(64), SHAPE, "f4"), r"takes 768 bytes, .* has 64; allocate"),
    (lambda gpu: Foreign(gpu, FLOAT, typestr=">f4"), r"input 'x' is of >f4; engines have"),
    (lambda gpu: Foreign(gpu, FLOAT, mask=FLOAT), r"input 'x' has a mask, which engines do not"),
    (lambda gpu: Foreign(gpu, np.zeros(SHAPE, "c8")), r"input 'x' is of complex64; engines have"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_an_input_that_does_not_fit_is_named(
    make: object, message: str, session: Session, gpu: cuda_double.CudaDouble
) -> None:
    with pytest.raises(SessionError, match=message):
        session.infer_on_device({"x": make(gpu)})


def test_an_output_that_cannot_be_written_is_named(
    session: Session, gpu: cuda_double.CudaDouble
) -> None:
    x = Foreign(gpu, FLOAT)
    shape = session.outputs[0].shape
    fits = np.zeros(shape, np.float32)
    read_only = Foreign(gpu, fits, data=(gpu.take(fits.nbytes), True))
    with pytest.raises(SessionError, match="the array for output 'y' is read-only"):
        session.infer_on_device({"x": x}, {"y": read_only})
    with pytest.raises(SessionError, match=r"output 'y' has the shape .*; give"):
        session.infer_on_device({"x": x}, {"y": Foreign(gpu, np.zeros((7, 7), np.float32))})
    with pytest.raises(SessionError, match="no output 'z'"):
        session.infer_on_device({"x": x}, {"z": x})
    inside = DeviceArray(x.address, shape, np.float32)
    with pytest.raises(SessionError, match=r"input 'x' and the array for output 'y' share memory"):
        session.infer_on_device({"x": x}, {"y": inside})


def test_another_context_than_the_primary_one_is_refused(
    session: Session, gpu: cuda_double.CudaDouble
) -> None:
    x = Foreign(gpu, FLOAT)
    gpu.current = 7
    with pytest.raises(SessionError, match=r"context 0x7 is not the primary.*autoprimaryctx"):
        session.infer_on_device({"x": x})
    gpu.current = 0
    session.infer_on_device({"x": x})
    assert gpu.current == 0  # a thread without a context has none afterwards
    gpu.owners[x.address] = 7
    with pytest.raises(SessionError, match=r"input 'x' was allocated in the CUDA context 0x7"):
        session.infer_on_device({"x": x})
    handle = ctypes.c_void_p()
    gpu.cuStreamCreate(ctypes.byref(handle), 1)
    gpu.owners[handle.value] = 7
    with pytest.raises(SessionError, match=r"the stream 0x[0-9a-f]+ belongs to the CUDA context"):
        session.infer_on_device({"x": Foreign(gpu, FLOAT)}, stream=handle.value)


class Named:
    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize("attribute", ["handle", "cuda_stream", "ptr"])
def test_streams_of_each_library_are_read(
    attribute: str, session: Session, gpu: cuda_double.CudaDouble
) -> None:
    handle = ctypes.c_void_p()
    gpu.cuStreamCreate(ctypes.byref(handle), 1)
    stream = Named(**{attribute: handle.value})
    result = session.infer_on_device({"x": Foreign(gpu, FLOAT)}, stream=stream)["y"]
    assert gpu.streams[handle.value]  # as long as the result is not freed, which waits
    assert result.stream == handle.value
    with pytest.raises(SessionError, match="the stream is a str; give a stream of pycuda"):
        session.infer_on_device({"x": Foreign(gpu, FLOAT)}, stream="one")


def test_without_a_gpu_the_session_says_so(engines: Path) -> None:
    with (
        open_session(engines / "host.engine") as session,
        pytest.raises(SessionError, match=r"cannot run on device arrays here: there is no NVIDIA"),
    ):
        session.infer_on_device({"x": FLOAT})


PYCUDA = Path(__file__).parents[2] / "examples" / "pycuda"


def test_the_tensorrt_script_becomes_tandems_in_ten_changed_lines() -> None:
    """Without the docstrings, as a reader would count: lines that are new in the second script."""
    before, after = (
        (PYCUDA / f"{name}_script.py").read_text().split('"""\n', 2)[-1].splitlines()
        for name in ("tensorrt", "tandem")
    )
    diff = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(diff) <= 10


def test_the_tensorrt_script_keeps_to_the_api() -> None:
    """It runs on no machine of ours; its names are those of TensorRT's Python API."""
    source = (PYCUDA / "tensorrt_script.py").read_text()
    owners = {"engine": "ICudaEngine", "context": "IExecutionContext", "trt": None}
    uses = re.findall(r"\b(engine|context|trt)\.(\w+)", source)
    assert len(uses) > 8
    for version in ("8.6.1", "10.3.0"):
        api = json.loads((DATA / "tensorrt_api" / f"{version}.json").read_text())
        for variable, name in uses:
            owner = owners[variable]
            known = api if owner is None else api[owner]["class"]
            assert name in known or name == "nptype", f"{variable}.{name} in {version}"


def test_the_script_runs_on_raw_addresses_and_a_stream_of_pycuda(
    engines: Path, gpu: cuda_double.CudaDouble, tmp_path: Path, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    x = image(rng)
    np.save(tmp_path / "x.npy", x)
    with open_session(engines / "gpu.engine") as session:
        expected = session.infer({"x": x})["y"]
    context = pycuda_double.install(monkeypatch)
    arguments = [engines / "gpu.engine", tmp_path / "x.npy", tmp_path / "y.npy"]
    monkeypatch.setattr(sys, "argv", ["tandem_script.py", *map(str, arguments)])
    runpy.run_path(str(PYCUDA / "tandem_script.py"), run_name="__main__")
    context.close()
    assert np.array_equal(np.load(tmp_path / "y.npy"), expected)
    assert f"largest at {expected.argmax()}" in capsys.readouterr().out
