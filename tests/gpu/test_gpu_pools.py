"""Pools over one to three dimensions, with powers or places, interpreted on the CPU."""

from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_graphs import Case, node
from gpu_interpreter import check
from int8_graphs import Graph
from onnx import helper

pytest.importorskip("triton", reason="Triton is not installed")

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


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


def check_every_tactic(case: Case, precision: str, rng: np.random.Generator) -> None:
    """Every tactic gives the largest numbers themselves, to the bit."""
    feeds = case.feeds(rng)
    if precision == "fp16":
        feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)
    (name,) = case.outputs
    program = case.lower(precision)
    (at,) = (i for i, one in enumerate(program.ops) if one.tactics[0][0].spec.title == "max_pool")
    truth = int8_reference.run(case.model(), feeds) if precision == "int8" else case.truth(feeds)
    for tactic in program.ops[at].tactics:
        ops = [*program.ops]
        ops[at] = replace(ops[at], tactics=(tactic,))
        outputs = gpu_interpreter.run(replace(program, ops=tuple(ops)), feeds)
        np.testing.assert_array_equal(outputs[name], truth[name])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("shape", "taps", "attributes"),
    [
        ((2, 24, 7, 6), (5, 5), {"pads": [2, 2, 2, 2]}),
        ((2, 5, 9, 8), (3, 2), {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
        ((1, 3, 8, 8), (2, 2), {"strides": [3, 3]}),  # rows that no window looks at
        ((3, 2, 7, 7), (3, 3), {"strides": [2, 2], "ceil_mode": 1}),
    ],
)
def test_rows_of_a_window_are_shared(
    shape: tuple[int, ...],
    taps: tuple[int, int],
    attributes: dict[str, object],
    precision: str,
    rng: np.random.Generator,
) -> None:
    graph = Graph(rng, {"x": shape})
    scale = graph.scale()
    x = graph.rounded("x", scale) if precision == "int8" else "x"
    pooled = graph.add("MaxPool", x, kernel_shape=taps, **attributes)
    last = graph.rounded(pooled, scale) if precision == "int8" else pooled
    check_every_tactic(graph.case(last), precision, rng)


@PRECISIONS
def test_what_is_no_number_stays_in_a_pool(precision: str, rng: np.random.Generator) -> None:
    case = Case([node("MaxPool", "x", "y", kernel_shape=(1, 2))], {"x": (1, 4, 6, 8)}, {})
    feeds = {"x": rng.normal(size=(1, 4, 6, 8)).astype(np.float16).astype(np.float32)}
    feeds["x"][rng.random(feeds["x"].shape) < 0.2] = np.nan
    actual = gpu_interpreter.run(case.lower(precision), feeds)["y"]
    np.testing.assert_array_equal(actual, np.maximum(feeds["x"][..., :-1], feeds["x"][..., 1:]))


def test_maxima_of_one_scale_are_stored_unchanged(rng: np.random.Generator) -> None:
    """What is rounded to the grid on which it lies is not computed with."""
    graph = Graph(rng, {"x": (1, 8, 6, 6)})
    scale = graph.scale()
    pooled = graph.add("MaxPool", graph.rounded("x", scale), kernel_shape=(3, 3))
    same = graph.product("Conv", graph.rounded(pooled, scale), (4, 8, 1, 1))
    (pool,) = (c for c in graph.case(same).lower("int8").launches if c.spec.title == "max_pool")
    assert dict(pool.spec.constants)["EPILOGUE"] == ()


def test_maxima_of_another_scale_are_requantized(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 8, 6, 6)})
    scale = graph.scale()
    pooled = graph.add("MaxPool", graph.rounded("x", scale), kernel_shape=(3, 3))
    case = graph.case(graph.rounded(graph.rounded(pooled, scale * np.float32(3.2)), scale))
    check_every_tactic(case, "int8", rng)


INDEX_CASES = {
    "apart": ((2, 3, 8, 9), (2, 2), {"strides": [2, 2]}),
    "columns first": ((2, 3, 8, 9), (3, 2), {"strides": [2, 2], "storage_order": 1}),
    "overlapping": ((1, 4, 9, 8), (3, 3), {"pads": [1, 1, 1, 1]}),
    "signal": ((2, 3, 12), (3,), {"strides": [2]}),
    "conv3d": ((1, 2, 5, 6, 4), (2, 3, 2), {"strides": [1, 2, 2]}),
}


@pytest.mark.parametrize("name", INDEX_CASES)
def test_indices_of_maxima(name: str, rng: np.random.Generator) -> None:
    shape, taps, attributes = INDEX_CASES[name]
    pool = helper.make_node(
        "MaxPool", ["x"], ["y", "z"], name="pool", kernel_shape=taps, **attributes
    )
    case = Case([pool], {"x": shape}, {}, ("y", "z"), {"z": "int64"})
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(case.lower("fp32"), feeds)
    for tensor, truth in case.truth(feeds).items():
        assert np.array_equal(outputs[tensor], truth)


@PRECISIONS
def test_maxima_are_unpooled_to_their_indices(precision: str) -> None:
    pool = helper.make_node(
        "MaxPool", ["x"], ["p", "i"], name="pool", kernel_shape=[2, 2], strides=[2, 2]
    )
    nodes = [pool, node("MaxUnpool", "p i", "y", kernel_shape=[2, 2], strides=[2, 2])]
    rng = np.random.default_rng(0)  # two values that FP16 rounds to one have two right indices
    check(Case(nodes, {"x": (2, 3, 8, 10)}, {}), precision, rng)
