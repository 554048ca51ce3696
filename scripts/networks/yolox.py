"""YOLOX, from nano to m, with its raw predictions joined."""

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims, size
from scripts.networks.yolo import CLASSES, conv

_SCALES = {"n": (1 / 3, 0.25), "t": (1 / 3, 0.375), "s": (1 / 3, 0.5), "m": (2 / 3, 0.75)}


class _Parts:
    """The blocks of one scale; nano takes depthwise separable convolutions."""

    def __init__(self, net: Net, *, separable: bool) -> None:
        self.net = net
        self.separable = separable

    def conv3(self, x: ir.Value, maps: int, stride: int = 1) -> ir.Value:
        if not self.separable:
            return conv(self.net, x, maps, 3, stride)
        return conv(self.net, conv(self.net, x, channels(x), 3, stride, group=channels(x)), maps)

    def csp(self, x: ir.Value, maps: int, count: int, *, add: bool = True) -> ir.Value:
        half = maps // 2
        y, second = conv(self.net, x, half), conv(self.net, x, half)
        for _ in range(count):
            z = self.conv3(conv(self.net, y, half), half)
            y = self.net.add(z, y) if add else z
        return conv(self.net, self.net.concat(y, second), maps)


def yolox(scale: str, side: int, batch: int = 1) -> ir.Model:
    """Return YOLOX with sigmoids applied and boxes not decoded."""
    depth, width = _SCALES[scale]
    net = Net(f"yolox_{scale}", (batch, 3, side, side))
    parts = _Parts(net, separable=scale == "n")
    base, count = int(64 * width), max(1, round(3 * depth))
    corners = [net.strided(net.image, r, c) for r, c in ((0, 0), (1, 0), (0, 1), (1, 1))]
    x, features = conv(net, net.concat(*corners), base, 3), []
    for times, repeats in ((2, count), (4, 3 * count), (8, 3 * count), (16, count)):
        x = parts.conv3(x, times * base, 2)
        if times == 16:
            y = conv(net, x, 8 * base)
            pools = [net.pool(y, k, 1, pad=k // 2) for k in (5, 9, 13)]
            x = conv(net, net.concat(y, *pools), 16 * base)
        x = parts.csp(x, times * base, repeats, add=times < 16)
        features.append(x)
    _, p3, p4, p5 = features
    repeats = round(3 * depth)
    t5 = conv(net, p5, 8 * base)
    m4 = parts.csp(net.concat(net.upsample(t5), p4), 8 * base, repeats, add=False)
    t4 = conv(net, m4, 4 * base)
    o3 = parts.csp(net.concat(net.upsample(t4), p3), 4 * base, repeats, add=False)
    o4 = net.concat(parts.conv3(o3, 4 * base, 2), t4)
    o4 = parts.csp(o4, 8 * base, repeats, add=False)
    o5 = net.concat(parts.conv3(o4, 8 * base, 2), t5)
    o5 = parts.csp(o5, 16 * base, repeats, add=False)
    return net.model(_head(net, parts, [o3, o4, o5], 4 * base))


def _head(net: Net, parts: _Parts, features: list[ir.Value], maps: int) -> ir.Value:
    rows = []
    for feature in features:
        x = conv(net, feature, maps)
        classes = parts.conv3(parts.conv3(x, maps), maps)
        boxes = parts.conv3(parts.conv3(x, maps), maps)
        predictions = net.concat(
            net.conv(boxes, 4, bias=True),
            net.unary("Sigmoid", net.conv(boxes, 1, bias=True)),
            net.unary("Sigmoid", net.conv(classes, CLASSES, bias=True)),
        )
        high, wide = size(predictions)
        batch = dims(predictions)[0]
        rows.append(net.reshape(predictions, batch, channels(predictions), high * wide))
    return net.transpose(net.concat(*rows, axis=2), 0, 2, 1)
