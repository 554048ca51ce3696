"""The SSD detectors of MLPerf: MobileNetV1 at 300x300 and ResNet-34 at 1200x1200."""

import onnx_ir as ir

from scripts.networks.classic import mobilenet_v1_layers, resnet_stages
from scripts.networks.graph import Net, dims, size


def _heads(
    net: Net,
    features: list[ir.Value],
    *,
    anchors: tuple[int, ...],
    classes: int,
    kernel: int,
    strides: tuple[int, ...],
    keep: int,
) -> ir.Model:
    """Predict boxes and classes on every feature map, then suppress in one plugin."""
    boxes: list[ir.Value] = []
    scores: list[ir.Value] = []
    for x, count, stride in zip(features, anchors, strides, strict=True):
        for values, outputs in ((4, boxes), (classes, scores)):
            pad = 1 if kernel == 3 and size(x)[0] > 2 else 0
            side = kernel if size(x)[0] + 2 * pad >= kernel else 1
            y = net.conv(x, count * values, side, stride, pad=pad, bias=True)
            outputs.append(net.flatten(net.transpose(y, 0, 2, 3, 1)))
    batch = dims(net.image)[0]
    detections = net.plugin(
        "NMS_TRT", [net.concat(*boxes), net.concat(*scores)], (batch, 1, keep, 7)
    )
    return net.model(detections)


def ssd_mobilenet_v1(batch: int = 1) -> ir.Model:
    """Return TensorFlow's SSD-MobileNetV1 for COCO: 91 classes, predictors of 1x1, 300x300."""
    net = Net("ssd_mobilenet_v1", (batch, 3, 300, 300))
    layers = mobilenet_v1_layers(net, net.image)
    features = [layers[10], layers[12]]
    x = layers[12]
    for squeezed, maps in ((256, 512), (128, 256), (128, 256), (64, 128)):
        x = net.relu6(net.norm(net.conv(x, squeezed)))
        x = net.relu6(net.norm(net.conv(x, maps, 3, 2)))
        features.append(x)
    return _heads(
        net, features, anchors=(3, 6, 6, 6, 6, 6), classes=91, kernel=1, strides=(1,) * 6, keep=100
    )


def ssd_resnet34(batch: int = 1) -> ir.Model:
    """Return MLPerf's SSD-ResNet34: three stages, the third without stride, 81 classes."""
    net = Net("ssd_resnet34", (batch, 3, 1200, 1200))
    x = resnet_stages(net, net.image, 34, (1, 2, 1))
    features = [x]
    extras = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 2, 0))
    for squeezed, maps, stride, pad in (*extras, (128, 256, 1, 0)):
        x = net.relu(net.conv(x, squeezed, bias=True))
        x = net.relu(net.conv(x, maps, 3, stride, pad=pad, bias=True))
        features.append(x)
    return _heads(
        net,
        features,
        anchors=(4, 6, 6, 6, 4, 4),
        classes=81,
        kernel=3,
        strides=(3, 3, 2, 2, 2, 2),
        keep=200,
    )
