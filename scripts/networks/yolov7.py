"""YOLOv7 and YOLOv7-tiny in their deployed form, with TensorRT's suppression."""

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims, size
from scripts.networks.yolo import CLASSES, conv, suppressed


def _anchored(net: Net, features: list[ir.Value]) -> ir.Model:
    """Decode three anchors a position and suppress."""
    boxes, scores = [], []
    for x in features:
        batch, (high, width) = dims(x)[0], size(x)
        y = net.conv(x, 3 * (CLASSES + 5), bias=True)
        y = net.reshape(y, batch, 3, CLASSES + 5, high, width)
        y = net.unary("Sigmoid", net.transpose(y, 0, 1, 3, 4, 2))
        centre, extent, score = net.split(y, 2, 2, CLASSES + 1, axis=4)
        centre = net.mul(net.add(centre, net.weight(1, 1, high, width, 2)), net.constant([8.0]))
        extent = net.mul(net.mul(extent, extent), net.weight(1, 3, 1, 1, 2))
        box = net.concat(centre, extent, axis=4)
        boxes.append(net.reshape(box, batch, 3 * high * width, 4))
        scores.append(net.reshape(score, batch, 3 * high * width, CLASSES + 1))
    box, score = net.concat(*boxes), net.concat(*scores)
    sure, classes = net.split(score, 1, CLASSES, axis=2)
    classes = net.mul(classes, sure)
    return suppressed(net, net.transpose(box, 0, 2, 1), net.transpose(classes, 0, 2, 1))


def _leaky(net: Net, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1) -> ir.Value:
    return net.leaky(net.norm(net.conv(x, maps, kernel, stride)))


def yolov7_tiny(side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv7-tiny (LeakyReLU)."""
    net = Net("yolov7_tiny", (batch, 3, side, side))

    def elan(x: ir.Value, inner: int, out_channels: int) -> ir.Value:
        a, b = _leaky(net, x, inner), _leaky(net, x, inner)
        c = _leaky(net, b, inner, 3)
        return _leaky(net, net.concat(_leaky(net, c, inner, 3), c, b, a), out_channels)

    x = _leaky(net, _leaky(net, net.image, 32, 3, 2), 64, 3, 2)
    features = []
    for place, inner in enumerate((32, 64, 128, 256)):
        x = elan(net.pool(x, 2, 2) if place else x, inner, 2 * inner)
        features.append(x)
    a, b = _leaky(net, x, 256), _leaky(net, x, 256)
    pools = [net.pool(b, k, 1, pad=k // 2) for k in (13, 9, 5)]
    t5 = _leaky(net, net.concat(_leaky(net, net.concat(*pools, b), 256), a), 256)
    side4 = net.concat(_leaky(net, features[2], 128), net.upsample(_leaky(net, t5, 128)))
    t4 = elan(side4, 64, 128)
    side3 = net.concat(_leaky(net, features[1], 64), net.upsample(_leaky(net, t4, 64)))
    o3 = elan(side3, 32, 64)
    o4 = elan(net.concat(_leaky(net, o3, 128, 3, 2), t4), 64, 128)
    o5 = elan(net.concat(_leaky(net, o4, 256, 3, 2), t5), 128, 256)
    ends = [_leaky(net, y, 2 * channels(y), 3) for y in (o3, o4, o5)]
    return _anchored(net, ends)


def yolov7(side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv7."""
    net = Net("yolov7", (batch, 3, side, side))

    def elan(x: ir.Value, inner: int, out_channels: int) -> ir.Value:
        a, b = conv(net, x, inner), conv(net, x, inner)
        c = conv(net, conv(net, b, inner, 3), inner, 3)
        d = conv(net, conv(net, c, inner, 3), inner, 3)
        return conv(net, net.concat(d, c, b, a), out_channels)

    def wide_elan(x: ir.Value, inner: int, out_channels: int) -> ir.Value:
        features = [conv(net, x, out_channels), conv(net, x, out_channels)]
        for _ in range(4):
            features.append(conv(net, features[-1], inner, 3))
        return conv(net, net.concat(*reversed(features)), out_channels)

    def down(x: ir.Value, maps: int, *more: ir.Value) -> ir.Value:
        pooled = conv(net, net.pool(x, 2, 2), maps)
        return net.concat(conv(net, conv(net, x, maps), maps, 3, 2), pooled, *more)

    x = conv(net, conv(net, conv(net, net.image, 32, 3), 64, 3, 2), 64, 3)
    x = elan(conv(net, x, 128, 3, 2), 64, 256)
    c3 = elan(down(x, 128), 128, 512)
    c4 = elan(down(c3, 256), 256, 1024)
    c5 = elan(down(c4, 512), 256, 1024)
    y = conv(net, conv(net, conv(net, c5, 512), 512, 3), 512)
    pools = [net.pool(y, k, 1, pad=k // 2) for k in (5, 9, 13)]
    y = conv(net, conv(net, net.concat(y, *pools), 512), 512, 3)
    t5 = conv(net, net.concat(y, conv(net, c5, 512)), 512)
    side4 = net.concat(conv(net, c4, 256), net.upsample(conv(net, t5, 256)))
    t4 = wide_elan(side4, 128, 256)
    side3 = net.concat(conv(net, c3, 128), net.upsample(conv(net, t4, 128)))
    o3 = wide_elan(side3, 64, 128)
    o4 = wide_elan(down(o3, 128, t4), 128, 256)
    o5 = wide_elan(down(o4, 256, t5), 256, 512)
    return _anchored(net, [conv(net, z, 2 * channels(z), 3) for z in (o3, o4, o5)])
