"""What was taken from the driver goes back, also where the driver fails half-way."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from device.engine.cuda_manifest import CompiledKernel, Cuda, Int32, Launch
from device.runtime.cuda import context, program
from device.runtime.cuda.context import Context
from device.runtime.cuda.driver import CudaError, Driver
from device.runtime.cuda.launcher import Launcher

MADE = {
    "cuDevicePrimaryCtxRetain": 0,
    "cuMemAlloc_v2": 0,
    "cuStreamCreate": 0,
    "cuModuleLoadData": 0,
    "cuStreamEndCapture": 1,
    "cuGraphInstantiateWithFlags": 0,
}  # the calls that hand out something, and which argument it is written to


RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, CUDA Driver API reference
UNSAFE = {"cuMemFree_v2", "cuModuleUnload"}  # refused in other modes while something is recorded


class FakeDriver:
    """Notes the calls; those in `broken` fail."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.broken: set[str] = set()
        self.functions = {"cuGraphLaunch": lambda *_: 0}
        self.starts_early = True
        self.early: list[tuple[object, ...]] = []

    def call(self, name: str, *arguments: object) -> None:
        self.names.append(name)
        if name == "cuStreamBeginCapture_v2" and arguments[1] != RELAXED:
            self.broken |= UNSAFE
        if name == "cuLaunchKernelEx":
            self.early.append(launched(arguments[0]._obj))  # type: ignore[attr-defined]
        if name in self.broken:
            raise CudaError(f"{name} failed")
        if name in MADE:
            handle = arguments[MADE[name]]._obj  # type: ignore[attr-defined]
            handle.value = len(self.names)


def launched(config: Any) -> tuple[object, ...]:
    """What a CUlaunchConfig says, read from its bytes: cuda.h gives the places."""
    words = (ctypes.c_uint * 7).from_address(ctypes.addressof(config))
    stream, attributes = (ctypes.c_uint64 * 2).from_address(ctypes.addressof(config) + 32)
    count = ctypes.c_uint.from_address(ctypes.addressof(config) + 48).value
    attribute = (ctypes.c_uint * 3).from_address(attributes)
    return (*words, stream, count, attribute[0], attribute[2])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(context, "load_driver", lambda: fake)
    return fake


def test_a_context_gives_back_the_newest_first_and_once(driver: FakeDriver) -> None:
    one = Context()
    one.allocate(16)
    one.stream()
    driver.names.clear()
    one.close()
    one.close()
    assert driver.names == [
        "cuCtxSetCurrent",
        "cuStreamDestroy_v2",
        "cuMemFree_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ]


@pytest.mark.parametrize("name", ["cuCtxSetCurrent", "cuStreamDestroy_v2", "cuMemFree_v2"])
def test_a_call_that_fails_does_not_keep_the_rest_from_going_back(
    driver: FakeDriver, name: str
) -> None:
    one, shared = Context(), []
    one.on_close(lambda: shared.append("given back"))
    one.allocate(16)
    one.stream()
    driver.broken = {name}
    with pytest.raises(CudaError, match=f"{name} failed"):
        one.close()
    assert shared == ["given back"]
    assert driver.names[-1] == "cuDevicePrimaryCtxRelease_v2"


def test_memory_is_filled_before_a_stream_of_its_own_uses_it(driver: FakeDriver) -> None:
    """The driver returns before it has filled, and a stream that blocks nobody does not wait."""
    one = Context()
    driver.names.clear()
    one.fill(one.allocate(16), 0, 16)
    assert driver.names[-2:] == ["cuMemsetD8_v2", "cuStreamSynchronize"]


def test_work_that_fails_ends_its_recording_and_leaves_no_graph(driver: FakeDriver) -> None:
    stream = Context().stream()

    def work() -> None:
        raise CudaError("the launch failed")

    for broken, last in ((set(), "cuGraphDestroy"), ({"cuStreamEndCapture"}, "cuStreamEndCapture")):
        driver.broken = broken
        with pytest.raises(CudaError, match="the launch failed"):
            stream.capture(work)
        assert driver.names[-1] == last


def test_a_graph_that_cannot_be_started_is_given_back(driver: FakeDriver) -> None:
    stream = Context().stream()
    driver.broken = {"cuGraphInstantiateWithFlags"}
    with pytest.raises(CudaError, match="cuGraphInstantiateWithFlags"):
        stream.capture(lambda: None)
    assert driver.names[-1] == "cuGraphDestroy"


def test_what_is_given_back_while_a_graph_is_recorded_does_not_spoil_it(
    driver: FakeDriver,
) -> None:
    """A session that nobody holds is collected at any line, of this thread too."""
    second, stream = Context(), Context().stream()
    second.allocate(16)
    second.load(np.zeros(8, np.uint8))
    stream.capture(second.close)
    assert driver.names.count("cuMemFree_v2") == driver.names.count("cuModuleUnload") == 1
    assert driver.names[-1] == "cuGraphDestroy"


@pytest.mark.parametrize(
    ("waits", "starts_early", "name"),
    [
        (True, True, "cuLaunchKernelEx"),
        (True, False, "cuLaunchKernel"),
        (False, True, "cuLaunchKernel"),
    ],
)
def test_a_kernel_starts_early_only_if_it_waits_and_the_driver_can(
    driver: FakeDriver, waits: bool, starts_early: bool, name: str
) -> None:
    driver.starts_early = starts_early
    stream = Context().stream()
    kernel = CompiledKernel(cubin="c", function="f", threads=96, shared_bytes=640, waits=waits)
    loaded = SimpleNamespace(function=lambda _: ctypes.c_void_p(7), weights=0)
    launcher = Launcher(cuda(kernel), loaded)  # type: ignore[arg-type]
    driver.names.clear()
    launches = [Launch(kernel=0, grid=("3*d0", 4, 5), arguments=(Int32(1),))]
    launcher.start(launches, [2], int, stream)
    assert driver.names == [name]
    # Attribute 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
    row = (6, 4, 5, 96, 1, 1, 640, stream.handle.value, 1, 6, 1)
    assert driver.early == ([row] if name == "cuLaunchKernelEx" else [])


class FakeLibrary:
    """libcuda of one version; it has every function but those named."""

    def __init__(self, version: int, *lacks: str) -> None:
        self.version = version
        self.lacks = lacks

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.lacks:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            if name == "cuDriverGetVersion":
                arguments[0]._obj.value = self.version
            return 0

        setattr(self, name, function)
        return function


@pytest.mark.parametrize(("version", "early"), [(11040, False), (12020, False), (12030, True)])
def test_graphs_start_kernels_early_since_cuda_12_3(version: int, early: bool) -> None:
    lacks = ("cuLaunchKernelEx",) if version < 11080 else ()
    result = Driver(FakeLibrary(version, *lacks))  # type: ignore[arg-type]
    assert result.starts_early is early
    assert ("cuLaunchKernelEx" in result.functions) is early


def test_a_driver_without_a_function_says_which() -> None:
    with pytest.raises(CudaError, match="lacks cuEventRecord; update"):
        Driver(FakeLibrary(12030, "cuEventRecord"))  # type: ignore[arg-type]


def test_segments_share_a_program_only_with_the_same_kernels(driver: FakeDriver) -> None:
    entry = np.zeros(8, np.uint8)
    engine = SimpleNamespace(identity=(1, 2), entry=lambda _: entry)
    kernels = [
        CompiledKernel(cubin="c", function=name, threads=32, shared_bytes=0)
        for name in ("first", "second")
    ]
    one, two, three = (
        program.acquire_program(engine, implementation)  # type: ignore[arg-type]
        for implementation in (cuda(kernels[0]), cuda(kernels[1]), cuda(kernels[0]))
    )
    assert one[1] is three[1]
    assert one[1] is not two[1]
    for key, _ in (one, two, three):
        program.release_program(key)
    assert driver.names.count("cuMemAlloc_v2") == driver.names.count("cuMemFree_v2") == 2


def cuda(*kernels: CompiledKernel) -> Cuda:
    return Cuda(
        sm=87,
        kernels=kernels,
        works=(),
        weights="w",
        workspace_bytes=0,
        inputs=(),
        outputs=(),
    )
