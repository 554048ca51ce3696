"""RetinaNet (Lin et al., 2017) as torchvision builds it, with backbones of MLPerf and NVIDIA.

MLPerf's detector has ResNeXt-50 32x4d, 264 classes and 800x800; NVIDIA's DLA reference model has
ResNet-34 and 1280x768.
"""

import math

import onnx_ir as ir

from scripts.networks.classic import resnet_features
from scripts.networks.graph import Net, dims, size

MAPS = 256  # of the pyramid and of the heads
ANCHORS = 9


def retinanet(
    backbone: str, classes: int, batch: int = 1, side: tuple[int, int] = (800, 800)
) -> ir.Model:
    """Return the detector, `side` as height and width, with its suppression as a plugin."""
    net = Net(f"retinanet_{backbone}", (batch, 3, *side))
    levels = _pyramid(net, resnet_features(net, net.image, backbone)[1:])
    outputs = [_head(net, levels, ANCHORS * values) for values in (4, classes)]
    shapes = [(batch, 1), (batch, 100, 4), (batch, 100), (batch, 100)]
    return net.model(net.plugin("EfficientNMS_TRT", outputs, *shapes))


def _pyramid(net: Net, features: list[ir.Value]) -> list[ir.Value]:
    """Return levels 3 to 7; the last two are strided from level 5."""
    inner = [net.conv(x, MAPS, bias=True) for x in features]
    for level in (1, 0):
        inner[level] = net.add(inner[level], net.upsample(inner[level + 1]))
    levels = [net.conv(x, MAPS, 3, bias=True) for x in inner]
    levels.append(net.conv(levels[-1], MAPS, 3, 2, bias=True))
    levels.append(net.conv(net.relu(levels[-1]), MAPS, 3, 2, bias=True))
    return levels


def _head(net: Net, levels: list[ir.Value], outputs: int) -> ir.Value:
    """Return one head's values of all positions; its five weights serve every level."""
    weights = [(net.weight(MAPS, MAPS, 3, 3), net.weight(MAPS)) for _ in range(4)]
    last = (net.weight(outputs, MAPS, 3, 3), net.weight(outputs))
    values = []
    for x in levels:
        y = x
        for weight, bias in weights:
            y = net.relu(net.shared_conv(y, weight, bias))
        y = net.shared_conv(y, *last)
        batch = dims(net.image)[0]
        positions = math.prod(size(y)) * ANCHORS
        y = net.transpose(y, 0, 2, 3, 1)
        values.append(net.reshape(y, batch, positions, outputs // ANCHORS))
    return net.concat(*values, axis=1)
