"""A segmentation network in the style of DeepLab version 3, on ResNet-18."""

import onnx_ir as ir

from scripts.networks.classic import resnet_stages
from scripts.networks.graph import Net, channels, dims, size

_RATES = (2, 4, 6)  # dilations; Chen et al., 2017, take 6, 12, 18 at twice this resolution


def deeplab(side: int, batch: int = 1, classes: int = 21) -> ir.Model:
    """Return scores of `classes` for every pixel: dilated branches, a pooled one, and resizing."""
    net = Net("deeplab", (batch, 3, side, side))
    x = resnet_stages(net, net.image, 18, (1, 2, 2))
    branches = [net.relu(net.norm(net.conv(x, 128)))]
    for rate in _RATES:
        branches.append(net.relu(net.norm(net.conv(x, 128, 3, dilation=rate))))
    pooled = net.relu(net.norm(net.conv(net.mean(x), 128)))
    branches.append(_resized(net, pooled, *size(x)))
    x = net.relu(net.norm(net.conv(net.concat(*branches), 128)))
    return net.model(_resized(net, net.conv(x, classes, bias=True), side, side))


def _resized(net: Net, x: ir.Value, height: int, width: int) -> ir.Value:
    """Interpolate linearly to a size."""
    assert x.shape is not None
    shape = (dims(x)[0], channels(x), height, width)
    sizes = net.constant(shape)
    return net.op("Resize", [x, None, None, sizes], shape, mode="linear")
