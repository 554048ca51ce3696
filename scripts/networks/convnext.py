"""ConvNeXt, tiny (Liu et al., 2022)."""

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims
from scripts.networks.transformers import gelu, layer_norm, linear

_DEPTHS = (3, 3, 9, 3)
_WIDTHS = (96, 192, 384, 768)


def _block(net: Net, x: ir.Value) -> ir.Value:
    """A depthwise convolution and two products of channels, added to x (N, C, H, W)."""
    width = channels(x)
    y = net.transpose(net.conv(x, width, 7, group=width, bias=True), 0, 2, 3, 1)
    y = linear(net, gelu(net, linear(net, layer_norm(net, y), 4 * width)), width)
    return net.add(x, net.transpose(net.mul(y, net.weight(width)), 0, 3, 1, 2))


def _norm_of_channels(net: Net, x: ir.Value) -> ir.Value:
    return net.transpose(layer_norm(net, net.transpose(x, 0, 2, 3, 1)), 0, 3, 1, 2)


def convnext_tiny(batch: int = 1) -> ir.Model:
    """Return ConvNeXt-T for 224 x 224 pixels."""
    net = Net("convnext_tiny", (batch, 3, 224, 224))
    x = _norm_of_channels(net, net.conv(net.image, _WIDTHS[0], 4, 4, pad=0, bias=True))
    for depth, width in zip(_DEPTHS, _WIDTHS, strict=True):
        if width != channels(x):
            x = net.conv(_norm_of_channels(net, x), width, 2, 2, pad=0, bias=True)
        for _ in range(depth):
            x = _block(net, x)
    pooled = net.reshape(net.mean(x), dims(x)[0], channels(x))
    return net.model(net.linear(layer_norm(net, pooled), 1000))
