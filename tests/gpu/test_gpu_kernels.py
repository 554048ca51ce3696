"""Every kernel, interpreted on the CPU on poisoned memory, against onnxruntime."""

from dataclasses import replace

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, convolution, node, normal

pytest.importorskip("triton", reason="Triton is not installed")

# Rounding once to FP16 costs 2**-11 of a value; sums of random signs stay near it.
LIMITS = {"fp32": 1e-5, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def check(case: Case, precision: str, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower(precision), feeds)
    for name, truth in case.truth(feeds).items():
        assert outputs[name].shape == truth.shape
        assert outputs[name].dtype == truth.dtype
        difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
        assert difference < LIMITS[precision] * np.linalg.norm(truth), name


CONVOLUTIONS = {
    "pointwise": ((2, 24, 5, 7), 20, (1, 1), {}),
    "3x3": ((1, 5, 9, 8), 18, (3, 3), {"pads": [1, 1, 1, 1]}),
    "whole blocks of channels": ((1, 64, 6, 6), 16, (3, 3), {"pads": [1, 1, 1, 1]}),
    "strided": ((2, 3, 11, 12), 8, (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "strided pointwise": ((1, 16, 7, 7), 8, (1, 1), {"strides": [2, 2]}),
    "dilated": ((1, 4, 12, 11), 6, (3, 3), {"dilations": [2, 3]}),
    "uneven pads": ((1, 4, 6, 6), 6, (2, 3), {"pads": [1, 0, 2, 1]}),
    "row": ((1, 6, 4, 9), 6, (1, 7), {"pads": [0, 3, 0, 3]}),
    "grouped": ((2, 12, 6, 5), 18, (3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    "grouped pointwise": ((1, 12, 4, 4), 8, (1, 1), {"group": 2}),
    "depthwise": ((2, 20, 7, 6), 20, (3, 3), {"group": 20, "pads": [1, 1, 1, 1]}),
    "depthwise strided": ((1, 9, 8, 8), 9, (5, 5), {"group": 9, "strides": [2, 2]}),
    "depthwise of many taps": ((1, 5, 9, 8), 5, (9, 7), {"group": 5, "pads": [4, 3, 4, 3]}),
    "two filters a channel": ((1, 6, 5, 5), 12, (3, 3), {"group": 6}),
    "same upper": ((1, 4, 7, 6), 5, (4, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((1, 4, 7, 6), 5, (2, 4), {"auto_pad": "SAME_LOWER"}),
}


@PRECISIONS
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, precision: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = CONVOLUTIONS[name]
    check(convolution(rng, shape, filters, taps, **attributes), precision, rng)


def test_convolutions_of_random_sizes(rng: np.random.Generator) -> None:
    for _ in range(6):
        channels, filters = (int(n) for n in rng.integers(1, 40, 2))
        taps = tuple(int(n) for n in rng.integers(1, 4, 2))
        size = tuple(int(n) for n in rng.integers(4, 10, 2))
        attributes = {"strides": rng.integers(1, 3, 2).tolist(), "pads": [1, 0, 0, 1]}
        shape = (int(rng.integers(1, 3)), channels, *size)
        check(convolution(rng, shape, filters, taps, **attributes), "fp32", rng)


ENDINGS = {
    "relu": [node("Relu", "c", "y")],
    "silu": [node("Sigmoid", "c", "s"), node("Mul", "c s", "y")],
    "hard swish": [node("HardSwish", "c", "y")],
    "hard sigmoid": [node("HardSigmoid", "c", "y", alpha=0.3, beta=0.4)],
    "leaky relu": [node("LeakyRelu", "c", "y", alpha=0.2)],
    "gelu": [
        node("Div", "c root", "d"),
        node("Erf", "d", "e"),
        node("Add", "e one", "f"),
        node("Mul", "c f", "g"),
        node("Mul", "g half", "y"),
    ],
    "clip": [node("Clip", "c zero six", "y")],
    "from below": [node("Clip", "c zero", "y")],
    "arithmetic": [
        node("Abs", "c", "a"),
        node("Sqrt", "a", "r"),
        node("Neg", "r", "n"),
        node("Exp", "n", "e"),
        node("Sub", "e half", "y"),
    ],
}
SCALARS = {"zero": 0.0, "half": 0.5, "one": 1.0, "root": 2.0**0.5, "six": 0.7}


@PRECISIONS
@pytest.mark.parametrize("name", ENDINGS)
def test_what_follows_a_convolution_is_part_of_it(
    name: str, precision: str, rng: np.random.Generator
) -> None:
    plain = convolution(rng, (1, 6, 5, 5), 10, (3, 3), *ENDINGS[name])
    numbers = {key: np.float32(value) for key, value in SCALARS.items()}
    read = {one for part in ENDINGS[name] for one in part.input}
    weights = {**plain.weights, **{k: np.array(v) for k, v in numbers.items() if k in read}}
    case = Case(plain.nodes, plain.inputs, weights)
    assert [call.spec.title for call in case.lower().launches].count("gemm im2col") == 1
    assert len(case.lower().launches) <= 3  # and the two borders
    check(case, precision, rng)


@PRECISIONS
@pytest.mark.parametrize("kind", ["pointwise", "3x3", "depthwise"])
def test_a_residual_is_added_where_the_sums_are(
    kind: str, precision: str, rng: np.random.Generator
) -> None:
    taps, group = {"pointwise": (1, 1), "3x3": (3, 3), "depthwise": (3, 3)}[kind], 1
    group = 8 if kind == "depthwise" else 1
    pads = [taps[0] // 2] * 4
    nodes = [
        node("Conv", "x v", "r"),
        node("Conv", "r w", "c", pads=pads, group=group),
        node("Add", "r c", "s"),
        node("Relu", "s", "y"),
    ]
    weights = {"v": normal(rng, 8, 8, 1, 1), "w": normal(rng, 8, 8 // group, *taps)}
    case = Case(nodes, {"x": (2, 8, 5, 6)}, weights)
    assert len(case.lower(precision).launches) == 4
    check(case, precision, rng)


POOLS = {
    "max": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "max ceil": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    "max dilated": ("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    "average": ("AveragePool", {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]}),
    "average with pads": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    "more taps than are unrolled": ("MaxPool", {"kernel_shape": [7, 8], "pads": [3, 4, 3, 4]}),
    "average of many taps": ("AveragePool", {"kernel_shape": [7, 8], "pads": [3, 4, 3, 4]}),
    "whole picture": ("GlobalAveragePool", {}),
}


@PRECISIONS
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str, precision: str, rng: np.random.Generator) -> None:
    kind, attributes = POOLS[name]
    shape = (2, 11, 7, 8)
    check(Case([node(kind, "x", "y", **attributes)], {"x": shape}, {}), precision, rng)


def test_nan_is_not_lost_on_the_way(rng: np.random.Generator) -> None:
    nodes = [
        node("MaxPool", "x", "p", kernel_shape=[2, 2]),
        node("Relu", "p", "y"),
    ]
    case = Case(nodes, {"x": (1, 3, 4, 4)}, {})
    feeds = case.feeds(rng)
    feeds["x"][0, 1, 2, 2] = np.nan
    actual = gpu_interpreter.run(case.lower(), feeds)["y"]
    assert np.isnan(actual[0, 1]).sum() == 4
    assert np.isnan(actual).sum() == 4


@PRECISIONS
@pytest.mark.parametrize(
    ("attributes", "left", "right"),
    [
        ({}, (5, 33), (33, 9)),
        ({"transB": 1}, (1, 40), (17, 40)),
        ({"transA": 1}, (12, 6), (12, 8)),
    ],
)
def test_gemm(
    attributes: dict[str, int],
    left: tuple[int, int],
    right: tuple[int, int],
    precision: str,
    rng: np.random.Generator,
) -> None:
    columns = right[0] if attributes.get("transB") else right[1]
    weights = {"w": normal(rng, *right), "b": rng.normal(size=columns).astype(np.float32)}
    case = Case([node("Gemm", "x w b", "y", **attributes)], {"x": left}, weights)
    check(case, precision, rng)


@PRECISIONS
def test_products_of_two_tensors_and_softmax(precision: str, rng: np.random.Generator) -> None:
    nodes = [  # attention: the transposed operand is a view
        node("Transpose", "k", "t", perm=[0, 1, 3, 2]),
        node("MatMul", "q t", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p k", "y"),
    ]
    case = Case(nodes, {"q": (2, 2, 5, 8), "k": (2, 2, 7, 8)}, {})
    check(case, precision, rng)


@PRECISIONS
def test_a_product_joins_leading_dimensions(precision: str, rng: np.random.Generator) -> None:
    nodes = [node("MatMul", "x w", "m"), node("Relu", "m", "y")]
    case = Case(nodes, {"x": (2, 3, 10)}, {"w": normal(rng, 10, 6)})
    assert [call.spec.title for call in case.lower().launches] == ["gemm strided"]
    check(case, precision, rng)


@PRECISIONS
@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3, 4, 5), (2, 3, 4, 5)), ((2, 3, 4, 5), (3, 1, 1)), ((4, 1), (1, 6)), ((7,), (1,))],
)
def test_operands_are_repeated_as_in_numpy(
    left: tuple[int, ...], right: tuple[int, ...], precision: str, rng: np.random.Generator
) -> None:
    nodes = [node("Mul", "a b", "m"), node("Add", "m b", "y")]
    check(Case(nodes, {"a": left, "b": right}, {}), precision, rng)


def upscaling(how: str, rounding: str, factors: tuple[float, int]) -> Case:
    resize = node("Resize", "x", "y", nearest_mode=rounding, coordinate_transformation_mode=how)
    resize.input[:] = ["x", "", "scales"]
    return Case([resize], {"x": (2, 3, 4, 5)}, {"scales": np.array([1, 1, *factors], np.float32)})


@PRECISIONS
@pytest.mark.parametrize("factors", [(2, 3), (4, 1), (5, 2)])
@pytest.mark.parametrize(
    ("how", "rounding"),
    [
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
    ],
)
def test_upscaling_repeats_pixels(
    how: str, rounding: str, factors: tuple[int, int], precision: str, rng: np.random.Generator
) -> None:
    check(upscaling(how, rounding, factors), precision, rng)


@PRECISIONS
def test_two_rows_become_four_by_a_scale_that_is_not_two(
    precision: str, rng: np.random.Generator
) -> None:
    case = upscaling("asymmetric", "floor", (2.4, 1))
    check(replace(case, inputs={"x": (2, 3, 2, 5)}), precision, rng)


@PRECISIONS
def test_concatenation_of_channels_happens_in_place(
    precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", "x v", "a"),
        node("Conv", "x w", "b", pads=[1, 1, 1, 1]),
        node("Concat", "a b", "c", axis=1),
        node("MaxPool", "x", "m", kernel_shape=[1, 1]),
        node("Concat", "c m", "d", axis=1),
        node("Conv", "d u", "y"),
    ]
    weights = {
        "v": normal(rng, 6, 4, 1, 1),
        "w": normal(rng, 10, 4, 3, 3),
        "u": normal(rng, 5, 20, 1, 1),
    }
    case = Case(nodes, {"x": (2, 4, 5, 5)}, weights)
    kernels = [call.spec.title for call in case.lower(precision).launches]
    assert kernels.count("transpose_tiles") == 1  # the input; the output leaves as it is wanted
    check(case, precision, rng)


@PRECISIONS
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_concatenation_along_any_dimension(
    axis: int, precision: str, rng: np.random.Generator
) -> None:
    shapes = [[2, 3, 4, 5], [2, 3, 4, 5]]
    shapes[1][axis] += 2
    inputs = {"a": tuple(shapes[0]), "b": tuple(shapes[1])}
    check(Case([node("Concat", "a b", "y", axis=axis)], inputs, {}), precision, rng)


@PRECISIONS
def test_reshaping_pixels_gives_the_order_of_onnx(precision: str, rng: np.random.Generator) -> None:
    nodes = [
        node("Conv", "x w", "c"),
        node("Flatten", "c", "f"),
        node("Reshape", "f shape", "r"),
        node("Transpose", "r", "y", perm=[2, 0, 1]),
    ]
    weights = {"w": normal(rng, 6, 3, 1, 1), "shape": np.array([2, 9, -1], np.int64)}
    check(Case(nodes, {"x": (2, 3, 3, 3)}, weights), precision, rng)


def test_an_input_that_leaves_again_is_copied(rng: np.random.Generator) -> None:
    nodes = [node("Reshape", "x shape", "y"), node("Relu", "x", "z")]
    case = Case(nodes, {"x": (2, 6)}, {"shape": np.array([3, 4], np.int64)}, ("y", "z"))
    check(case, "fp32", rng)
