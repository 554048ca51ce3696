"""Whole networks: kernels for every node, and at small sizes onnxruntime's numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import gpu_interpreter
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import configs
from device.engine.manifest import Precision
from pipelines.config import PreprocessConfig
from pipelines.stages.preprocess import preprocess
from scripts.networks import NETWORKS
from toolkit.gpu.codegen.triton_version import has_compiler
from toolkit.gpu.lower import KernelProgram, lower_segment
from toolkit.gpu.target import GpuTarget
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.quantize import calibrated_tensors, quantize

needs_triton = pytest.mark.skipif(not has_compiler(), reason="Triton is not installed")
ORIN = GpuTarget(sm=87, sm_count=16)
POOLINGS = ("MaxPool", "AveragePool")
LIMITS: dict[Precision, float] = {"fp32": 1e-4, "fp16": 1e-2}


@dataclass(frozen=True)
class Whole:
    """A network: how to get it, and the side of small images for it (None: as it is)."""

    model: Callable[[], ir.Model]
    side: int | None


def builder(name: str) -> Callable[[], ir.Model]:
    return NETWORKS[name].model


def before_plugin(name: str) -> Callable[[], ir.Model]:
    """Return a detector that hands out what its suppression, a plugin of TensorRT, reads."""

    def cut() -> ir.Model:
        model = NETWORKS[name].model()
        (plugin,) = (node for node in model.graph if node.domain)
        read = [value for value in plugin.inputs if value is not None]
        model.graph.outputs[:] = read
        model.graph.remove(plugin)
        return model

    return cut


def features(name: str) -> Callable[[], ir.Model]:
    """Return a network up to what its last pooling reads: the rest has weights for one size."""

    def cut() -> ir.Model:
        model = NETWORKS[name].model()
        nodes = list(model.graph)
        last = max(at for at, node in enumerate(nodes) if node.op_type in POOLINGS)
        model.graph.outputs[:] = [one for one in nodes[last].inputs if one is not None]
        model.graph.remove(nodes[last:])
        return model

    return cut


def detector() -> ir.Model:
    return import_model(configs.ROOT / "models" / "robot-objects.onnx").model


NETWORKS_OF_THE_FIELD = {
    "resnet18": Whole(builder("resnet18"), 32),
    "resnet50": Whole(builder("resnet50"), 32),
    "mobilenet_v2": Whole(builder("mobilenet_v2"), 32),
    "mobilenet_v3": Whole(builder("mobilenet_v3"), 32),
    "efficientnet_b0": Whole(builder("efficientnet_b0"), 32),
    "densenet121": Whole(builder("densenet121"), 32),
    "googlenet": Whole(features("googlenet"), 32),
    "squeezenet": Whole(builder("squeezenet"), 64),
    "shufflenet_v2": Whole(builder("shufflenet_v2"), 64),
    "vgg16": Whole(features("vgg16"), 32),
    "unet": Whole(builder("unet"), 32),
    "detector": Whole(detector, None),
    "yolov8n": Whole(builder("yolov8n"), 64),
    "ssd_mobilenet_v1": Whole(before_plugin("ssd_mobilenet_v1"), 64),
    "deeplab": Whole(builder("deeplab"), 64),
    "vit_small": Whole(builder("vit_small"), 64),
    "encoder": Whole(builder("encoder"), None),
}


def small(name: str) -> ir.Model:
    """Return a network for small images; the passes infer the other shapes again."""
    network = NETWORKS_OF_THE_FIELD[name]
    if network.side is None:
        return network.model()
    if name in NETWORKS and NETWORKS[name].side is not None:
        return NETWORKS[name].model(side=network.side)
    return resized(network.model(), network.side)


def scene() -> np.ndarray:
    """Return a image that the detector was made for: on noise all its scores are near 0."""
    pixels = cv2.imread(str(configs.ROOT / "scenes" / "heldout" / "000.jpg"))
    blob, _ = preprocess(pixels, PreprocessConfig(width=320, height=320))
    return blob


def resized(model: ir.Model, side: int) -> ir.Model:
    """Return a network for images of another size; shapes are inferred again by the passes."""
    (image,) = model.graph.inputs
    image.shape = ir.Shape((1, 3, side, side))
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    return model


def passed(model: ir.Model) -> ir.Model:
    graph, reports = run_passes(model)
    assert not [report.failure for report in reports if report.failure]
    return graph


def lower(graph: ir.Model, precision: Precision) -> KernelProgram:
    """Lower all of a network as one GPU segment; what no kernel computes raises."""
    names = {str(node.name): "gpu0" for node in graph.graph}
    if precision == "int8":
        amax = dict.fromkeys(calibrated_tensors(graph), 4.0)
        quantized = quantize(graph, amax, names, frozenset())
        graph, names = quantized.model, dict(quantized.segment_of)
    (piece,) = extract_segments(graph, names, ["gpu0"])
    return lower_segment(piece.model, gpu=ORIN, precision=precision)


PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
# Smaller networks of this table have all their operators; `ConvTranspose` has tests of its own.
LARGE = ("resnet50", "densenet121", "vgg16", "unet")


@pytest.mark.parametrize(
    ("name", "precision"),
    [  # each network in one precision, in turn; in all of them when there is time
        pytest.param(name, precision, marks=[pytest.mark.slow] * (at % 3 != turn or name in LARGE))
        for at, name in enumerate(NETWORKS_OF_THE_FIELD)
        for turn, precision in enumerate(PRECISIONS)
    ],
)
def test_a_whole_network_has_kernels(name: str, precision: Precision) -> None:
    program = lower(passed(NETWORKS_OF_THE_FIELD[name].model()), precision)
    assert program.ops
    assert program.workspace_bytes >= program.largest_live_bytes
    assert program.workspace_bytes < 1.2 * program.largest_live_bytes


# Quick networks of convolutions are `residual_network` and the shipped detector in INT8.
QUICK = {("encoder", "fp32"), ("encoder", "fp16")}
CASES = [
    pytest.param(name, precision, marks=[pytest.mark.slow] * ((name, precision) not in QUICK))
    for name in NETWORKS_OF_THE_FIELD
    for precision in LIMITS
]


@needs_triton
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_small_network_gives_onnxruntime_s_numbers(
    name: str, precision: Precision, tmp_path: Path, rng: np.random.Generator
) -> None:
    model = small(name)
    path = tmp_path / "m.onnx"
    ir.save(model, path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (image,) = session.get_inputs()
    feeds = {image.name: scene() if name == "detector" else rng.random(image.shape, np.float32)}
    names = [one.name for one in session.get_outputs()]
    truths = dict(zip(names, session.run(names, feeds), strict=True))
    outputs = gpu_interpreter.run(lower(passed(model), precision), feeds)
    for output, truth in truths.items():
        difference = np.linalg.norm(outputs[output].astype(np.float64) - truth)
        assert difference < LIMITS[precision] * np.linalg.norm(truth), output
