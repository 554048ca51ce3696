"""SqueezeNet 1.1 and ShuffleNetV2: few weights, and channels that are joined, cut and shuffled."""

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims, size

# Channels squeezed and expanded (Iandola et al., 2016, version 1.1); None: a pooling.
_FIRES = (
    *((16, 64), (16, 64), None),
    *((32, 128), (32, 128), None),
    *((48, 192), (48, 192), (64, 256), (64, 256)),
)


def squeezenet(side: int, batch: int = 1) -> ir.Model:
    """Return SqueezeNet 1.1."""
    net = Net("squeezenet", (batch, 3, side, side))
    x = net.relu(net.conv(net.image, 64, 3, 2, pad=0, bias=True))
    x = net.pool(x, 3, 2, ceil=True)
    for row in _FIRES:
        if row is None:
            x = net.pool(x, 3, 2, ceil=True)
            continue
        squeezed, maps = row
        x = net.relu(net.conv(x, squeezed, bias=True))
        parts = (net.conv(x, maps, bias=True), net.conv(x, maps, 3, bias=True))
        x = net.concat(*(net.relu(part) for part in parts))
    x = net.relu(net.conv(x, 1000, bias=True))
    return net.model(net.flatten(net.mean(x)))


# Maps of the stages and of the last convolution, by width (Ma et al., 2018).
_SHUFFLENETS = {
    "0.5": ((48, 96, 192), 1024),
    "1.0": ((116, 232, 464), 1024),
    "1.5": ((176, 352, 704), 1024),
    "2.0": ((244, 488, 976), 2048),
}


def shufflenet_v2(side: int, batch: int = 1, *, width: str = "1.0") -> ir.Model:
    """Return ShuffleNetV2 at a width."""
    stages, last = _SHUFFLENETS[width]
    net = Net("shufflenet_v2", (batch, 3, side, side))
    x = net.pool(_made(net, net.image, 24, kernel=3, stride=2), 3, 2, pad=1)
    for maps, repeats in zip(stages, (4, 8, 4), strict=True):
        for index in range(repeats):
            half = maps // 2
            if index == 0:
                features = _made(net, _depthwise(net, x, 2), half)
                y = _branch(net, x, half, 2)
            else:
                features, y = net.split(x, half, half)
                y = _branch(net, y, half, 1)
            x = _shuffled(net, net.concat(features, y))
    return net.model(net.linear(net.flatten(net.mean(_made(net, x, last))), 1000))


def _made(net: Net, x: ir.Value, maps: int, *, kernel: int = 1, stride: int = 1) -> ir.Value:
    return net.relu(net.norm(net.conv(x, maps, kernel, stride)))


def _depthwise(net: Net, x: ir.Value, stride: int) -> ir.Value:
    return net.norm(net.conv(x, channels(x), 3, stride, group=channels(x)))


def _branch(net: Net, x: ir.Value, maps: int, stride: int) -> ir.Value:
    return _made(net, _depthwise(net, _made(net, x, maps), stride), maps)


def _shuffled(net: Net, x: ir.Value) -> ir.Value:
    """Deal the two halves of the channels out in turn."""
    assert x.shape is not None
    batch, maps, (high, wide) = dims(x)[0], channels(x), size(x)
    y = net.reshape(x, batch, 2, maps // 2, high, wide)
    return net.reshape(net.transpose(y, 0, 2, 1, 3, 4), batch, maps, high, wide)
