"""Classifiers from their papers and reference code: AlexNet to EfficientNet-Lite, and U-Net."""

import onnx_ir as ir

from scripts.networks.graph import Net, channels


def _conv(net: Net, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1) -> ir.Value:
    return net.relu(net.conv(x, maps, kernel, stride, bias=True))


def _norm_relu(net: Net, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1) -> ir.Value:
    return net.relu(net.norm(net.conv(x, maps, kernel, stride)))


def _lrn(net: Net, x: ir.Value) -> ir.Value:
    return net.unary("LRN", x, size=5, alpha=1e-4, beta=0.75)


def _head(net: Net, x: ir.Value, classes: int = 1000) -> ir.Value:
    return net.linear(net.flatten(net.mean(x)), classes)


def alexnet(batch: int = 1) -> ir.Model:
    """Return AlexNet as Caffe's reference has it (two groups, LRN), 227x227."""
    net = Net("alexnet", (batch, 3, 227, 227))
    x = net.relu(net.conv(net.image, 96, 11, 4, pad=0, bias=True))
    x = net.pool(_lrn(net, x), 3, 2)
    x = net.relu(net.conv(x, 256, 5, pad=2, group=2, bias=True))
    x = net.pool(_lrn(net, x), 3, 2)
    x = _conv(net, x, 384, 3)
    x = net.relu(net.conv(x, 384, 3, group=2, bias=True))
    x = net.relu(net.conv(x, 256, 3, group=2, bias=True))
    x = net.flatten(net.pool(x, 3, 2))
    x = net.relu(net.linear(x, 4096))
    x = net.relu(net.linear(x, 4096))
    return net.model(net.softmax(net.linear(x, 1000)))


# Maps of the branches: 1x1, 3x3 after its reduction, 5x5 after its reduction, after the pooling.
_INCEPTIONS: tuple[tuple[str, tuple[int, int, int, int, int, int]], ...] = (
    ("3a", (64, 96, 128, 16, 32, 32)),
    ("3b", (128, 128, 192, 32, 96, 64)),
    ("4a", (192, 96, 208, 16, 48, 64)),
    ("4b", (160, 112, 224, 24, 64, 64)),
    ("4c", (128, 128, 256, 24, 64, 64)),
    ("4d", (112, 144, 288, 32, 64, 64)),
    ("4e", (256, 160, 320, 32, 128, 128)),
    ("5a", (256, 160, 320, 32, 128, 128)),
    ("5b", (384, 192, 384, 48, 128, 128)),
)


def googlenet(batch: int = 1) -> ir.Model:
    """Return GoogLeNet as Caffe's reference has it, without the training heads, 224x224."""
    net = Net("googlenet", (batch, 3, 224, 224))
    x = net.relu(net.conv(net.image, 64, 7, 2, bias=True))
    x = _lrn(net, net.pool(x, 3, 2, ceil=True))
    x = _lrn(net, _conv(net, _conv(net, x, 64), 192, 3))
    x = net.pool(x, 3, 2, ceil=True)
    for name, maps in _INCEPTIONS:
        x = _inception_v1(net, x, maps)
        if name in ("3b", "4e"):
            x = net.pool(x, 3, 2, ceil=True)
    x = net.pool(x, 7, kind="AveragePool")
    return net.model(net.softmax(net.linear(net.flatten(x), 1000)))


def googlenet_part(part: str, batch: int = 1) -> ir.Model:
    """Return one group of GoogLeNet's layers: "stem", or an inception block with what follows it.

    Blocks 3b and 4e end with their pooling, block 5b with the classifier.
    """
    if part == "stem":
        net = Net("googlenet_stem", (batch, 3, 224, 224))
        x = net.relu(net.conv(net.image, 64, 7, 2, bias=True))
        x = _lrn(net, net.pool(x, 3, 2, ceil=True))
        x = _lrn(net, _conv(net, _conv(net, x, 64), 192, 3))
        return net.model(net.pool(x, 3, 2, ceil=True))
    names = [name for name, _ in _INCEPTIONS]
    index = names.index(part)
    before = _INCEPTIONS[index - 1][1] if index else None
    maps = 192 if before is None else before[0] + before[2] + before[4] + before[5]
    side = {"3": 28, "4": 14, "5": 7}[part[0]]
    net = Net(f"googlenet_{part}", (batch, maps, side, side))
    x = _inception_v1(net, net.image, _INCEPTIONS[index][1])
    if part in ("3b", "4e"):
        x = net.pool(x, 3, 2, ceil=True)
    if part == "5b":
        x = net.linear(net.flatten(net.pool(x, 7, kind="AveragePool")), 1000)
        x = net.softmax(x)
    return net.model(x)


def _inception_v1(net: Net, x: ir.Value, maps: tuple[int, int, int, int, int, int]) -> ir.Value:
    one, red3, three, red5, five, pooled = maps
    return net.concat(
        _conv(net, x, one),
        _conv(net, _conv(net, x, red3), three, 3),
        _conv(net, _conv(net, x, red5), five, 5),
        _conv(net, net.pool(x, 3, 1, pad=1), pooled),
    )


def dense_layer(inputs: int, outputs: int) -> ir.Model:
    """Return one fully connected layer with its rectifier: the ends of AlexNet and VGG."""
    net = Net(f"dense_{inputs}_{outputs}", (1, inputs))
    return net.model(net.relu(net.linear(net.image, outputs)))


def conv_layer(maps: int, side: tuple[int, int], kernel: int, out_channels: int) -> ir.Model:
    """Return one convolution with its rectifier."""
    net = Net(f"conv_{maps}_{out_channels}", (1, maps, *side))
    return net.model(net.relu(net.conv(net.image, out_channels, kernel, bias=True)))


def vgg(depth: int, batch: int = 1) -> ir.Model:
    """Return VGG-16 or VGG-19, 224x224."""
    net = Net(f"vgg{depth}", (batch, 3, 224, 224))
    x = net.image
    repeats = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}[depth]
    for maps, count in zip((64, 128, 256, 512, 512), repeats, strict=True):
        for _ in range(count):
            x = _conv(net, x, maps, 3)
        x = net.pool(x, 2, 2)
    x = net.flatten(x)
    for _ in range(2):
        x = net.relu(net.linear(x, 4096))
    return net.model(net.softmax(net.linear(x, 1000)))


_RESNETS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}


def resnet(
    depth: int, batch: int = 1, side: tuple[int, int] = (224, 224), *, head: bool = True
) -> ir.Model:
    """Return a ResNet, version 1.5 (the stride in the 3x3), `side` as height and width."""
    net = Net(f"resnet{depth}", (batch, 3, *side))
    x = resnet_stages(net, net.image, depth, (1, 2, 2, 2))
    return net.model(_head(net, x) if head else x)


def resnet_stages(net: Net, x: ir.Value, depth: int, strides: tuple[int, ...]) -> ir.Value:
    """Add the stem and as many stages as `strides` has."""
    kind, repeats = _RESNETS[depth]
    x = net.pool(_norm_relu(net, x, 64, 7, 2), 3, 2, pad=1)
    for stage, stride in enumerate(strides):
        x = _stage(net, x, kind, maps=64 * 2**stage, repeats=repeats[stage], stride=stride)
    return x


def resnet_features(net: Net, x: ir.Value, name: str) -> list[ir.Value]:
    """Add a backbone ("resnet34", "resnet50", "resnext50"); return the output of each stage."""
    kind, repeats = ("resnext", _RESNETS[50][1]) if name == "resnext50" else _RESNETS[int(name[6:])]
    x = net.pool(_norm_relu(net, x, 64, 7, 2), 3, 2, pad=1)
    features: list[ir.Value] = []
    for stage, stride in enumerate((1, 2, 2, 2)):
        x = _stage(net, x, kind, maps=64 * 2**stage, repeats=repeats[stage], stride=stride)
        features.append(x)
    return features


def _stage(net: Net, x: ir.Value, kind: str, *, maps: int, repeats: int, stride: int) -> ir.Value:
    for block in range(repeats):
        step = stride if block == 0 else 1
        if kind == "basic":
            x = _basic(net, x, maps, step)
        elif kind == "resnext":  # 32 groups of 4 maps in the first stage (Xie et al., 2017)
            x = _bottleneck(net, x, maps, step, width=2 * maps, group=32)
        else:
            x = _bottleneck(net, x, maps, step, width=maps)
    return x


def _shortcut(net: Net, x: ir.Value, maps: int, stride: int) -> ir.Value:
    if channels(x) == maps and stride == 1:
        return x
    return net.norm(net.conv(x, maps, 1, stride))


def _basic(net: Net, x: ir.Value, maps: int, stride: int) -> ir.Value:
    y = net.norm(net.conv(_norm_relu(net, x, maps, 3, stride), maps, 3))
    return net.relu(net.add(y, _shortcut(net, x, maps, stride)))


def _bottleneck(
    net: Net, x: ir.Value, maps: int, stride: int, *, width: int, group: int = 1
) -> ir.Value:
    y = _norm_relu(net, x, width)
    y = net.relu(net.norm(net.conv(y, width, 3, stride, group=group)))
    y = net.norm(net.conv(y, 4 * maps))
    return net.relu(net.add(y, _shortcut(net, x, 4 * maps, stride)))


# Layers of the blocks, maps of the first convolution, maps that a layer adds (Huang et al., 2017).
_DENSENETS = {
    121: ((6, 12, 24, 16), 64, 32),
    161: ((6, 12, 36, 24), 96, 48),
    169: ((6, 12, 32, 32), 64, 32),
    201: ((6, 12, 48, 32), 64, 32),
}


def densenet(depth: int, batch: int = 1) -> ir.Model:
    """Return DenseNet as torchvision builds it, 224x224: a layer joins all maps of its block."""
    repeats, first, growth = _DENSENETS[depth]
    net = Net(f"densenet{depth}", (batch, 3, 224, 224))
    x = net.pool(_norm_relu(net, net.image, first, 7, 2), 3, 2, pad=1)
    for stage, layers in enumerate(repeats):
        features = [x]
        for _ in range(layers):
            y = net.conv(net.relu(net.norm(x)), 4 * growth)
            features.append(net.conv(net.relu(net.norm(y)), growth, 3))
            x = net.concat(*features)
        x = net.relu(net.norm(x))
        if stage < 3:
            x = net.pool(net.conv(x, channels(x) // 2), 2, 2, kind="AveragePool")
    return net.model(_head(net, x))


def mobilenet_v1_layers(net: Net, x: ir.Value) -> list[ir.Value]:
    """Add MobileNetV1 up to its 1024 maps; return the outputs of its 13 separable layers."""
    x = net.relu6(net.norm(net.conv(x, 32, 3, 2)))
    outputs = []
    maps = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
    for index, out_channels in enumerate(maps):
        stride = 2 if index in (1, 3, 5, 11) else 1
        x = net.relu6(net.norm(net.conv(x, channels(x), 3, stride, group=channels(x))))
        x = net.relu6(net.norm(net.conv(x, out_channels)))
        outputs.append(x)
    return outputs


def mobilenet_v1(batch: int = 1) -> ir.Model:
    """Return MobileNetV1, 224x224."""
    net = Net("mobilenet_v1", (batch, 3, 224, 224))
    return net.model(_head(net, mobilenet_v1_layers(net, net.image)[-1]))


def _inverted(
    net: Net, x: ir.Value, maps: int, stride: int, expand: int, *, kernel: int = 3
) -> ir.Value:
    y = x
    if expand != 1:
        y = net.relu6(net.norm(net.conv(y, channels(x) * expand)))
    y = net.relu6(net.norm(net.conv(y, channels(y), kernel, stride, group=channels(y))))
    y = net.norm(net.conv(y, maps))
    return net.add(y, x) if stride == 1 and channels(x) == maps else y


def mobilenet_v2(batch: int = 1) -> ir.Model:
    """Return MobileNetV2, 224x224."""
    net = Net("mobilenet_v2", (batch, 3, 224, 224))
    x = net.relu6(net.norm(net.conv(net.image, 32, 3, 2)))
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    for expand, maps, count, stride in (*rows, (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
        for index in range(count):
            x = _inverted(net, x, maps, stride if index == 0 else 1, expand)
    return net.model(_head(net, net.relu6(net.norm(net.conv(x, 1280)))))


def efficientnet_lite0(batch: int = 1) -> ir.Model:
    """Return EfficientNet-Lite0, 224x224."""
    net = Net("efficientnet_lite0", (batch, 3, 224, 224))
    x = net.relu6(net.norm(net.conv(net.image, 32, 3, 2)))
    rows = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3))
    rest = ((6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
    for expand, maps, count, stride, kernel in rows + rest:
        for index in range(count):
            x = _inverted(net, x, maps, stride if index == 0 else 1, expand, kernel=kernel)
    return net.model(_head(net, net.relu6(net.norm(net.conv(x, 1280)))))


def unet(batch: int = 1, side: int = 512) -> ir.Model:
    """Return the U-Net of 2015 with padded convolutions and one class."""
    net = Net("unet", (batch, 3, side, side))
    x, features = net.image, []
    for maps in (64, 128, 256, 512):
        x = _conv(net, _conv(net, x, maps, 3), maps, 3)
        features.append(x)
        x = net.pool(x, 2, 2)
    x = _conv(net, _conv(net, x, 1024, 3), 1024, 3)
    for skip in reversed(features):
        maps = channels(skip)
        x = net.concat(skip, net.deconv(x, maps, 2, 2))
        x = _conv(net, _conv(net, x, maps, 3), maps, 3)
    return net.model(net.conv(x, 1, bias=True))
