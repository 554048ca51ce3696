"""Every rewrite gives the numbers of what it replaces, and only nodes that the DLA takes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from gpu_graphs import ints
from legalize_graphs import ORIN, XAVIER, Net, assert_same, floats, legalized, node, refused

from device.engine.manifest import Precision
from device.profile import Dla
from toolkit.dla.legalize.rows import REWRITES

Rng = np.random.Generator
ROWS = {row.id: row for row in REWRITES}
SEEDS = range(4)


@dataclass(frozen=True)
class Case:
    """Random networks that one rewrite turns, whole but its borders, into nodes for the DLA.

    `also` are rewrites that must help it, `kept` operators that stay on the GPU all the same.
    """

    rewrite: str
    name: str
    make: Callable[[Rng], Net]
    dla: Dla | None = ORIN
    tensorrt: str | None = "10.3.0"
    also: tuple[str, ...] = ()
    kept_types: tuple[str, ...] = ()
    precision: Precision = "int8"


def size(rng: Rng, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def choose(rng: Rng, values: list) -> int:
    return values[int(rng.integers(len(values)))]


def one(op: str, shape: tuple[int, ...], opset: int = 19, **attributes: object) -> Net:
    return Net([node(op, "x", "y", **attributes)], {"x": shape}, opset=opset)


def with_constants(
    op: str, shape: tuple[int, ...], *constants: np.ndarray, opset: int = 19, **attributes: object
) -> Net:
    names = [f"c{index}" for index in range(len(constants))]
    weights = dict(zip(names, constants, strict=True))
    return Net(
        [node(op, " ".join(["x", *names]), "y", **attributes)], {"x": shape}, weights, opset=opset
    )


def batch(rng: Rng) -> int:
    return size(rng, 1, 3)


def reduction(op: str, shape: tuple[int, ...], axes: tuple[int, ...], rng: Rng) -> Net:
    """A reduction with its axes as an attribute or as an input, whichever the opset has."""
    opset = choose(rng, [13, 17, 18, 19, 21])
    if opset < 18 and op != "ReduceSum":
        return one(op, shape, opset, axes=axes, keepdims=1)
    return with_constants(op, shape, ints(*axes), opset=opset, keepdims=1)


def dropped_axes(op: str, rng: Rng) -> Net:
    axes = choose(rng, [(2, 3), (1, 2, 3), (1,)] if op == "ReduceMax" else [(2, 3)])
    shape = batch(rng), size(rng, 2, 5), size(rng, 2, 8), size(rng, 2, 8)
    if size(rng, 0, 1):
        return one(op, shape, 17, axes=axes, keepdims=0)
    return with_constants(op, shape, ints(*axes), keepdims=0)


def smooth(rng: Rng) -> int:
    return choose(rng, [9, 10, 12, 14, 16, 20, 21, 28, 35, 40, 48, 56, 64])


def rough(rng: Rng) -> int:
    return choose(rng, [37, 41, 43, 47, 53, 61, 67, 11 * 13])


def head(rng: Rng) -> Net:
    n, c, h, w = batch(rng), size(rng, 1, 6), size(rng, 1, 4), size(rng, 1, 4)
    hidden, out_maps = size(rng, 1, 9), size(rng, 1, 9)
    transposed = size(rng, 0, 1)
    first = floats(rng, c * h * w, hidden)
    weights = {
        "w": first.T.copy() if transposed else first,
        "b": floats(rng, hidden),
        "v": floats(rng, hidden, out_maps),
        "s": floats(rng, out_maps),
    }
    flatten = choose(rng, ["Flatten", "Reshape"])
    if flatten == "Reshape":
        weights["shape"] = ints(n, -1)
    nodes = [
        node("Relu", "x", "r"),
        node(flatten, "r shape" if flatten == "Reshape" else "r", "f"),
        node("Gemm", "f w b", "g", transB=transposed, alpha=0.5, beta=2.0),
        node(choose(rng, ["Relu", "Sigmoid", "Tanh", "LeakyRelu"]), "g", "a"),
        node("MatMul", "a v", "m"),
        node("Add", choose(rng, ["m s", "s m"]), "p"),
        node("Softmax", "p", "y", axis=1),
    ]
    return Net(nodes, {"x": (n, c, h, w)}, weights, opset=choose(rng, [13, 17, 19, 21]))


def squeeze_and_excite(rng: Rng) -> Net:
    n, c, h = batch(rng), 4 * size(rng, 1, 4), size(rng, 2, 8)
    weights = {"w": floats(rng, c, 4), "v": floats(rng, 4, c), "wide": ints(n, c, 1, 1)}
    nodes = [
        node("Relu", "x", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f w", "g"),
        node("Relu", "g", "a"),
        node("Gemm", "a v", "e"),
        node("HardSigmoid", "e", "s", alpha=1 / 6),
        node("Reshape", "s wide", "t"),
        node("Mul", "r t", "y"),
    ]
    return Net(nodes, {"x": (n, c, h, h)}, weights)


def one_dimension(rng: Rng) -> Net:
    n, c, length = batch(rng), size(rng, 1, 5), size(rng, 12, 40)
    weights = {
        "w": floats(rng, 4, c, 3),
        "b": floats(rng, 4),
        "v": floats(rng, 6, 4, 5),
        "scale": floats(rng, 4),
        "shift": floats(rng, 4),
        "mean": floats(rng, 4),
        "var": rng.uniform(0.5, 2, 4).astype(np.float32),
        "per": floats(rng, 1, 6, 1),
    }
    nodes = [
        node("Conv", "x w b", "c", pads=[1, 1]),
        node("BatchNormalization", "c scale shift mean var", "n"),
        node("HardSwish", "n", "h"),
        node("MaxPool", "h", "m", kernel_shape=[2], strides=[2]),
        node("Conv", "m v", "d", dilations=[1], pads=[4, 0], strides=[choose(rng, [1, 2])]),
        node("Mul", "d per", "e"),
        node("Concat", "e d", "k", axis=1),
        node("GlobalAveragePool", "k", "y"),
    ]
    return Net(nodes, {"x": (n, c, length)}, weights)


def channel_shuffle(rng: Rng) -> Net:
    n, groups, per = batch(rng), size(rng, 2, 4), size(rng, 2, 5)
    h, w = size(rng, 1, 6), size(rng, 1, 6)
    weights = {"split": ints(n, groups, per, h, w), "join": ints(n, groups * per, h, w)}
    nodes = [
        node("Relu", "x", "r"),
        node("Reshape", "r split", "s"),
        node("Transpose", "s", "t", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "t join", "j"),
        node("Relu", "j", "y"),
    ]
    return Net(nodes, {"x": (n, groups * per, h, w)}, weights)


def pixels(rng: Rng, *, shuffle: bool) -> Net:
    n, c, b, h, w = batch(rng), size(rng, 1, 3), size(rng, 2, 3), size(rng, 1, 4), size(rng, 1, 4)
    if shuffle:
        came, split, joined = (n, c * b * b, h, w), (n, c, b, b, h, w), (n, c, h * b, w * b)
        order = [0, 1, 4, 2, 5, 3]
    else:
        came, split, joined = (n, c, h * b, w * b), (n, c, h, b, w, b), (n, c * b * b, h, w)
        order = choose(rng, [[0, 1, 3, 5, 2, 4], [0, 3, 5, 1, 2, 4]])
    nodes = [
        node("Reshape", "x split", "s"),
        node("Transpose", "s", "t", perm=order),
        node("Reshape", "t join", "y"),
    ]
    return Net(nodes, {"x": came}, {"split": ints(*split), "join": ints(*joined)})


def detector(rng: Rng) -> Net:
    n, anchors, per, h = batch(rng), size(rng, 2, 3), size(rng, 4, 7), size(rng, 2, 6)
    weights = {"split": ints(n, anchors, per, h, h), "w": floats(rng, anchors * per, 4, 1, 1)}
    nodes = [
        node("Conv", "x w", "c"),
        node("Reshape", "c split", "s"),
        node("Transpose", "s", "t", perm=[0, 1, 3, 4, 2]),
        node(choose(rng, ["Sigmoid", "Tanh"]), "t", "y"),
    ]
    return Net(nodes, {"x": (n, 4, h, h)}, weights)


def clip(rng: Rng, low: float | None, high: float | None) -> Net:
    weights = {k: np.array(v, np.float32) for k, v in (("l", low), ("u", high)) if v is not None}
    names = f"x {'-' if low is None else 'l'} {'-' if high is None else 'u'}"
    shape = (batch(rng), size(rng, 1, 8), size(rng, 1, 9), size(rng, 1, 9))
    return Net([node("Clip", names, "y")], {"x": shape}, weights, opset=choose(rng, [13, 19]))


def image_shape(rng: Rng) -> tuple[int, int, int, int]:
    return batch(rng), size(rng, 2, 9), size(rng, 2, 9), size(rng, 2, 9)


def max_pool(rng: Rng) -> Net:
    kernel = [size(rng, 1, 25), size(rng, 9, 25)]
    pads = [size(rng, 0, k - 1) for k in (*kernel, *kernel)]
    shape = (batch(rng), size(rng, 1, 3), size(rng, 25, 40), size(rng, 25, 40))
    return one(
        "MaxPool",
        shape,
        kernel_shape=kernel,
        pads=pads,
        strides=[size(rng, 1, 16), size(rng, 1, 16)],
    )


def average_pool(rng: Rng, kernel: list[int], strides: list[int], **attributes: object) -> Net:
    shape = (batch(rng), size(rng, 1, 5), size(rng, 33, 45), size(rng, 33, 45))
    return one("AveragePool", shape, kernel_shape=kernel, strides=strides, **attributes)


def excluding(rng: Rng) -> Net:
    kernel = [size(rng, 2, 5), size(rng, 2, 5)]
    pads = [size(rng, 0, k - 1) for k in (*kernel, *kernel)]
    pads[0] = 1
    strides = [size(rng, 1, 3), size(rng, 1, 3)]
    shape = (batch(rng), size(rng, 1, 5), size(rng, 6, 12), size(rng, 6, 12))
    return one("AveragePool", shape, kernel_shape=kernel, strides=strides, pads=pads)


def divide(rng: Rng) -> Net:
    shape = image_shape(rng)
    divisor = rng.uniform(0.1, 9, choose(rng, [(), (1,), (1, shape[1], 1, 1), shape[1:]]))
    return with_constants("Div", shape, divisor.astype(np.float32))


def subtract(rng: Rng) -> Net:
    shape = image_shape(rng)
    form = choose(rng, ["x z", "x c", "c x"])
    weights = {"c": floats(rng, 1, shape[1], 1, 1)} if "c" in form else {}
    inputs = {"x": shape, "z": shape} if "z" in form else {"x": shape}
    return Net([node("Sub", form, "y")], inputs, weights)


def broadcast(rng: Rng, *, computed: bool) -> Net:
    shape = image_shape(rng)
    n, c, h, w = shape
    form = choose(rng, [(n, 1, h, w), (n, 1, 1, w), (n, c, h, 1), (n, 1, h, 1)])
    op = choose(rng, ["Add", "Mul", "Sub", "Max", "Min"])
    if computed:
        nodes = [node("Relu", "z", "r"), node(op, "x r", "y")]
        return Net(nodes, {"x": shape, "z": form})
    constant = floats(rng, *form[size(rng, 0, 1) if n == 1 else 1 :])
    return with_constants(op, shape, constant)


def expand(rng: Rng) -> Net:
    n, c, h, w = image_shape(rng)
    form = choose(rng, [(n, 1, h, w), (n, c, 1, 1), (n, 1, 1, w), (n, 1, 1, 1)])
    if size(rng, 0, 1):
        return with_constants("Expand", form, ints(1, c, h, w))
    times = [a // b for a, b in zip((n, c, h, w), form, strict=True)]
    return with_constants("Tile", form, ints(*times))


def where(rng: Rng) -> Net:
    n, c, h, w = image_shape(rng)
    mask = rng.random(choose(rng, [(1, c, 1, 1), (c, 1, 1), (1, c, h, w), (1,)])) < 0.5
    nodes = [node("Where", "m x z", "y")]
    return Net(nodes, {"x": (n, c, h, w), "z": (n, c, h, w)}, {"m": mask})


def focus(rng: Rng) -> Net:
    n, c, b = batch(rng), size(rng, 1, 4), size(rng, 2, 3)
    h, w = b * size(rng, 2, 5), b * size(rng, 2, 5)
    weights = {"big": ints(2**31 - 1), "rows": ints(2), "columns": ints(3), "step": ints(b)}
    nodes, parts = [], []
    for i, j in rng.permutation([(i, j) for i in range(b) for j in range(b)]).tolist():
        weights[f"s{i}"], weights[f"s{j}"] = ints(i), ints(j)
        nodes.append(node("Slice", f"x s{i} big rows step", f"r{i}{j}"))
        nodes.append(node("Slice", f"r{i}{j} s{j} big columns step", f"p{i}{j}"))
        parts.append(f"p{i}{j}")
    nodes.append(node("Concat", " ".join(parts), "y", axis=1))
    return Net(nodes, {"x": (n, c, h, w)}, weights)


def cut(rng: Rng, *, stride: bool) -> Net:
    shape = batch(rng), size(rng, 4, 9), size(rng, 8, 30), size(rng, 8, 30)
    starts, ends, steps = [], [], []
    for axis in (1, 2, 3):
        step = size(rng, 2, 8) if stride and axis > 1 else 1
        start = size(rng, 0, shape[axis] // 3)
        starts.append(start)
        ends.append(size(rng, start + 1, shape[axis]))
        steps.append(step)
    return with_constants("Slice", shape, ints(*starts), ints(*ends), ints(1, 2, 3), ints(*steps))


def split(rng: Rng) -> Net:
    shape = batch(rng), size(rng, 3, 9), size(rng, 3, 30), size(rng, 3, 30)
    axis = size(rng, 1, 3)
    first = size(rng, 1, shape[axis] - 2)
    second = size(rng, 1, shape[axis] - first - 1)
    parts = ints(first, second, shape[axis] - first - second)
    nodes = [node("Split", "x parts", "a b c", axis=axis)]
    return Net(nodes, {"x": shape}, {"parts": parts}, ["c", "a", "b"])


def gather(rng: Rng, *, following: bool) -> Net:
    shape = image_shape(rng)
    if following:
        axis = size(rng, 1, 3)
        first = size(rng, 0, shape[axis] - 1)
        indices = ints(*range(first, size(rng, first + 1, shape[axis])))
        return with_constants("Gather", shape, indices - choose(rng, [0, shape[axis]]), axis=axis)
    indices = rng.integers(-shape[1], shape[1], size(rng, 2, 12))
    indices[:2] = 1, 0
    return with_constants("Gather", shape, indices, axis=1)


def pad(rng: Rng, *, conv: bool) -> Net:
    opset = choose(rng, [13, 18, 19])
    shape = batch(rng), size(rng, 1, 4), size(rng, 6, 12), size(rng, 6, 12)
    top, left, bottom, right = (size(rng, 0, 2) for _ in range(4))
    weights = {"p": ints(0, 0, 1 + top, left, 0, 0, bottom, right)}
    if opset >= 18 and size(rng, 0, 1):
        weights = {"p": ints(1 + top, left, bottom, right), "a": ints(2, 3)}
    nodes = [node("Pad", "x p - a" if "a" in weights else "x p", "q")]
    if conv:
        weights |= {"w": floats(rng, 4, shape[1], 5, 5), "b": floats(rng, 4)}
        nodes.append(node("Conv", "q w b", "y", pads=[1, 1, 1, 1], strides=[2, 1]))
    return Net(nodes, {"x": shape}, weights, opset=opset)


def cumulative(rng: Rng) -> Net:
    flags = {"exclusive": size(rng, 0, 1), "reverse": size(rng, 0, 1)}
    axis = np.array(choose(rng, [1, -3]), np.int64)
    return with_constants("CumSum", image_shape(rng), axis, **flags)


def concat(rng: Rng) -> Net:
    n, c, h, w = image_shape(rng)
    axis = size(rng, 2, 3)
    shapes = [[n, c, h, w] for _ in range(3)]
    for shape in shapes:
        shape[axis] = size(rng, 1, 5)
    inputs = {f"x{i}": shape for i, shape in enumerate(shapes)}
    return Net([node("Concat", "x0 x1 x2", "y", axis=choose(rng, [axis, axis - 4]))], inputs)


def deconv(rng: Rng, *, padded: bool, groups: bool = False) -> Net:
    group = choose(rng, [2, 3]) if groups else 1
    came, out_maps = group * size(rng, 1, 3), size(rng, 1, 3)
    kernel = [size(rng, 2, 5), size(rng, 2, 5)]
    strides = [size(rng, 1, 4), size(rng, 1, 4)]
    dilations = [size(rng, 1, 3), size(rng, 1, 3)] if groups else [1, 1]
    weights = {"w": floats(rng, came, out_maps, *kernel), "b": floats(rng, out_maps * group)}
    attributes: dict[str, object] = {"strides": strides, "dilations": dilations, "group": group}
    if padded:
        attributes["pads"] = [1, *(size(rng, 0, k - 1) for k in (kernel[1], *kernel))]
        attributes["output_padding"] = [size(rng, 0, s - 1) for s in strides]
    shape = batch(rng), came, size(rng, 4, 8), size(rng, 4, 8)
    return Net([node("ConvTranspose", "x w b", "y", **attributes)], {"x": shape}, weights)


def grouped(rng: Rng) -> Net:
    groups, came, out_maps = size(rng, 2, 4), choose(rng, [1, 2, 3, 5]), choose(rng, [2, 3, 5])
    weights = {"w": floats(rng, out_maps * groups, came, 3, 3), "b": floats(rng, out_maps * groups)}
    attributes = {"group": groups, "pads": [1, 0, 2, 1], "strides": [2, 1]}
    if came == 1:
        weights = {
            "w": floats(rng, out_maps * groups, 2, 3, 3),
            "b": floats(rng, out_maps * groups),
        }
        came = 2
    shape = batch(rng), came * groups, size(rng, 5, 9), size(rng, 5, 9)
    return Net([node("Conv", "x w b", "y", **attributes)], {"x": shape}, weights)


NEAREST = [
    ("asymmetric", "floor", [2, 3, 32]),
    ("asymmetric", "round_prefer_floor", [1, 2]),
    ("half_pixel", "round_prefer_ceil", [2, 3]),
    ("half_pixel_symmetric", "round_prefer_floor", [2, 4]),
    ("pytorch_half_pixel", "round_prefer_floor", [2, 3]),
    ("tf_half_pixel_for_nn", "floor", [2, 5]),
]


def resize(rng: Rng, mode: str, forms: list) -> Net:
    coordinates, rounding, scales = forms[int(rng.integers(len(forms)))]
    n, c, h, w = batch(rng), size(rng, 1, 3), size(rng, 2, 5), size(rng, 2, 5)
    down, across = (scales[size(rng, 0, len(scales) - 1)] for _ in range(2))
    opset = 19 if coordinates == "half_pixel_symmetric" else choose(rng, [13, 18, 19])
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if rounding:
        attributes["nearest_mode"] = rounding
    sizes = ints(n, c, h * down, w * across)
    return Net(
        [node("Resize", "x - - s", "y", **attributes)],
        {"x": (n, c, h, w)},
        {"s": sizes},
        opset=opset,
    )


def shrink(rng: Rng, mode: str) -> Net:
    n, c = batch(rng), size(rng, 1, 3)
    steps = [2 ** size(rng, 0, 4), 2 ** size(rng, 1, 4)] if mode == "nearest" else [2, 2]
    h, w = (step * size(rng, 1, 4) for step in steps)
    attributes = {"mode": mode, "coordinate_transformation_mode": "half_pixel"}
    if mode == "nearest":
        attributes |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = np.array([1, 1, 1 / steps[0], 1 / steps[1]], np.float32)
    return Net([node("Resize", "x - s", "y", **attributes)], {"x": (n, c, h, w)}, {"s": scales})


def logic(rng: Rng) -> Net:
    shape = image_shape(rng)
    first, second = (choose(rng, ["And", "Or", "Xor"]) for _ in range(2))
    nodes = [
        node("Greater", "x zero", "a"),
        node("Less", "z zero", "b"),
        node(first, "a b", "c"),
        node("Not", "c", "d"),
        node(second, "d mask", "e"),
        node("Not", "e", "f"),
        node("Where", "e x z", "w"),
        node("Cast", "f", "g", to=1),
        node("Mul", "w g", "y"),
    ]
    weights = {
        "zero": np.zeros((1, 1, 1, 1), np.float32),
        "mask": rng.random((1, shape[1], 1, 1)) < 0.5,
    }
    return Net(nodes, {"x": shape, "z": shape}, weights, ["y", "e"][: size(rng, 1, 2)])


def patches(rng: Rng) -> Net:
    stride, c = choose(rng, [10, 12, 14, 16, 20, 32]), size(rng, 1, 3)
    kernel = choose(rng, [stride, stride, stride - 1, stride // 2 + 1])
    weights = {"w": floats(rng, 5, c, kernel, kernel), "b": floats(rng, 5)}
    shape = batch(rng), c, stride * size(rng, 1, 3), stride * size(rng, 1, 3)
    return Net([node("Conv", "x w b", "y", strides=[stride] * 2)], {"x": shape}, weights)


def last_axis(rng: Rng) -> Net:
    shape = image_shape(rng)
    weights = {"w": floats(rng, shape[3], size(rng, 1, 9)), "b": floats(rng, 1)}
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "y")]
    return Net(nodes, {"x": shape}, weights)


CASES = (
    Case("conv.stride", "patches", patches),
    Case("matmul.transpose", "any", last_axis),
    Case("logic", "network", logic, kept_types=("Greater", "Less")),
    Case("lift", "head", head),
    Case("lift", "squeeze-and-excite", squeeze_and_excite, also=("mean.window", "view.identity")),
    Case("lift", "one dimension", one_dimension),
    Case("view.identity", "squeeze-and-excite", squeeze_and_excite),
    Case("view.moves", "channel shuffle", channel_shuffle),
    Case("view.moves", "pixel shuffle", lambda rng: pixels(rng, shuffle=True)),
    Case("view.moves", "pixel unshuffle", lambda rng: pixels(rng, shuffle=False)),
    Case("view.unary", "detector", detector),
    Case(
        "mean.window",
        "global",
        lambda rng: one(
            "GlobalAveragePool", (batch(rng), size(rng, 1, 9), size(rng, 2, 8), size(rng, 1, 8))
        ),
    ),
    Case(
        "mean.window",
        "axes",
        lambda rng: reduction(
            "ReduceMean",
            (2, 3, size(rng, 2, 8), size(rng, 2, 8)),
            choose(rng, [(2, 3), (2,), (3,), (-1, -2)]),
            rng,
        ),
    ),
    Case(
        "mean.cascade",
        "global",
        lambda rng: one(
            "GlobalAveragePool", (batch(rng), size(rng, 1, 9), smooth(rng), smooth(rng))
        ),
    ),
    Case(
        "mean.conv",
        "axes",
        lambda rng: reduction(
            "ReduceMean",
            (2, 3, choose(rng, [11, 13, 17, 19, 23, 29, 31]), size(rng, 1, 32)),
            (2, 3),
            rng,
        ),
    ),
    Case(
        "mean.padded",
        "global",
        lambda rng: one("GlobalAveragePool", (1, size(rng, 1, 4), rough(rng), size(rng, 1, 99))),
    ),
    Case(
        "mean.channels",
        "axes",
        lambda rng: reduction(
            "ReduceMean",
            (2, size(rng, 2, 9), size(rng, 2, 40), size(rng, 2, 40)),
            choose(rng, [(1,), (1, 2, 3), (1, -1)]),
            rng,
        ),
    ),
    Case(
        "sum.cascade",
        "axes",
        lambda rng: reduction(
            choose(rng, ["ReduceSum", "ReduceL1", "ReduceSumSquare"]),
            (2, 3, smooth(rng), smooth(rng)),
            choose(rng, [(2, 3), (2,), (3,)]),
            rng,
        ),
    ),
    Case(
        "sum.conv",
        "axes",
        lambda rng: reduction(
            choose(rng, ["ReduceSum", "ReduceL1", "ReduceSumSquare"]),
            (2, 3, choose(rng, [11, 13, 17, 19, 31]), size(rng, 1, 32)),
            (2, 3),
            rng,
        ),
    ),
    Case(
        "sum.padded",
        "axes",
        lambda rng: reduction("ReduceSum", (1, 2, rough(rng), size(rng, 1, 99)), (2, 3), rng),
    ),
    Case(
        "sum.channels",
        "axes",
        lambda rng: reduction(
            choose(rng, ["ReduceSum", "ReduceL1"]),
            (2, size(rng, 2, 9), 9, size(rng, 2, 9)),
            choose(rng, [(1,), (1, 2, 3)]),
            rng,
        ),
    ),
    Case("max.keep-dims", "any", lambda rng: dropped_axes("ReduceMax", rng)),
    Case("mean.window", "without axes", lambda rng: dropped_axes("ReduceMean", rng)),
    Case(
        "max.cascade",
        "Xavier",
        lambda rng: one("GlobalMaxPool", (2, 3, size(rng, 1, 90), size(rng, 1, 90))),
        XAVIER,
        "8.5.2",
    ),
    Case(
        "max.cascade",
        "minimum",
        lambda rng: reduction("ReduceMin", (2, 3, size(rng, 1, 90), size(rng, 1, 90)), (2, 3), rng),
    ),
    Case("max-pool.cascade", "long", max_pool),
    Case(
        "average-pool.cascade",
        "blocks",
        lambda rng: average_pool(
            rng, *([choose(rng, [9, 10, 12, 16]), choose(rng, [9, 14, 15])],) * 2
        ),
    ),
    Case(
        "average-pool.conv",
        "overlapping",
        lambda rng: average_pool(
            rng,
            [size(rng, 9, 32), size(rng, 1, 32)],
            [size(rng, 1, 7), size(rng, 1, 8)],
            pads=[1, 0, 2, 0],
            count_include_pad=1,
        ),
    ),
    Case("average-pool.inclusive-conv", "Xavier", excluding, XAVIER, "8.5.2"),
    Case("average-pool.inclusive", "Xavier", excluding, XAVIER, "8.5.2", precision="fp16"),
    Case(
        "hard-sigmoid",
        "any",
        lambda rng: one(
            "HardSigmoid",
            image_shape(rng),
            alpha=float(rng.uniform(0.1, 1)),
            beta=float(rng.uniform(-1, 1)),
        ),
    ),
    Case("hard-swish", "any", lambda rng: one("HardSwish", image_shape(rng))),
    Case("clip", "two bounds", lambda rng: clip(rng, -float(rng.uniform(0, 9)), rng.uniform(1, 9))),
    Case("clip", "narrow", lambda rng: clip(rng, -float(rng.uniform(0, 0.1)), rng.uniform(0, 0.2))),
    Case("clip", "wide", lambda rng: clip(rng, -float(rng.uniform(0, 99)), rng.uniform(128, 999))),
    Case("clip", "below", lambda rng: clip(rng, float(rng.normal()), None)),
    Case("clip", "above", lambda rng: clip(rng, None, float(rng.normal()))),
    Case("softsign", "any", lambda rng: one("Softsign", image_shape(rng))),
    Case("abs.max", "Xavier", lambda rng: one("Abs", image_shape(rng)), XAVIER, "8.5.2"),
    Case(
        "prelu.rank",
        "channels",
        lambda rng: with_constants(
            "PRelu", (2, 5, 4, 4), floats(rng, *choose(rng, [(5, 1, 1), (1,), (1, 1)]))
        ),
    ),
    Case("div.constant", "Xavier", divide, XAVIER, "8.5.2"),
    Case("sub.add", "Xavier", subtract, XAVIER, "8.0.1"),
    Case("neg.mul", "any", lambda rng: one("Neg", image_shape(rng))),
    Case(
        "pow.mul",
        "Xavier",
        lambda rng: with_constants(
            "Pow", image_shape(rng), np.array(choose(rng, [2, 3, 4]), np.float32)
        ),
        XAVIER,
        "8.5.2",
    ),
    Case(
        "mean-of-inputs",
        "any",
        lambda rng: Net([node("Mean", "a b c", "y")], dict.fromkeys("abc", (1, 3, 4, 5))),
    ),
    Case("identity.scale", "output", lambda rng: one("Identity", image_shape(rng))),
    Case("broadcast.constant", "any", lambda rng: broadcast(rng, computed=False)),
    Case("broadcast.computed", "any", lambda rng: broadcast(rng, computed=True)),
    Case("expand", "any", expand),
    Case("where.constant", "any", where),
    Case("focus.conv", "any", focus),
    Case("slice.conv", "stride", lambda rng: cut(rng, stride=True)),
    Case("slice.conv", "Xavier", lambda rng: cut(rng, stride=False), XAVIER, "8.5.2"),
    Case("split.conv", "Xavier", split, XAVIER, "8.5.2"),
    Case("gather.slice", "any", lambda rng: gather(rng, following=True)),
    Case("gather.conv", "any", lambda rng: gather(rng, following=False)),
    Case("pad.into-conv", "any", lambda rng: pad(rng, conv=True)),
    Case("pad.conv", "any", lambda rng: pad(rng, conv=False)),
    Case("cumsum.conv", "any", cumulative),
    Case("concat.transpose", "any", concat),
    Case(
        "space-to-depth.conv",
        "any",
        lambda rng: one(
            "SpaceToDepth", (2, size(rng, 1, 4), 24, 48), blocksize=choose(rng, [2, 3, 4, 6, 8])
        ),
    ),
    Case(
        "depth-to-space.deconv",
        "any",
        lambda rng: one(
            "DepthToSpace",
            (2, 2 * 36, size(rng, 1, 5), size(rng, 1, 5)),
            blocksize=choose(rng, [2, 3, 6]),
            mode=choose(rng, ["DCR", "CRD"]),
        ),
    ),
    Case("deconv.dense", "any", lambda rng: deconv(rng, padded=False, groups=True)),
    Case("deconv.slice", "padding", lambda rng: deconv(rng, padded=True)),
    Case("deconv.slice", "groups", lambda rng: deconv(rng, padded=True, groups=True)),
    Case("deconv.conv", "Xavier", lambda rng: deconv(rng, padded=True), XAVIER, "8.5.2"),
    Case("conv.dense", "any", grouped),
    Case("resize.nearest", "sizes", lambda rng: resize(rng, "nearest", NEAREST)),
    Case(
        "resize.linear",
        "sizes",
        lambda rng: resize(
            rng, "linear", [("half_pixel", "", [2, 3, 4]), ("pytorch_half_pixel", "", [1, 2, 4])]
        ),
    ),
    Case("resize.max-pool", "any", lambda rng: shrink(rng, "nearest")),
    Case("resize.average-pool", "any", lambda rng: shrink(rng, "linear")),
)

# Rewrites of operators that onnxruntime does not run: see their own tests below.
ELSEWHERE = {"swish", "gelu.tanh"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rewrite}: {case.name}")
def test_a_rewrite_keeps_the_numbers_and_frees_the_nodes(case: Case) -> None:
    for seed in SEEDS:
        rng = np.random.default_rng([seed, *case.rewrite.encode()])
        proto, result = legalized(case.make(rng), case.dla, case.tensorrt, case.precision)
        done = {item.rewrite for item in result.applied}
        assert {case.rewrite, *case.also} <= done, (seed, result.refused)
        borders = {name for item in result.applied for name in item.borders}
        remaining = {
            str(item.name) for item in result.model.graph if item.op_type in case.kept_types
        }
        assert set(refused(result.model, case.dla, case.tensorrt)) <= borders | remaining
        exact = all(ROWS[name].exact for name in done)
        assert_same(proto, result, rng, exact=exact)


def test_every_rewrite_has_a_case() -> None:
    assert {case.rewrite for case in CASES} | ELSEWHERE == set(ROWS)
