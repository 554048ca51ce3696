"""Graphs whose sizes are dynamic: single operators and small networks on images and rows."""

from collections.abc import Callable, Sequence

import numpy as np
from gpu_graphs import Case, convolution, node, normal
from onnx import helper

Rng = np.random.Generator


def image_case(
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
    return image_case(*nodes, **weights, z=normal(rng, 5, 16))


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
    return image_case(*nodes, **weights)


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


def integer_network(rng: Rng) -> Case:
    """Two convolutions, a shortcut and a pooling, all in INT8."""
    steps = dict(zip("xabcd", (0.03, 0.05, 0.04, 0.05, 0.05), strict=True))
    weights: dict[str, np.ndarray] = {f"s{n}": np.float32(step) for n, step in steps.items()}
    weights |= {
        "zero": np.int8(0),
        "zeros": np.zeros(8, np.int8),
        "scales": rng.uniform(0.002, 0.004, 8).astype(np.float32),
        "u": rng.integers(-127, 128, (8, 8, 3, 3), np.int8),
        "v": rng.integers(-127, 128, (8, 8, 1, 1), np.int8),
    }

    def rounded(name: str, source: str) -> list[object]:
        return [
            node("QuantizeLinear", f"{source} s{name} zero", f"{name}q"),
            node("DequantizeLinear", f"{name}q s{name} zero", f"{name}d"),
        ]

    nodes = [
        *(node("DequantizeLinear", f"{n} scales zeros", f"{n}d", axis=0) for n in "uv"),
        *rounded("x", "x"),
        node("Conv", "xd ud", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "ar"),
        *rounded("a", "ar"),
        node("Conv", "ad vd", "b"),
        *rounded("b", "b"),
        node("Add", "bd xd", "c"),
        *rounded("c", "c"),
        node("MaxPool", "cd", "d", kernel_shape=[2, 2], strides=[2, 2]),
        *rounded("d", "d"),
        node("Identity", "dd", "y"),
    ]
    return image_case(*nodes, **weights)


def half_and_back(mode: str) -> Case:
    """Pictures at half their size, and then at their own, which is read."""
    resize = helper.make_node("Resize", ["p", "", "", "s"], ["y"], name="Resize:y", mode=mode)
    half = {"kernel_shape": [2, 2], "strides": [2, 2]}
    return image_case(
        node("MaxPool", "x", "h", **half),
        node("Relu", "h", "p"),
        node("Shape", "x", "n"),
        node("Slice", "n two four", "hw"),
        node("Shape", "p", "m"),
        node("Slice", "m zero two", "nc"),
        node("Concat", "nc hw", "s", axis=0),
        resize,
        zero=ints(0),
        two=ints(2),
        four=ints(4),
    )


def conv(rng: Rng, filters: int, taps: tuple[int, int], channels: int = 8, **how: object) -> Case:
    return convolution(rng, ("batch", channels, "height", "width"), filters, taps, **how)


def head(rng: Rng) -> Case:
    """Boxes and scores, twice: joined, flattened, joined and split again."""
    nodes, weights = [], {"flat": ints(0, 0, -1), "parts": ints(4, 6)}
    for at in range(2):
        weights |= {f"v{at}": normal(rng, 4, 8, 1, 1), f"w{at}": normal(rng, 6, 8, 1, 1)}
        nodes += [
            node("Conv", f"x v{at}", f"b{at}"),
            node("Conv", f"x w{at}", f"c{at}"),
            node("Concat", f"b{at} c{at}", f"j{at}", axis=1),
            node("Reshape", f"j{at} flat", f"r{at}"),
        ]
    split = node("Split", "j parts", "boxes", axis=1)
    split.output.append("scores")
    nodes += [node("Concat", "r0 r1", "j", axis=2), split, node("Sigmoid", "scores", "p")]
    return image_case(*nodes, node("Concat", "boxes p", "y", axis=1), **weights)


IMAGE_CASES: dict[str, Callable[[Rng], Case]] = {
    "convolution": lambda r: conv(r, 12, (3, 3), pads=[1, 1, 1, 1]),
    "strided convolution": lambda r: conv(r, 12, (3, 3), pads=[1, 1, 1, 1], strides=[2, 2]),
    "convolution of all sizes": lambda r: conv(r, 6, (4, 3), auto_pad="SAME_UPPER", strides=[2, 2]),
    "pointwise convolution": lambda r: conv(r, 20, (1, 1)),
    "grouped convolution": lambda r: conv(r, 12, (3, 3), group=4),
    "depthwise convolution": lambda r: conv(r, 8, (3, 3), group=8, pads=[1, 1, 1, 1]),
    "convolution with a residual": lambda r: image_case(
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]),
        node("Add", "a x", "b"),
        node("Relu", "b", "y"),
        w=normal(r, 8, 8, 3, 3),
    ),
    "transposed convolution": lambda r: image_case(
        node("ConvTranspose", "x w", "y", strides=[2, 2], kernel_shape=[2, 2]),
        w=normal(r, 8, 6, 2, 2),
    ),
    "maximum": lambda _: image_case(
        node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    ),
    "maximum of the last, partial window": lambda _: image_case(
        node("MaxPool", "x", "y", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    ),
    "average": lambda _: image_case(
        node("AveragePool", "x", "y", kernel_shape=[3, 2], pads=[1, 0, 1, 1])
    ),
    "average of the image": lambda _: image_case(node("GlobalAveragePool", "x", "y")),
    "mean along rows": lambda _: image_case(node("ReduceMean", "x a", "y", keepdims=0), a=ints(3)),
    "largest": lambda _: image_case(node("ReduceMax", "x a", "y"), a=ints(1, 2)),
    "softmax of channels": lambda _: image_case(node("Softmax", "x", "y", axis=1)),
    "softmax of rows": lambda _: image_case(node("Softmax", "x", "y", axis=-1)),
    "largest of windows": lambda _: image_case(
        node("MaxPool", "x", "y", kernel_shape=[5, 5], pads=[2] * 4)
    ),
    "head of a detector": head,
    "normalization of images": lambda r: image_case(
        node("InstanceNormalization", "x s b", "y"),
        s=r.normal(size=8).astype(np.float32),
        b=r.normal(size=8).astype(np.float32),
    ),
    "chain": lambda r: image_case(
        node("Mul", "x s", "a"),
        node("Sigmoid", "a", "b"),
        node("Mul", "a b", "y"),
        s=r.normal(size=(8, 1, 1)).astype(np.float32),
    ),
    "concatenation of channels": lambda r: image_case(
        node("Conv", "x w", "a"), node("Concat", "a x", "y", axis=1), w=normal(r, 4, 8, 1, 1)
    ),
    "concatenation of rows": lambda _: image_case(
        node("Relu", "x", "a"), node("Concat", "a x", "y", axis=2)
    ),
    "halves": lambda _: image_case(
        node("Relu", "x", "r"),
        helper.make_node("Split", ["r"], ["a", "b"], name="Split:a", axis=1, num_outputs=2),
        node("Mul", "a b", "y"),
    ),
    "slice": lambda _: image_case(
        node("Slice", "x s e a", "y"), s=ints(1, 2), e=ints(-1, 1 << 40), a=ints(2, 3)
    ),
    "every second": lambda _: image_case(
        node("Slice", "x s e a t", "y"), s=ints(0), e=ints(1 << 40), a=ints(3), t=ints(2)
    ),
    "transposition": lambda _: image_case(node("Transpose", "x", "y", perm=[0, 2, 3, 1])),
    "zeros around": lambda _: image_case(node("Pad", "x p", "y"), p=ints(0, 0, 1, 2, 0, 0, 0, 1)),
    "mirrored": lambda _: image_case(
        node("Pad", "x p", "y", mode="reflect"), p=ints(0, 0, 1, 2, 0, 0, 0, 1)
    ),
    "columns by number": lambda _: image_case(node("Gather", "x i", "y", axis=3), i=ints(3, 1, 1)),
    "running sums": lambda _: image_case(node("CumSum", "x a", "y"), a=np.array(3)),
    "tiles": lambda _: image_case(node("Tile", "x r", "y"), r=ints(1, 2, 1, 3)),
    "depth to space": lambda _: image_case(node("DepthToSpace", "x", "y", blocksize=2)),
    "resized": lambda _: image_case(
        helper.make_node("Resize", ["x", "", "s"], ["y"], name="Resize:y", mode="linear"),
        s=np.array([1, 1, 2, 1.5], np.float32),
    ),
    "conv_upsample_concat": lambda _: image_case(
        upscaling("x", "y"), s=np.array([1, 1, 2, 2], np.float32)
    ),
    "blocks of channels as pixels": lambda _: image_case(
        node("DepthToSpace", "x", "y", blocksize=2)
    ),
    "mean spread over the image": lambda _: image_case(
        node("GlobalAveragePool", "x", "m"),
        node("Shape", "x", "s"),
        helper.make_node("Resize", ["m", "", "", "s"], ["r"], name="Resize:r", mode="linear"),
        node("Concat", "r x", "y", axis=1),
    ),
    "flattened": lambda _: image_case(node("Flatten", "x", "y", axis=2)),
    "channels shuffled by sizes that are read": lambda _: image_case(
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Gather", "s two", "h"),
        node("Gather", "s three", "w"),
        node("Concat", "n groups h w", "t", axis=0),
        node("Concat", "n all h w", "u", axis=0),
        node("Reshape", "x t", "a"),
        node("Transpose", "a", "b", perm=[0, 2, 1, 3, 4]),
        node("Reshape", "b u", "y"),
        zero=ints(0), two=ints(2), three=ints(3), groups=ints(2, 4), all=ints(8),
    ),
    "expanded to a size that is read": lambda r: image_case(
        node("Shape", "x", "s"),
        node("Expand", "c s", "e"),
        node("Add", "x e", "y"),
        c=r.normal(size=(1, 8, 1, 1)).astype(np.float32),
    ),
    "classifier": lambda r: image_case(
        node("Conv", "x w", "a", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("GlobalAveragePool", "a", "b"),
        node("Flatten", "b", "c"),
        node("Gemm", "c v", "y", transB=1),
        w=normal(r, 12, 8, 3, 3), v=normal(r, 5, 12),
    ),
}  # fmt: skip


SEQUENCES: dict[str, Callable[[Rng], Case]] = {
    "product": lambda r: rows(node("MatMul", "x w", "y"), w=normal(r, 32, 20)),
    "product with bias and activation": lambda r: rows(
        node("MatMul", "x w", "a"),
        node("Add", "a b", "c"),
        node("Relu", "c", "y"),
        w=normal(r, 32, 20), b=r.normal(size=20).astype(np.float32),
    ),
    "products of pairs": lambda _: rows(
        node("Transpose", "x", "t", perm=[0, 2, 1]), node("MatMul", "x t", "y")
    ),
    "normalization": lambda r: rows(
        node("LayerNormalization", "x s b", "y", axis=-1),
        s=r.normal(size=32).astype(np.float32), b=r.normal(size=32).astype(np.float32),
    ),
    "largest of a row": lambda _: rows(node("ReduceMax", "x a", "y", keepdims=0), a=ints(1)),
    "first token": lambda _: rows(node("Gather", "x i", "y", axis=1), i=np.array(0, np.int64)),
    "attention": lambda r: attention(r),  # noqa: PLW0108  (it is defined below)
}  # fmt: skip
