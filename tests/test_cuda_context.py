"""What was taken from the driver goes back, also where the driver fails half-way."""

from types import SimpleNamespace

import numpy as np
import pytest

from device.cuda import context, program
from device.cuda.context import Context
from device.cuda.driver import CudaError
from device.cuda_manifest import Cuda, Kernel

MADE = {
    "cuDevicePrimaryCtxRetain": 0,
    "cuMemAlloc_v2": 0,
    "cuStreamCreate": 0,
    "cuModuleLoadData": 0,
    "cuStreamEndCapture": 1,
    "cuGraphInstantiateWithFlags": 0,
}  # the calls that hand out something, and which argument it is written to


class FakeDriver:
    """Notes the calls; those in `broken` fail."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.broken: set[str] = set()
        self.functions = {"cuGraphLaunch": lambda *_: 0}

    def call(self, name: str, *arguments: object) -> None:
        self.names.append(name)
        if name in self.broken:
            raise CudaError(f"{name} failed")
        if name in MADE:
            made = arguments[MADE[name]]._obj  # type: ignore[attr-defined]
            made.value = len(self.names)


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


def test_segments_share_a_program_only_with_the_same_kernels(driver: FakeDriver) -> None:
    entry = np.zeros(8, np.uint8)
    engine = SimpleNamespace(identity=(1, 2), entry=lambda _: entry)
    kernels = [
        Kernel(cubin="c", function=name, threads=32, shared_bytes=0) for name in ("first", "second")
    ]
    one, two, three = (
        program.borrow_program(engine, implementation)  # type: ignore[arg-type]
        for implementation in (cuda(kernels[0]), cuda(kernels[1]), cuda(kernels[0]))
    )
    assert one[1] is three[1]
    assert one[1] is not two[1]
    for key, _ in (one, two, three):
        program.give_back_program(key)
    assert driver.names.count("cuMemAlloc_v2") == driver.names.count("cuMemFree_v2") == 2


def cuda(*kernels: Kernel) -> Cuda:
    return Cuda(
        sm=87,
        kernels=kernels,
        works=(),
        weights="w",
        workspace_bytes=0,
        inputs=(),
        outputs=(),
    )
