"""The rebuilt networks: their published sizes, shapes that ONNX agrees with, and that they run."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from scripts.networks import NETWORKS
from scripts.networks.classic import googlenet_part
from scripts.networks.retinanet import retinanet
from toolkit.graph.node_view import views

# Parameters and multiply-accumulates as the papers and reference codes print them, with the
# precision of the print: torchvision's and Keras' model pages, Caffe's model zoo, darknet's own
# counts, MLPerf's rules, and the model tables of each YOLO (which print floating-point operations,
# two for each multiply-accumulate).
PUBLISHED = [
    ("alexnet", 60_965_224, 0.724),
    ("googlenet", 6_998_552, 1.58),
    ("vgg16", 138_357_544, 15.47),
    ("vgg19", 143_667_240, 19.63),
    ("resnet18", 11_689_512, 1.814),
    ("resnet34", 21_797_672, 3.664),
    ("resnet50", 25_557_032, 4.089),
    ("resnet101", 44_549_160, 7.801),
    ("resnet152", 60_192_808, 11.514),
    ("densenet121", 7_978_856, 2.834),
    ("densenet161", 28_681_000, 7.728),
    ("densenet169", 14_149_480, 3.36),
    ("densenet201", 20_013_928, 4.291),
    ("mobilenet_v1", 4_231_976, 0.569),
    ("mobilenet_v2", 3_504_872, 0.301),
    ("squeezenet", 1_235_496, 0.349),
    ("shufflenet_v2", 2_278_604, 0.145),
    ("shufflenet_v2_x0_5", 1_366_792, 0.04),
    ("shufflenet_v2_x1_5", 3_503_624, 0.296),
    ("shufflenet_v2_x2_0", 7_393_996, 0.583),
    ("mobilenet_v3", 5_483_032, 0.217),
    ("efficientnet_b0", 5_288_548, 0.386),
    ("vit_small", 22_050_664, 4.6),
    ("ssd_mobilenet_v1", 6_820_000, 2.47 / 2),
    ("ssd_resnet34", None, 433 / 2),
    ("yolov5s", 7_235_389, 16.5 / 2),
    ("yolov8n", 3.2e6, 8.7 / 2),
    ("yolov8s", 11.2e6, 28.6 / 2),
    ("yolov8m", 25.9e6, 78.9 / 2),
    ("yolov9t", 2.0e6, 7.7 / 2),
    ("yolov9s", 7.1e6, 26.4 / 2),
    ("yolov9m", 20.0e6, 76.3 / 2),
    ("yolov10n", 2.3e6, 6.7 / 2),
    ("yolov10s", 7.2e6, 21.6 / 2),
    ("yolov10m", 15.4e6, 59.1 / 2),
    ("yolo11n", 2.6e6, 6.5 / 2),
    ("yolo11m", 20.1e6, 68.0 / 2),
    ("yolo26n", 2.4e6, 5.4 / 2),
    ("yolo26m", 20.4e6, 68.2 / 2),
    ("yolo26x", 55.7e6, 193.9 / 2),
    ("yolox_s", 9.0e6, 26.8 / 2),
    ("yolox_m", 25.3e6, 73.8 / 2),
    ("yolov7_tiny", 6.2e6, 13.8 / 2),
    ("yolov7", 36.9e6, 104.7 / 2),
    ("yolov2", None, 29.47 / 2),
    ("yolov3", None, 65.86 / 2),
    ("yolov3_tiny", None, 5.56 / 2),
    ("yolov4", None, 60.1 / 2),
    ("yolov4_tiny", None, 6.91 / 2),
]
# Of networks whose sizes differ alone the least is quick: the others repeat its layers.
LARGER = (
    "vgg19", "resnet34", "resnet101", "resnet152", "densenet161", "densenet169", "densenet201",
    "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "yolov8s", "yolov8m", "yolov9s", "yolov9m",
    "yolov10s", "yolov10m", "yolo11m", "yolo26m", "yolo26x", "yolox_m",
)  # fmt: skip
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def learned(model: ir.Model) -> int:
    """Count what training learns: not the running statistics of normalisation, nor constants."""
    views_of = views(model.graph)
    statistics = {
        tensor.name for v in views_of if v.op == "BatchNormalization" for tensor in v.constants[2:]
    }
    return sum(
        math.prod(int(d) for d in value.shape)
        for name, value in model.graph.initializers.items()
        if name.startswith("w") and name not in statistics
    )


@pytest.mark.parametrize(
    ("name", "parameters", "gmacs"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in LARGER)) for row in PUBLISHED],
)
def test_a_network_has_its_published_size(name, parameters, gmacs):
    model = NETWORKS[name].model()
    macs = sum(v.macs or 0 for v in views(model.graph) if v.op in PRODUCTS)
    assert macs / 1e9 == pytest.approx(gmacs, rel=0.02)
    if parameters is not None:
        assert learned(model) == pytest.approx(parameters, rel=1e-9 if parameters % 1000 else 0.025)


def test_retinanet_has_the_parameters_of_torchvision():
    # retinanet_resnet50_fpn: 34,014,999, without the scales and shifts that it freezes.
    model = retinanet("resnet50", 91)
    frozen = sum(
        2 * int(v.inputs[0].shape[1]) for v in views(model.graph) if v.op == "BatchNormalization"
    )
    assert learned(model) - frozen == 34_014_999


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return the model with large weights as inputs, so that shapes can be inferred cheaply."""
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > 64:
            del model.graph.initializers[name]
            value.const_value = None
            model.graph.inputs.append(value)
    return ir.to_proto(model)


# The scales l and x repeat the layers of the smaller ones.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in LARGER))
        for name in sorted(NETWORKS)
        if name[-1] not in "lx"
    ],
)
def test_onnx_infers_the_shapes_that_the_network_states(name):
    proto = without_weights(NETWORKS[name].model(batch=2))
    stated = {info.name: info for info in proto.graph.value_info}
    del proto.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    results = {info.name: info for info in inferred.graph.value_info}
    for result, info in results.items():
        shapes = [
            [d.dim_value for d in side.type.tensor_type.shape.dim]
            for side in (stated[result], info)
        ]
        assert shapes[0] == shapes[1], result
    assert len(results) > 0.5 * len(proto.graph.node)


@pytest.mark.parametrize(("name", "side"), [("mobilenet_v2", None), ("yolov8n", 96)])
def test_a_network_runs(name, side):
    session = pytest.importorskip("onnxruntime").InferenceSession(
        ir.to_proto(NETWORKS[name].model(side=side)).SerializeToString()
    )
    expected = session.get_inputs()[0]
    image = np.random.default_rng().random(expected.shape, dtype=np.float32)
    for output in session.run(None, {expected.name: image}):
        assert np.isfinite(output).all()


def test_the_parts_of_googlenet_make_the_whole():
    whole = sum(v.macs or 0 for v in views(NETWORKS["googlenet"].model().graph))
    names = ("stem", "3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")
    parts = sum(v.macs or 0 for n in names for v in views(googlenet_part(n).graph))
    assert parts == whole
