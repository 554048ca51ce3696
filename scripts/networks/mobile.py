"""MobileNetV3-Large and EfficientNet-B0: inverted bottlenecks with squeeze and excitation."""

from collections.abc import Callable

import onnx_ir as ir

from scripts.networks.graph import Net, channels

Act = Callable[[ir.Value], ir.Value]


def _made(
    net: Net, x: ir.Value, maps: int, act: Act | None = None, *, kernel: int = 1, stride: int = 1
) -> ir.Value:
    x = net.norm(net.conv(x, maps, kernel, stride))
    return x if act is None else act(x)


def _excite(net: Net, x: ir.Value, squeezed: int, inner: Act, gate: Act) -> ir.Value:
    """Weigh channels by a network of two layers over their means (Hu et al., 2018)."""
    y = inner(net.conv(net.mean(x), squeezed, bias=True))
    return net.mul(x, gate(net.conv(y, channels(x), bias=True)))


def _eighths(value: float) -> int:
    """Round to a multiple of 8 that is no more than a tenth smaller, as TensorFlow's models do."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


# Kernel, expanded channels, channels, squeeze and excitation, hard swish, stride
# (Howard et al., 2019, table 1).
_V3_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def mobilenet_v3(side: int, batch: int = 1) -> ir.Model:
    """Return MobileNetV3-Large."""
    net = Net("mobilenet_v3", (batch, 3, side, side))

    def swish(x: ir.Value) -> ir.Value:
        return net.unary("HardSwish", x)

    def gate(x: ir.Value) -> ir.Value:
        return net.unary("HardSigmoid", x, alpha=1 / 6)

    x = _made(net, net.image, 16, swish, kernel=3, stride=2)
    for kernel, wide, maps, excited, hard, stride in _V3_LARGE:
        act = swish if hard else net.relu
        y = x if wide == channels(x) else _made(net, x, wide, act)
        y = act(net.norm(net.conv(y, wide, kernel, stride, group=wide)))
        if excited:
            y = _excite(net, y, _eighths(wide / 4), net.relu, gate)
        y = _made(net, y, maps)
        x = net.add(y, x) if stride == 1 and maps == channels(x) else y
    x = net.flatten(net.mean(_made(net, x, 960, swish)))
    return net.model(net.linear(swish(net.linear(x, 1280)), 1000))


# Expansion, kernel, stride, channels, repeats (Tan and Le, 2019, table 1).
_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet_b0(side: int, batch: int = 1) -> ir.Model:
    """Return EfficientNet-B0."""
    net = Net("efficientnet_b0", (batch, 3, side, side))

    def gate(x: ir.Value) -> ir.Value:
        return net.unary("Sigmoid", x)

    x = _made(net, net.image, 32, net.silu, kernel=3, stride=2)
    for expansion, kernel, first, maps, repeats in _B0:
        for index in range(repeats):
            stride, read = first if index == 0 else 1, channels(x)
            wide = expansion * read
            y = x if expansion == 1 else _made(net, x, wide, net.silu)
            y = net.silu(net.norm(net.conv(y, wide, kernel, stride, group=wide)))
            y = _excite(net, y, read // 4, net.silu, gate)
            y = _made(net, y, maps)
            x = net.add(y, x) if stride == 1 and maps == read else y
    x = net.flatten(net.mean(_made(net, x, 1280, net.silu)))
    return net.model(net.linear(x, 1000))
