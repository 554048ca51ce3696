"""YOLO from version 5 to 26 and YOLOX, rebuilt from their published layer tables."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from scripts.networks.graph import Net, channels, dims, size

CLASSES = 80
Block = Callable[[Net, ir.Value, int], ir.Value]


def wide(value: float) -> int:
    """Round channels up to a multiple of 8."""
    return -(-int(value) // 8) * 8


def conv(
    net: Net, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1, *, group: int = 1
) -> ir.Value:
    """Convolve, normalise and apply SiLU."""
    return net.silu(net.norm(net.conv(x, maps, kernel, stride, group=group)))


def plain(
    net: Net, x: ir.Value, maps: int, kernel: int = 1, stride: int = 1, *, group: int = 1
) -> ir.Value:
    """Convolve and normalise."""
    return net.norm(net.conv(x, maps, kernel, stride, group=group))


def bottleneck(
    net: Net, x: ir.Value, maps: int, *, kernels: tuple[int, int], share: float, add: bool = True
) -> ir.Value:
    """Two convolutions, the first to a share of the maps, with the input added."""
    y = conv(net, x, int(maps * share), kernels[0])
    y = conv(net, y, maps, kernels[1])
    return net.add(y, x) if add and channels(x) == maps else y


def c3(
    net: Net, x: ir.Value, maps: int, count: int, *, add: bool = True, kernel: int = 1
) -> ir.Value:
    """Cross-stage block of versions 5 and 11: two branches, one with bottlenecks."""
    half = maps // 2
    y = conv(net, x, half)
    for _ in range(count):
        y = bottleneck(net, y, half, kernels=(kernel, 3), share=1.0, add=add)
    return conv(net, net.concat(y, conv(net, x, half)), maps)


def c2f(net: Net, x: ir.Value, maps: int, parts: Sequence[Block], share: float = 0.5) -> ir.Value:
    """Split in two, pass the second half through blocks, concatenate all results."""
    half = int(maps * share)
    first, last = net.split(conv(net, x, 2 * half), half, half)
    features = [first, last]
    for part in parts:
        last = part(net, last, half)
        features.append(last)
    return conv(net, net.concat(*features), maps)


def _both3(*, add: bool) -> Block:
    return lambda net, x, maps: bottleneck(net, x, maps, kernels=(3, 3), share=1.0, add=add)


def sppf(net: Net, x: ir.Value, maps: int, *, newest: bool = False) -> ir.Value:
    """Three poolings in sequence, concatenated; the newest form adds its input."""
    half = channels(x) // 2
    features = [plain(net, x, half) if newest else conv(net, x, half)]
    for _ in range(3):
        features.append(net.pool(features[-1], 5, 1, pad=2))
    y = conv(net, net.concat(*features), maps)
    return net.add(y, x) if newest else y


def _positions(features: Sequence[ir.Value]) -> int:
    return sum(size(x)[0] * size(x)[1] for x in features)


def _flat(net: Net, features: Sequence[ir.Value]) -> ir.Value:
    """Concatenate feature maps of several scales along positions: (N, C, positions)."""
    rows = []
    for x in features:
        high, width = size(x)
        rows.append(net.reshape(x, dims(x)[0], channels(x), high * width))
    return net.concat(*rows, axis=2)


def _boxes(net: Net, sides: ir.Value, strides: bool = True) -> ir.Value:
    """Turn distances to four sides into boxes (N, 4, positions)."""
    batch, _, count = dims(sides)
    near, far = net.split(sides, 2, 2)
    grid = net.weight(1, 2, count)
    low, high = net.op("Sub", [grid, near], (batch, 2, count)), net.add(far, grid)
    boxes = net.concat(low, high)
    return net.mul(boxes, net.weight(1, 1, count)) if strides else boxes


def detect(net: Net, features: Sequence[ir.Value], *, form: str) -> ir.Model:
    """Add the head without anchors of versions 8 to 26.

    `form`: "v8", "v9" (grouped box branch), "11" (separable classes), "v10" (as 11, then the best
    300) or "26" (as v10 but four distances without distribution).
    """
    first, bins = channels(features[0]), 1 if form == "26" else 16
    box_maps = max(16, first // 4, 4 * bins)
    class_maps = max(first, CLASSES)
    boxes, scores = [], []
    for x in features:
        group = 4 if form == "v9" else 1
        y = conv(net, conv(net, x, box_maps, 3), box_maps, 3, group=group)
        boxes.append(net.conv(y, 4 * bins, group=group, bias=True))
        y = x
        for _ in range(2):
            if form in ("11", "v10", "26"):
                y = conv(net, conv(net, y, channels(y), 3, group=channels(y)), class_maps)
            else:
                y = conv(net, y, class_maps, 3)
        scores.append(net.conv(y, CLASSES, bias=True))
    sides = _flat(net, boxes)
    classes = net.unary("Sigmoid", _flat(net, scores))
    batch, count = dims(sides)[0], _positions(features)
    if bins > 1:
        sides = net.transpose(net.reshape(sides, batch, 4, bins, count), 0, 2, 1, 3)
        sides = net.reshape(net.conv(net.softmax(sides, axis=1), 1), batch, 4, count)
    boxes = _boxes(net, sides)
    if form in ("v10", "26"):
        return _best(net, boxes, classes)
    if form == "v9":
        return suppressed(net, boxes, classes)
    return net.model(net.concat(boxes, classes))


def _best(net: Net, boxes: ir.Value, classes: ir.Value) -> ir.Model:
    """Take the best 300 by class score."""
    batch, _, count = dims(boxes)
    rows = net.transpose(net.concat(boxes, classes), 0, 2, 1)
    box, score = net.split(rows, 4, CLASSES, axis=2)
    best = net.op("ReduceMax", [score], (batch, count, 1), axes=(2,), keepdims=1)
    most = min(300, count)
    output_shapes = [(batch, most, 1), (batch, most, 1)]
    index = net.ops("TopK", [best, net.constant([most])], output_shapes, attributes={"axis": 1})[1]
    index.type = ir.TensorType(ir.DataType.INT64)
    picked = []
    for part, width in ((box, 4), (score, CLASSES)):
        shape = (batch, most, width)
        wide_index = net.op("Expand", [index, net.constant(shape)], shape)
        wide_index.type = ir.TensorType(ir.DataType.INT64)
        picked.append(net.op("GatherElements", [part, wide_index], shape, axis=1))
    return net.model(net.concat(*picked, axis=2))


def suppressed(net: Net, boxes: ir.Value, classes: ir.Value) -> ir.Model:
    """End with TensorRT's fused suppression, 100 boxes."""
    batch = dims(boxes)[0]
    rows = net.transpose(boxes, 0, 2, 1), net.transpose(classes, 0, 2, 1)
    return net.model(net.plugin("EfficientNMS_TRT", rows, (batch, 100, 4)))


def _pyramid(
    net: Net,
    features: Sequence[ir.Value],
    block: Callable[[int, ir.Value], ir.Value],
    down: Callable[[int, ir.Value], ir.Value],
) -> list[ir.Value]:
    """Merge three scales top-down, then bottom-up; `block` 0..3 and `down` 0..1 in that order."""
    p3, p4, p5 = features
    m4 = block(0, net.concat(net.upsample(p5), p4))
    o3 = block(1, net.concat(net.upsample(m4), p3))
    o4 = block(2, net.concat(down(0, o3), m4))
    o5 = block(3, net.concat(down(1, o4), p5))
    return [o3, o4, o5]


def yolov5(scale: str, side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv5 (version 6), its three raw output maps with 3 anchors each."""
    depth, width = {"n": (1 / 3, 0.25), "s": (1 / 3, 0.5), "m": (2 / 3, 0.75)}[scale]
    net = Net(f"yolov5{scale}", (batch, 3, side, side))
    x = net.silu(net.norm(net.conv(net.image, wide(64 * width), 6, 2, pad=2)))
    features = []
    for maps, count in ((128, 3), (256, 6), (512, 9), (1024, 3)):
        x = conv(net, x, wide(maps * width), 3, 2)
        x = c3(net, x, wide(maps * width), max(1, round(count * depth)))
        features.append(x)
    x = sppf(net, x, wide(1024 * width))
    repeats = max(1, round(3 * depth))
    t5 = conv(net, x, wide(512 * width))
    m4 = c3(net, net.concat(net.upsample(t5), features[2]), wide(512 * width), repeats, add=False)
    t4 = conv(net, m4, wide(256 * width))
    o3 = c3(net, net.concat(net.upsample(t4), features[1]), wide(256 * width), repeats, add=False)
    o4 = net.concat(conv(net, o3, wide(256 * width), 3, 2), t4)
    o4 = c3(net, o4, wide(512 * width), repeats, add=False)
    o5 = net.concat(conv(net, o4, wide(512 * width), 3, 2), t5)
    o5 = c3(net, o5, wide(1024 * width), repeats, add=False)
    return net.model(*[net.conv(y, 3 * (CLASSES + 5), bias=True) for y in (o3, o4, o5)])


_V8 = {"n": (1 / 3, 0.25, 1024), "s": (1 / 3, 0.5, 1024), "m": (2 / 3, 0.75, 768)}


def yolov8(scale: str, side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv8 with boxes decoded and no suppression."""
    depth, width, most = _V8[scale]
    net = Net(f"yolov8{scale}", (batch, 3, side, side))

    def channels_of(maps: int) -> int:
        return wide(min(maps, most) * width)

    def block(x: ir.Value, maps: int, count: int, *, add: bool) -> ir.Value:
        return c2f(net, x, channels_of(maps), [_both3(add=add)] * max(1, round(count * depth)))

    x, pyramid = conv(net, net.image, channels_of(64), 3, 2), []
    for maps, count in ((128, 3), (256, 6), (512, 6), (1024, 3)):
        x = block(conv(net, x, channels_of(maps), 3, 2), maps, count, add=True)
        pyramid.append(x)
    pyramid[-1] = sppf(net, x, channels_of(1024))
    maps_of = (512, 256, 512, 1024)
    features = _pyramid(
        net,
        pyramid[1:],
        lambda i, y: block(y, maps_of[i], 3, add=False),
        lambda i, y: conv(net, y, channels_of((256, 512)[i]), 3, 2),
    )
    return detect(net, features, form="v8")


def _cib(*, add: bool, large: bool) -> Block:
    """Depthwise and 1x1 in turns; `large`: a 7x7 in the middle."""

    def block(net: Net, x: ir.Value, maps: int) -> ir.Value:
        y = conv(net, x, maps, 3, group=maps)
        y = conv(net, y, 2 * maps)
        y = conv(net, y, 2 * maps, 7 if large else 3, group=2 * maps)
        y = conv(net, conv(net, y, maps), maps, 3, group=maps)
        return net.add(y, x) if add else y

    return block


def attention(net: Net, x: ir.Value, heads: int) -> ir.Value:
    """Attend over all positions, with a depthwise position code."""
    maps, (high, width) = channels(x), size(x)
    batch, count = dims(x)[0], high * width
    per, key = maps // heads, maps // heads // 2
    joined = net.reshape(plain(net, x, maps + 2 * heads * key), batch, heads, per + 2 * key, count)
    query, keys, value = net.split(joined, key, key, per, axis=2)
    weights = net.matmul(net.transpose(query, 0, 1, 3, 2), keys)
    weights = net.softmax(net.mul(weights, net.constant([key**-0.5])))
    y = net.matmul(value, net.transpose(weights, 0, 1, 3, 2))
    coded = plain(net, net.reshape(value, batch, maps, high, width), maps, 3, group=maps)
    return plain(net, net.add(net.reshape(y, batch, maps, high, width), coded), maps)


def attention_block(net: Net, x: ir.Value, heads: int) -> ir.Value:
    """Attention and a 1x1 perceptron, each added to its input."""
    x = net.add(x, attention(net, x, heads))
    return net.add(x, plain(net, conv(net, x, 2 * channels(x)), channels(x)))


def psa(net: Net, x: ir.Value, count: int = 1) -> ir.Value:
    """Attend with half of the channels."""
    maps, half = channels(x), channels(x) // 2
    features, y = net.split(conv(net, x, 2 * half), half, half)
    for _ in range(count):
        y = attention_block(net, y, max(1, half // 64))
    return conv(net, net.concat(features, y), maps)


_V10_LARGE = {"n": {7}, "s": {3, 7}, "m": set[int]()}
_V10_CIB = {"n": {7}, "s": {3, 7}, "m": {3, 6, 7}}


def yolov10(scale: str, side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv10 with the best 300 boxes and no suppression."""
    depth, width, most = _V8[scale]
    net = Net(f"yolov10{scale}", (batch, 3, side, side))

    def channels_of(maps: int) -> int:
        return wide(min(maps, most) * width)

    def block(x: ir.Value, maps: int, count: int, place: int) -> ir.Value:
        part = _both3(add=place < 4)
        if place in _V10_CIB[scale]:
            part = _cib(add=True, large=place in _V10_LARGE[scale])
        return c2f(net, x, channels_of(maps), [part] * max(1, round(count * depth)))

    def down(x: ir.Value, maps: int) -> ir.Value:
        return plain(
            net, conv(net, x, channels_of(maps)), channels_of(maps), 3, 2, group=channels_of(maps)
        )

    x, pyramid = conv(net, net.image, channels_of(64), 3, 2), []
    for place, (maps, count) in enumerate(((128, 3), (256, 6), (512, 6), (1024, 3))):
        x = down(x, maps) if place > 1 else conv(net, x, channels_of(maps), 3, 2)
        x = block(x, maps, count, place)
        pyramid.append(x)
    pyramid[-1] = psa(net, sppf(net, x, channels_of(1024)))
    maps_of = (512, 256, 512, 1024)
    features = _pyramid(
        net,
        pyramid[1:],
        lambda i, y: block(y, maps_of[i], 3, 4 + i),
        lambda i, y: conv(net, y, channels_of(256), 3, 2) if i == 0 else down(y, 512),
    )
    return detect(net, features, form="v10")


_V11 = {
    "n": (0.5, 0.25, 1024),
    "s": (0.5, 0.5, 1024),
    "m": (0.5, 1.0, 512),
    "l": (1.0, 1.0, 512),
    "x": (1.0, 1.5, 512),
}


def _c3k(*, add: bool = True) -> Block:
    return lambda net, x, maps: c3(net, x, maps, 2, add=add, kernel=3)


def _half3(net: Net, x: ir.Value, maps: int) -> ir.Value:
    return bottleneck(net, x, maps, kernels=(3, 3), share=0.5)


def _attending(net: Net, x: ir.Value, maps: int) -> ir.Value:
    return attention_block(net, _half3(net, x, maps), max(1, maps // 64))


def yolo11(scale: str, side: int, batch: int = 1, *, version: int = 11) -> ir.Model:
    """Return YOLO11, or YOLO26, which differs in its pooling, last block and head."""
    depth, width, most = _V11[scale]
    newest = version == 26
    net = Net(f"yolo{version}{scale}", (batch, 3, side, side))

    def channels_of(maps: int) -> int:
        return wide(min(maps, most) * width)

    def block(x: ir.Value, maps: int, *, deep: bool, share: float = 0.5) -> ir.Value:
        part = _c3k() if deep or scale in "mlx" else _half3
        return c2f(net, x, channels_of(maps), [part] * max(1, round(2 * depth)), share)

    x, pyramid = conv(net, net.image, channels_of(64), 3, 2), []
    rows = ((128, 256, False, 0.25), (256, 512, False, 0.25), (512, 512, True, 0.5))
    for maps, after, deep, share in (*rows, (1024, 1024, True, 0.5)):
        x = block(conv(net, x, channels_of(maps), 3, 2), after, deep=deep, share=share)
        pyramid.append(x)
    pyramid[-1] = psa(net, sppf(net, x, channels_of(1024), newest=newest), max(1, round(2 * depth)))
    maps_of = (512, 256, 512, 1024)

    def merged(index: int, y: ir.Value) -> ir.Value:
        if newest and index == 3:
            return c2f(net, y, channels_of(1024), [_attending])
        return block(y, maps_of[index], deep=newest or index == 3)

    features = _pyramid(
        net,
        pyramid[1:],
        merged,
        lambda i, y: conv(net, y, channels_of((256, 512)[i]), 3, 2),
    )
    return detect(net, features, form="26" if newest else "11")


def _elan1(net: Net, x: ir.Value, maps: int, inner: int, side: int) -> ir.Value:
    first, last = net.split(conv(net, x, inner), inner // 2, inner // 2)
    a = conv(net, last, side, 3)
    return conv(net, net.concat(first, last, a, conv(net, a, side, 3)), maps)


def _csp9(net: Net, x: ir.Value, maps: int, count: int) -> ir.Value:
    half = maps // 2
    y = conv(net, x, half)
    for _ in range(count):
        y = bottleneck(net, y, half, kernels=(3, 3), share=1.0)
    return conv(net, net.concat(y, conv(net, x, half)), maps)


def _elan4(net: Net, x: ir.Value, maps: int, count: int) -> ir.Value:
    half = maps // 2
    first, last = net.split(conv(net, x, maps), half, half)
    features = [first, last]
    for _ in range(2):
        features.append(conv(net, _csp9(net, features[-1], half, count), half, 3))
    return conv(net, net.concat(*features), maps)


# Maps of the four stages, of the merging blocks and of the two ways down; repeats in a block.
_V9 = {
    "t": ((32, 64, 96, 128), (96, 64, 96, 128), (48, 64), 3),
    "s": ((64, 128, 192, 256), (192, 128, 192, 256), (96, 128), 3),
    "m": ((128, 240, 360, 480), (360, 240, 360, 480), (180, 240), 1),
}


def yolov9(scale: str, side: int, batch: int = 1) -> ir.Model:
    """Return YOLOv9 as converted for use, reparameterised, with TensorRT's suppression."""
    stages, merged, downs, count = _V9[scale]
    net = Net(f"yolov9{scale}", (batch, 3, side, side))

    def down(x: ir.Value, maps: int) -> ir.Value:
        return conv(net, net.pool(x, 2, 1, kind="AveragePool"), maps, 3, 2)

    stem = 16 if scale == "t" else 32
    x, pyramid = conv(net, conv(net, net.image, stem, 3, 2), 2 * stem, 3, 2), []
    for place, maps in enumerate(stages):
        if place:
            x = down(x, maps)
        if place == 0 and scale != "m":
            x = _elan1(net, x, maps, maps, maps // 2)
        else:
            x = _elan4(net, x, maps, count)
        pyramid.append(x)
    pooled = [conv(net, x, stages[3] // 2)]
    for _ in range(3):
        pooled.append(net.pool(pooled[-1], 5, 1, pad=2))
    pyramid[-1] = conv(net, net.concat(*pooled), stages[3])
    features = _pyramid(
        net,
        pyramid[1:],
        lambda i, y: _elan4(net, y, merged[i], count),
        lambda i, y: down(y, downs[i]),
    )
    return detect(net, features, form="v9")
