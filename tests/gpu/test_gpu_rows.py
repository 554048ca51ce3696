"""Softmax and normalizations, interpreted on the CPU, against onnxruntime and NumPy."""

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def check(case: Case, precision: str, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower(precision), feeds)
    for name, truth in case.truth(feeds).items():
        agrees(outputs[name], truth, precision)


def agrees(actual: np.ndarray, truth: np.ndarray, precision: str) -> None:
    assert actual.shape == truth.shape
    assert actual.dtype == truth.dtype
    difference = np.linalg.norm(actual.astype(np.float64) - truth)
    assert difference < LIMITS[precision] * np.linalg.norm(truth)


ROWS = [((2, 3, 4, 5), 1), ((2, 3, 4, 5), -1), ((7, 300), 1), ((3, 33, 8), 0), ((1, 5), 1)]


@PRECISIONS
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("shape", "axis"), ROWS)
def test_softmax_along_any_dimension(
    op: str, shape: tuple[int, ...], axis: int, precision: str, rng: np.random.Generator
) -> None:
    check(Case([node(op, "x", "y", axis=axis)], {"x": shape}, {}), precision, rng)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("shape", [(2, 20001), (20001, 2)])
def test_rows_too_long_for_a_block(
    op: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    case = Case([node(op, "x", "y", axis=int(np.argmax(shape)))], {"x": shape}, {})
    check(case, "fp32", rng)


def test_hardmax_marks_the_first_of_equal_numbers(rng: np.random.Generator) -> None:
    case = Case([node("Hardmax", "x", "y", axis=1)], {"x": (40, 3, 9)}, {})
    feeds = {"x": rng.integers(0, 2, (40, 3, 9)).astype(np.float32)}
    actual = gpu_interpreter.run(case.lower("fp16"), feeds)["y"]
    assert np.array_equal(actual, case.truth(feeds)["y"])


def test_softmax_of_pixels_stays_channels_last(rng: np.random.Generator) -> None:
    nodes = [
        node("MaxPool", "x", "p", kernel_shape=[2, 2]),
        node("Softmax", "p", "s", axis=1),
        node("MaxPool", "s", "y", kernel_shape=[2, 2]),
    ]
    case = Case(nodes, {"x": (2, 7, 9, 8)}, {})
    kernels = [call.spec.title for call in case.lower("fp16").launches]
    assert kernels[1:4] == ["max_pool", "softmax", "max_pool"]
    check(case, "fp16", rng)


def test_a_block_of_minus_infinity_in_a_long_row(rng: np.random.Generator) -> None:
    case = Case([node("Softmax", "x", "y", axis=1)], {"x": (2, 20001)}, {})
    feeds = case.feeds(rng)
    feeds["x"][0, :9000] = -np.inf
    actual = gpu_interpreter.run(case.lower("fp32"), feeds)["y"]
    agrees(actual, case.truth(feeds)["y"], "fp32")


NORMS = {
    "layers": ("LayerNormalization", (2, 7, 48), (48,), {"axis": -1}),
    "layers of two dimensions": ("LayerNormalization", (3, 5, 4, 6), (4, 6), {"axis": 2}),
    "layers with repeated factors": ("LayerNormalization", (3, 5, 4, 6), (1, 6), {"axis": -2}),
    "long layers": ("LayerNormalization", (3, 17000), (17000,), {"epsilon": 1e-3}),
    "instances": ("InstanceNormalization", (2, 5, 4, 7), (5,), {"epsilon": 1e-2}),
    "instances of signals": ("InstanceNormalization", (2, 5, 100), (5,), {}),
    "large instances": ("InstanceNormalization", (1, 3, 80, 70), (3,), {}),
}


@PRECISIONS
@pytest.mark.parametrize("name", NORMS)
def test_normalizations_with_factors(name: str, precision: str, rng: np.random.Generator) -> None:
    op, shape, factors, attributes = NORMS[name]
    weights = {n: rng.normal(size=factors).astype(np.float32) for n in ("g", "b")}
    check(Case([node(op, "x g b", "y", **attributes)], {"x": shape}, weights), precision, rng)


@PRECISIONS
def test_instances_of_pixels_and_what_follows_are_one_kernel(
    precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("MaxPool", "x", "p", kernel_shape=[2, 2]),
        node("InstanceNormalization", "p g b", "n"),
        node("Relu", "n", "y"),
    ]
    weights = {n: rng.normal(size=37).astype(np.float32) for n in ("g", "b")}
    case = Case(nodes, {"x": (2, 37, 9, 9)}, weights)
    assert [call.spec.title for call in case.lower("fp16").launches][1:3] == [
        "max_pool",
        "normalize",
    ]
    check(case, precision, rng)


@pytest.mark.parametrize("axes", [[0, 2, 3], [1], [0, 1, 2, 3]])
def test_mean_variance_normalization(axes: list[int], rng: np.random.Generator) -> None:
    case = Case([node("MeanVarianceNormalization", "x", "y", axes=axes)], {"x": (3, 4, 5, 6)}, {})
    check(case, "fp32", rng)


@PRECISIONS
@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_keeps_rows_of_zeros(
    p: int, precision: str, rng: np.random.Generator
) -> None:
    case = Case([node("LpNormalization", "x", "y", axis=1, p=p)], {"x": (3, 40, 5)}, {})
    feeds = case.feeds(rng)
    feeds["x"][1, :, 2] = 0
    agrees(
        gpu_interpreter.run(case.lower(precision), feeds)["y"], case.truth(feeds)["y"], precision
    )


@PRECISIONS
@pytest.mark.parametrize("shape", [(2, 10, 4, 5), (1, 3, 7, 1), (1, 70, 2, 2)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_normalization_by_the_channels_around(
    size: int, shape: tuple[int, ...], precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("LRN", "x", "n", size=size, alpha=0.5, beta=0.6, bias=1.5),
        node("Relu", "n", "y"),
    ]
    check(Case(nodes, {"x": shape}, {}), precision, rng)


@PRECISIONS
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_groups_as_exporters_write_them_stay_channels_last(
    groups: int, precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("MaxPool", "x", "p", kernel_shape=[2, 2]),
        node("Reshape", "p split", "g"),
        node("InstanceNormalization", "g ones zeros", "i"),
        node("Reshape", "i whole", "j"),
        node("Mul", "j gain", "m"),
        node("Add", "bias m", "a"),
        node("Relu", "a", "r"),
        node("MaxPool", "r", "y", kernel_shape=[2, 2]),
    ]
    weights = {
        "split": np.array([0, groups, -1], np.int64),
        "whole": np.array([2, 8, 8, 7], np.int64),
        "ones": rng.normal(size=groups).astype(np.float32),
        "zeros": rng.normal(size=groups).astype(np.float32),
        "gain": rng.normal(size=(8, 1, 1)).astype(np.float32),
        "bias": rng.normal(size=(1, 8, 1, 1)).astype(np.float32),
    }
    case = Case(nodes, {"x": (2, 8, 9, 8)}, weights)
    results = [call.spec.title for call in case.lower(precision).launches]
    assert results[1:4] == ["max_pool", "normalize", "max_pool"]
    check(case, precision, rng)
