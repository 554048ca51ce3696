"""Kernels on the CPU's memory, where the GPU has none of its own: nothing is copied."""

from collections.abc import Iterator
from pathlib import Path

import cuda_double
import msgspec
import numpy as np
import pytest
from model_fixtures import small_convnet

from device.engine.cuda_check import _apart
from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.runtime.cuda import driver
from device.runtime.session import Session
from toolkit.engine.build import BuildOptions, build_engine

pytest.importorskip("triton", reason="Triton is not installed")

SHAPE = (1, 3, 8, 8)
_COPIES = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    model = small_convnet(folder / "m.onnx", np.random.default_rng(5), size=SHAPE[-1])
    with cuda_double.interpreted_cubins():
        options = BuildOptions(precision="fp16")
        build_engine(model, "orin-nano-8gb", folder / "m.engine", options)
    return folder / "m.engine"


@pytest.fixture
def gpu() -> Iterator[cuda_double.CudaDouble]:
    with cuda_double.installed() as double:
        yield double


def kernels_of(engine: Path) -> Cuda:
    with open_engine(engine) as opened:
        (segment,) = opened.manifest.segments
        return next(item for item in segment.implementations if isinstance(item, Cuda))


def run(engine: Path, zero_copy: bool | None, x: np.ndarray) -> dict[str, np.ndarray]:
    with open_engine(engine) as opened, Session(opened, zero_copy=zero_copy) as session:
        assert [report.implementation for report in session.reports] == ["cuda"]
        feeds, outputs = session.arrays()
        (name,) = feeds
        feeds[name][...] = 7 * x  # of a run before, which is overwritten
        session.infer(feeds, outputs)
        feeds[name][...] = x
        mapped = session.infer(feeds, outputs)
        copied = session.infer({name: x})
        for output, values in copied.items():
            assert np.array_equal(values, mapped[output])
        return copied


def test_nothing_is_copied_and_results_stay(
    engine: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    x = rng.normal(size=SHAPE).astype(np.float32)
    copied = run(engine, False, x)
    assert {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"} <= set(gpu.calls)
    gpu.calls.clear()
    mapped = run(engine, None, x)  # the double's GPU shares its memory
    assert not set(_COPIES) & set(gpu.calls)
    for name, values in copied.items():
        assert np.array_equal(values, mapped[name])


def test_the_attribute_of_the_gpu_decides(
    engine: Path,
    gpu: cuda_double.CudaDouble,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    x = rng.normal(size=SHAPE).astype(np.float32)
    monkeypatch.setitem(cuda_double._ATTRIBUTES, driver.INTEGRATED, 0)
    run(engine, None, x)
    assert "cuMemHostGetDevicePointer_v2" not in gpu.calls
    run(engine, True, x)
    assert "cuMemHostGetDevicePointer_v2" in gpu.calls


def test_the_workspace_has_no_place_for_what_is_mapped(
    engine: Path, gpu: cuda_double.CudaDouble
) -> None:
    kernels = kernels_of(engine)
    sizes = []
    for zero_copy in (False, True):
        with open_engine(engine) as opened, Session(opened, zero_copy=zero_copy):
            sizes.append({len(block) for block in gpu.memory.values()})
    assert kernels.workspace_bytes in sizes[0]
    assert kernels.workspace_bytes not in sizes[1]
    assert kernels.borders_at in sizes[1]


def test_an_engine_without_the_place_copies(
    engine: Path, gpu: cuda_double.CudaDouble, rng: np.random.Generator
) -> None:
    kernels = msgspec.structs.replace(kernels_of(engine), borders_at=msgspec.UNSET)
    with open_engine(engine) as opened:
        (segment,) = opened.manifest.segments
        segment = msgspec.structs.replace(segment, implementations=(kernels,))
        opened.manifest = msgspec.structs.replace(opened.manifest, segments=(segment,))
        with Session(opened, zero_copy=True) as session:
            (tensor,) = session.inputs
            session.infer({tensor.name: rng.normal(size=SHAPE).astype(np.float32)})
    assert "cuMemcpyHtoDAsync_v2" in gpu.calls


@pytest.mark.parametrize("change", ["overlap", "inside"])
def test_a_manifest_whose_borders_are_not_apart_is_refused(engine: Path, change: str) -> None:
    kernels = kernels_of(engine)
    assert not list(_apart(kernels, "here"))
    (x,) = kernels.inputs
    offset = {"overlap": kernels.outputs[0].offset, "inside": 0}[change]
    moved = msgspec.structs.replace(x, offset=offset)
    (problem, *_) = _apart(msgspec.structs.replace(kernels, inputs=(moved,)), "here")
    assert "inputs and outputs lie apart" in problem
