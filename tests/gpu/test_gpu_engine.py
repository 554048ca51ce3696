"""Whole networks as GPU engines: built without a GPU anywhere, run where there is one."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gpu_graphs import Case, node

import configs
from device.runtime.executors import cuda
from device.runtime.session import Session, open_engine
from scripts.gpu_engine import build_on_gpu, relative_error
from toolkit.gpu.codegen.triton_version import has_compiler

DETECTOR = configs.ROOT / "models" / "robot-objects.onnx"
LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
NETWORKS = ("resnet18", "resnet50", "mobilenet_v2")

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache that the tests of one run share."""
    folder = tmp_path_factory.getbasetemp() / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def reference(model: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def feeds_for(model: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    return {one.name: rng.normal(size=one.shape).astype(np.float32) for one in session.get_inputs()}


def check(
    model: Path, folder: Path, precision: str, feeds: dict[str, np.ndarray], limit: float
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    path = folder / "m.engine"
    assert build_on_gpu(model, path, profile="h200", precision=precision).notes == ()
    with open_engine(path) as engine, Session(engine) as session:
        assert [one.implementation for one in session.reports] == ["cuda"]
        first = session.infer(feeds)
        again = session.infer(feeds)
    for output, truth in reference(model, feeds).items():
        assert relative_error(first[output], truth) < limit
        assert np.array_equal(first[output], again[output])  # nothing is left over from a run


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_on_the_gpu_what_onnxruntime_computes(
    name: str, precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    pytest.importorskip("torchvision", reason="the networks come from torchvision")
    from scripts.gpu_networks import export, make_network, pictures

    model = tmp_path / "m.onnx"
    export(make_network(name), 2, model)
    check(model, tmp_path, precision, {"x": pictures(2, 224, rng)}, LIMITS[precision])


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_shipped_detector_computes_the_same_on_the_gpu(
    precision: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    check(DETECTOR, tmp_path, precision, feeds_for(DETECTOR, rng), LIMITS[precision])


@pytest.mark.gpu
@needs_compiler
def test_quotients_are_rounded_once(tmp_path: Path, rng: np.random.Generator) -> None:
    """As IEEE 754 says: a number rounded after it, as dynamic quantization does, must not tip."""
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    left, right = rng.uniform(0.1, 10, (2, 8, 4096)).astype(np.float32)
    case = Case([node("Div", "a b", "y")], {"a": left.shape, "b": right.shape}, {})
    onnx.save(case.model(), tmp_path / "m.onnx")
    build_on_gpu(tmp_path / "m.onnx", tmp_path / "m.engine", profile="h200", precision="fp32")
    with open_engine(tmp_path / "m.engine") as engine, Session(engine) as session:
        actual = session.infer({"a": left, "b": right})["y"]
    assert np.array_equal(actual, left / right)
