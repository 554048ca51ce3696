"""Darknet's YOLO of versions 2 to 4 and their tiny forms, as raw output maps.

`act` names the activation everywhere: the published runs on the DLA replaced LeakyReLU and Mish by
ReLU ("-relu").
"""

from collections.abc import Callable

import onnx_ir as ir

from scripts.networks.graph import Net, channels

OUTPUTS = 255  # three anchors, 80 classes and five numbers


class _Darknet:
    """A network with one activation throughout."""

    def __init__(self, name: str, side: int, batch: int, act: str) -> None:
        self.net = Net(name, (batch, 3, side, side))
        acts: dict[str, Callable[[ir.Value], ir.Value]] = {
            "relu": self.net.relu,
            "leaky": self.net.leaky,
            "mish": self.net.mish,
        }
        self._act = acts[act]

    def conv(self, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1) -> ir.Value:
        return self._act(self.net.norm(self.net.conv(x, maps, kernel, stride)))

    def chain(self, x: ir.Value, *rows: tuple[int, int]) -> ir.Value:
        for maps, kernel in rows:
            x = self.conv(x, maps, kernel)
        return x

    def residual(self, x: ir.Value, inner: int) -> ir.Value:
        return self.net.add(self.conv(self.conv(x, inner), channels(x), 3), x)

    def csp(self, x: ir.Value, maps: int, count: int) -> ir.Value:
        """One stage of CSPDarknet53: down, then half of the maps through residuals."""
        x = self.conv(x, maps, 3, 2)
        first = count == 1
        half = maps if first else maps // 2
        features, y = self.conv(x, half), self.conv(x, half)
        for _ in range(count):
            y = self.residual(y, maps // 2)
        return self.conv(self.net.concat(self.conv(y, half), features), maps)

    def out(self, x: ir.Value, maps: int = OUTPUTS) -> ir.Value:
        return self.net.conv(x, maps, bias=True)


def yolov2(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv2 for COCO (five anchors)."""
    dark = _Darknet("yolov2", side, batch, act)
    x = dark.conv(dark.net.image, 32, 3)
    x = dark.conv(dark.net.pool(x, 2, 2), 64, 3)
    for maps in (128, 256):
        x = dark.chain(dark.net.pool(x, 2, 2), (maps, 3), (maps // 2, 1), (maps, 3))
    rows = ((512, 3), (256, 1), (512, 3), (256, 1), (512, 3))
    passed = dark.chain(dark.net.pool(x, 2, 2), *rows)
    rows = ((1024, 3), (512, 1), (1024, 3), (512, 1), (1024, 3))
    x = dark.chain(dark.net.pool(passed, 2, 2), *rows, (1024, 3), (1024, 3))
    low = dark.conv(passed, 64)
    parts = [dark.net.strided(low, r, c) for r in (0, 1) for c in (0, 1)]
    x = dark.conv(dark.net.concat(*parts, x), 1024, 3)
    return dark.net.model(dark.out(x, 425))


def yolov2_tiny(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv2-tiny for COCO."""
    dark = _Darknet("yolov2_tiny", side, batch, act)
    x = dark.net.image
    for maps in (16, 32, 64, 128, 256):
        x = dark.net.pool(dark.conv(x, maps, 3), 2, 2)
    x = dark.chain(x, (512, 3), (1024, 3), (512, 3))
    return dark.net.model(dark.out(x, 425))


def yolov3(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv3."""
    dark = _Darknet("yolov3", side, batch, act)
    x, features = dark.conv(dark.net.image, 32, 3), []
    for maps, count in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        x = dark.conv(x, maps, 3, 2)
        for _ in range(count):
            x = dark.residual(x, maps // 2)
        features.append(x)
    outs = []
    for maps, passed in ((512, None), (256, features[3]), (128, features[2])):
        if passed is not None:
            x = dark.net.concat(dark.net.upsample(dark.conv(x, maps)), passed)
        x = dark.chain(x, (maps, 1), (2 * maps, 3), (maps, 1), (2 * maps, 3), (maps, 1))
        outs.append(dark.out(dark.conv(x, 2 * maps, 3)))
    return dark.net.model(*outs)


def yolov3_tiny(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv3-tiny."""
    dark = _Darknet("yolov3_tiny", side, batch, act)
    x = dark.net.image
    for maps in (16, 32, 64, 128):
        x = dark.net.pool(dark.conv(x, maps, 3), 2, 2)
    passed = dark.conv(x, 256, 3)
    x = dark.conv(dark.net.pool(passed, 2, 2), 512, 3)
    x = dark.conv(dark.conv(x, 1024, 3), 256)
    large = dark.out(dark.conv(x, 512, 3))
    y = dark.net.concat(dark.net.upsample(dark.conv(x, 128)), passed)
    return dark.net.model(large, dark.out(dark.conv(y, 256, 3)))


def yolov4(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv4 with one activation throughout."""
    dark = _Darknet("yolov4", side, batch, act)
    net = dark.net
    x, features = dark.conv(net.image, 32, 3), []
    for maps, count in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        x = dark.csp(x, maps, count)
        features.append(x)
    x = dark.chain(x, (512, 1), (1024, 3), (512, 1))
    x = net.concat(*[net.pool(x, k, 1, pad=k // 2) for k in (13, 9, 5)], x)
    t5 = dark.chain(x, (512, 1), (1024, 3), (512, 1))
    x = net.concat(dark.conv(features[3], 256), net.upsample(dark.conv(t5, 256)))
    t4 = dark.chain(x, (256, 1), (512, 3), (256, 1), (512, 3), (256, 1))
    x = net.concat(dark.conv(features[2], 128), net.upsample(dark.conv(t4, 128)))
    x = dark.chain(x, (128, 1), (256, 3), (128, 1), (256, 3), (128, 1))
    outs = [dark.out(dark.conv(x, 256, 3))]
    for maps, passed in ((256, t4), (512, t5)):
        x = net.concat(dark.conv(x, maps, 3, 2), passed)
        x = dark.chain(x, (maps, 1), (2 * maps, 3), (maps, 1), (2 * maps, 3), (maps, 1))
        outs.append(dark.out(dark.conv(x, 2 * maps, 3)))
    return net.model(*outs)


def yolov4_tiny(side: int, batch: int = 1, act: str = "leaky") -> ir.Model:
    """Return YOLOv4-tiny."""
    dark = _Darknet("yolov4_tiny", side, batch, act)
    net = dark.net
    x = dark.conv(dark.conv(net.image, 32, 3, 2), 64, 3, 2)
    passed = x
    for maps in (64, 128, 256):
        x = dark.conv(x, maps, 3)
        half = net.split(x, maps // 2, maps // 2)[1]
        a = dark.conv(half, maps // 2, 3)
        joined = dark.conv(net.concat(dark.conv(a, maps // 2, 3), a), maps)
        passed = joined
        x = net.pool(net.concat(x, joined), 2, 2)
    x = dark.conv(dark.conv(x, 512, 3), 256)
    large = dark.out(dark.conv(x, 512, 3))
    y = net.concat(net.upsample(dark.conv(x, 128)), passed)
    return net.model(large, dark.out(dark.conv(y, 256, 3)))
