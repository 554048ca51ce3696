"""Pools over one to three dimensions, with powers or places, interpreted on the CPU."""

import gpu_interpreter
import numpy as np
import pytest
from gpu_graphs import Case, node
from onnx import helper

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


def check(case: Case, precision: str, rng: np.random.Generator) -> None:
    feeds = case.feeds(rng)
    found = gpu_interpreter.run(case.draft(precision), feeds)
    for name, truth in case.truth(feeds).items():
        assert found[name].shape == truth.shape
        difference = np.linalg.norm(found[name].astype(np.float64) - truth)
        assert difference < LIMITS[precision] * np.linalg.norm(truth), name


POOLS = {
    "signal": ("MaxPool", (2, 5, 40), (3,), {"strides": [2], "pads": [1, 0]}),
    "average of a signal": ("AveragePool", (2, 5, 41), (4,), {"strides": [3], "pads": [1, 2]}),
    "padding that counts": (
        "AveragePool",
        (1, 4, 7, 6, 5),
        (3, 2, 3),
        {"pads": [1, 0, 1, 1, 1, 1], "count_include_pad": 1, "strides": [2, 1, 2]},
    ),
    "rounded up": ("MaxPool", (1, 3, 7, 6, 8), (3, 3, 3), {"strides": [2, 2, 2], "ceil_mode": 1}),
    "average rounded up": (
        "AveragePool",
        (1, 3, 10),
        (3,),
        {"strides": [2], "ceil_mode": 1, "count_include_pad": 1, "pads": [1, 1]},
    ),
    "dilated": ("MaxPool", (1, 3, 9, 9, 9), (2, 2, 2), {"dilations": [2, 3, 1]}),
    "same": ("MaxPool", (1, 3, 9), (4,), {"strides": [2], "auto_pad": "SAME_LOWER"}),
    "powers": ("LpPool", (1, 3, 8, 9), (3, 2), {"p": 3, "strides": [2, 2], "pads": [1, 0, 1, 1]}),
    "powers of a signal": ("LpPool", (2, 3, 17), (3,), {"strides": [2]}),
}


@PRECISIONS
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, precision: str, rng: np.random.Generator) -> None:
    op, shape, taps, attributes = POOLS[name]
    nodes = [node(op, "x", "p", kernel_shape=taps, **attributes), node("Relu", "p", "y")]
    check(Case(nodes, {"x": shape}, {}), precision, rng)


PLACES = {
    "picture": ((2, 3, 8, 9), (2, 2), {"strides": [2, 2]}),
    "columns first": ((2, 3, 8, 9), (3, 2), {"strides": [2, 2], "storage_order": 1}),
    "overlapping": ((1, 4, 9, 8), (3, 3), {"pads": [1, 1, 1, 1]}),
    "signal": ((2, 3, 12), (3,), {"strides": [2]}),
    "volume": ((1, 2, 5, 6, 4), (2, 3, 2), {"strides": [1, 2, 2]}),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_of_maxima(name: str, rng: np.random.Generator) -> None:
    shape, taps, attributes = PLACES[name]
    pool = helper.make_node(
        "MaxPool", ["x"], ["y", "z"], name="pool", kernel_shape=taps, **attributes
    )
    case = Case([pool], {"x": shape}, {}, ("y", "z"), {"z": "int64"})
    feeds = case.feeds(rng)
    found = gpu_interpreter.run(case.draft("fp32"), feeds)
    for tensor, truth in case.truth(feeds).items():
        assert np.array_equal(found[tensor], truth)


@PRECISIONS
def test_maxima_go_back_to_their_places(precision: str, rng: np.random.Generator) -> None:
    pool = helper.make_node(
        "MaxPool", ["x"], ["p", "i"], name="pool", kernel_shape=[2, 2], strides=[2, 2]
    )
    nodes = [pool, node("MaxUnpool", "p i", "y", kernel_shape=[2, 2], strides=[2, 2])]
    check(Case(nodes, {"x": (2, 3, 8, 10)}, {}), precision, rng)
