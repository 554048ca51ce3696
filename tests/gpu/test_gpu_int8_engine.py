"""INT8 engines on an NVIDIA GPU: every tactic gives the bits of the integers in NumPy."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import int8_reference
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from int8_graphs import SMALL, Graph, inverted_residual, quantized, residual_block, small_detector

from device.runtime.executors import cuda
from device.runtime.session import Session, open_engine
from scripts.gpu_engine import build_on_gpu
from toolkit.gpu.codegen.triton_version import has_compiler

MAX_TACTICS = 4  # of an operation in these engines

Model = tuple[ir.Model, dict[str, np.ndarray]]


def convolution(
    x: tuple[int, ...], weights: tuple[int, ...], **attributes: object
) -> Callable[[np.random.Generator], Model]:
    """A convolution with bias and rectifier, and a second one that reads it."""

    def build(rng: np.random.Generator) -> Model:
        graph = Graph(rng, {"x": x})
        first = graph.product("Conv", graph.rounded("x"), weights, bias="int32", **attributes)
        rounded = graph.rounded(graph.add("Relu", first))
        last = graph.product("Conv", rounded, (16, weights[0], 1, 1), bias="int32")
        return ir.from_proto(graph.case(last).model()), {"x": sample(rng, x)}

    return build


def product(rng: np.random.Generator) -> Model:
    graph = Graph(rng, {"x": (200, 300)})
    y = graph.product("Gemm", graph.rounded("x"), (300, 130), axis=1, bias="int32")
    return ir.from_proto(graph.case(y).model()), {"x": sample(rng, (200, 300))}


def attention(rng: np.random.Generator) -> Model:
    graph = Graph(rng, {"q": (2, 3, 70, 64), "k": (2, 3, 64, 50)})
    y = graph.add("MatMul", graph.rounded("q"), graph.rounded("k"))
    feeds = {name: sample(rng, shape) for name, shape in graph.inputs.items()}
    return ir.from_proto(graph.case(y).model()), feeds


def resnet(rng: np.random.Generator) -> Model:
    case = residual_block(rng)
    feeds = case.feeds(rng)
    return quantized(ir.from_proto(case.model()), feeds), feeds


def mobilenet(rng: np.random.Generator) -> Model:
    case = inverted_residual(rng)
    feeds = case.feeds(rng)
    return quantized(ir.from_proto(case.model()), feeds), feeds


def detector(rng: np.random.Generator) -> Model:
    feeds = {"images": rng.random(SMALL, dtype=np.float32)}
    return quantized(small_detector(), feeds), feeds


def network(name: str) -> Callable[[np.random.Generator], Model]:
    """A network of torchvision with random weights, on a picture of 64x64."""

    def build(rng: np.random.Generator) -> Model:
        pytest.importorskip("torchvision", reason="the networks come from torchvision")
        from scripts.gpu_networks import export, make_network, pictures

        feeds = {"x": pictures(1, 64, rng)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.onnx"
            export(make_network(name), 1, path, 64)
            return quantized(ir.from_proto(onnx.load(path)), feeds), feeds

    return build


def sample(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


MODELS: dict[str, Callable[[np.random.Generator], Model]] = {
    "3x3": convolution((2, 64, 28, 30), (128, 64, 3, 3), pads=[1] * 4),
    "3x3 strided, few channels": convolution(
        (2, 3, 45, 44), (32, 3, 3, 3), strides=[2, 2], pads=[1] * 4
    ),
    "pointwise": convolution((4, 96, 14, 14), (200, 96, 1, 1)),
    "grouped": convolution((1, 64, 20, 20), (64, 16, 3, 3), group=4, pads=[1] * 4),
    "depthwise": convolution((2, 96, 30, 28), (96, 1, 3, 3), group=96, pads=[1] * 4),
    "product": product,
    "attention": attention,
    "ResNet blocks": resnet,
    "MobileNet block": mobilenet,
    "detector": detector,
    "ResNet-18": network("resnet18"),
    "ResNet-50": network("resnet50"),
    "MobileNetV2": network("mobilenet_v2"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
@pytest.mark.parametrize("name", MODELS)
def test_every_tactic_gives_the_same_bits(
    name: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.why_not() is not None:
        pytest.skip(str(cuda.why_not()))
    model, feeds = MODELS[name](rng)
    ir.save(model, tmp_path / "m.onnx")
    engine = tmp_path / "m.engine"
    build_on_gpu(tmp_path / "m.onnx", engine, profile="h200", precision="int8")
    truth = int8_reference.run(ir.to_proto(model), feeds)
    for at in range(MAX_TACTICS):
        choose = chosen(at)
        monkeypatch.setattr(cuda.CudaExecutor, "_choose", choose)
        with open_engine(engine) as opened, Session(opened) as session:
            assert [one.implementation for one in session.reports] == ["cuda"]
            outputs = session.infer(feeds)
        for output, expected in truth.items():
            np.testing.assert_array_equal(outputs[output], expected, strict=True)


def chosen(at: int) -> Callable[[cuda.CudaExecutor, tuple[int, ...]], tuple[int, ...]]:
    """A choice of tactics: number `at` of each operation, or its last."""

    def choose(executor: cuda.CudaExecutor, _: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(at, len(op.tactics) - 1) for op in executor._ops)

    return choose
