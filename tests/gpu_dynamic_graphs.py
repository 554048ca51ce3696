"""Small networks whose sizes are dynamic: pictures and rows of any size."""

from collections.abc import Sequence

import numpy as np
from gpu_graphs import Case, node, normal
from onnx import helper

Rng = np.random.Generator


def picture(
    *nodes: object, channels: int = 8, outputs: Sequence[str] = ("y",), **weights: np.ndarray
) -> Case:
    return Case(nodes, {"x": ("batch", channels, "height", "width")}, weights, outputs)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def upscaling(name: str, output: str) -> object:
    """Each pixel s times along rows and columns."""
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return helper.make_node(
        "Resize", [name, "", "s"], [output], name=f"Resize:{output}", mode="nearest", **how
    )


def rows(*nodes: object, outputs: Sequence[str] = ("y",), **weights: np.ndarray) -> Case:
    return Case(nodes, {"x": ("batch", "tokens", 32)}, weights, outputs)


def residual_network(rng: Rng) -> Case:
    """A stem, two blocks with shortcuts, a classifier."""
    nodes, weights, channels, last = [], {}, 8, "x"
    for at, (filters, stride) in enumerate([(8, 2), (8, 1), (16, 2)]):
        weights |= {
            f"u{at}": normal(rng, filters, channels, 3, 3),
            f"v{at}": normal(rng, filters, filters, 3, 3),
            f"w{at}": normal(rng, filters, channels, 1, 1),
        }
        nodes += [
            node("Conv", f"{last} u{at}", f"a{at}", pads=[1, 1, 1, 1], strides=[stride, stride]),
            node("Relu", f"a{at}", f"b{at}"),
            node("Conv", f"b{at} v{at}", f"c{at}", pads=[1, 1, 1, 1]),
            node("Conv", f"{last} w{at}", f"d{at}", strides=[stride, stride]),
            node("Add", f"c{at} d{at}", f"e{at}"),
            node("Relu", f"e{at}", f"f{at}"),
        ]
        channels, last = filters, f"f{at}"
    nodes += [
        node("MaxPool", last, "p", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "p", "g"),
        node("Flatten", "g", "h"),
        node("Gemm", "h z", "y", transB=1),
    ]
    return picture(*nodes, **weights, z=normal(rng, 5, 16))


def detector(rng: Rng) -> Case:
    """Two scales, the coarse one upscaled beside the fine one; boxes of both in one row."""
    nodes = [
        node("Conv", "x w0", "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Sigmoid", "a", "as"),
        node("Mul", "a as", "fine"),
        node("Conv", "fine w1", "b", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", "b", "coarse"),
        upscaling("coarse", "up"),
        node("Concat", "up fine", "both", axis=1),
        node("Conv", "both w2", "fine_boxes"),
        node("Conv", "coarse w3", "coarse_boxes"),
        node("Shape", "x", "shape"),
        node("Gather", "shape zero", "n", axis=0),
        node("Concat", "n boxes", "flat", axis=0),
        node("Reshape", "fine_boxes flat", "f"),
        node("Reshape", "coarse_boxes flat", "c"),
        node("Concat", "f c", "all", axis=2),
        helper.make_node("Split", ["all", "parts"], ["box", "class"], name="Split", axis=1),
        node("Sigmoid", "class", "score"),
        node("Concat", "box score", "y", axis=1),
    ]
    weights = {
        "w0": normal(rng, 12, 8, 3, 3),
        "w1": normal(rng, 16, 12, 3, 3),
        "w2": normal(rng, 7, 28, 1, 1),
        "w3": normal(rng, 7, 16, 1, 1),
        "s": np.array([1, 1, 2, 2], np.float32),
        "zero": ints(0),
        "boxes": ints(7, -1),
        "parts": ints(4, 3),
    }
    return picture(*nodes, **weights)


def attention(rng: Rng) -> Case:
    """Two heads of 16, of one product, with the sizes read while running."""
    nodes = [
        node("MatMul", "x w", "qkv"),
        node("Shape", "x", "s"),
        node("Slice", "s first second", "nt"),
        node("Concat", "nt parts", "five", axis=0),
        node("Concat", "nt width", "three", axis=0),
        node("Reshape", "qkv five", "r"),
        node("Transpose", "r", "p", perm=[2, 0, 3, 1, 4]),
        *(node("Gather", f"p {name}_at", name, axis=0) for name in "qkv"),
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "a"),
        node("Mul", "a scale", "b"),
        node("Softmax", "b", "c", axis=-1),
        node("MatMul", "c v", "d"),
        node("Transpose", "d", "e", perm=[0, 2, 1, 3]),
        node("Reshape", "e three", "f"),
        node("MatMul", "f o", "g"),
        node("Add", "g x", "y"),
    ]
    weights = {
        "w": normal(rng, 32, 96),
        "o": normal(rng, 32, 32),
        "first": ints(0),
        "second": ints(2),
        "parts": ints(3, 2, 16),
        "width": ints(32),
        "scale": np.array(0.25, np.float32),
        **{f"{name}_at": np.array(at, np.int64) for at, name in enumerate("qkv")},
    }
    return rows(*nodes, **weights)
