"""INT8 depthwise convolutions, four channels in an INT32: interpreted, bit by bit.

Every tactic gives the bits of `int8_reference`, the formulas in NumPy.
"""

import numpy as np
import pytest
from int8_graphs import Graph
from int8_tactics import check_dynamic, check_tactics

from toolkit.gpu.emit.depthwise import packed_taps
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

H200 = GpuTarget(sm=90, sm_count=3)
ORIN = GpuTarget(sm=87, sm_count=2, exhaustive=True)

DEPTHWISE = {
    "3x3": ((2, 8, 9, 7), (3, 3), {"pads": [1, 1, 1, 1]}),
    "3x3, strided": ((1, 4, 9, 10), (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "3x3, strided, odd pads": ((2, 4, 8, 8), (3, 3), {"pads": [0, 0, 1, 1], "strides": [2, 2]}),
    "5x5": ((1, 4, 7, 7), (5, 5), {"pads": [2, 2, 2, 2]}),
    "5x5, strided": ((1, 4, 9, 11), (5, 5), {"pads": [2, 1, 2, 2], "strides": [2, 2]}),
    "a row": ((1, 4, 3, 9), (1, 5), {"pads": [0, 2, 0, 2]}),
    "a column": ((1, 4, 9, 3), (4, 1), {"strides": [1, 2]}),
    "two by four": ((1, 4, 6, 9), (2, 4), {"strides": [2, 1]}),
}


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_dp4a_is_exact(name: str, rng: np.random.Generator) -> None:
    shape, taps, attributes = DEPTHWISE[name]
    graph = Graph(rng, {"x": shape})
    weights = (shape[1], 1, *taps)
    bias = str(rng.choice(["", "int32"]))
    y = graph.product("Conv", graph.rounded("x"), weights, bias=bias, group=shape[1], **attributes)
    case = graph.case(graph.rounded(graph.add("Relu", y)))
    tried = check_tactics(case, "depthwise_int8", ORIN)
    assert len({(one["ROWS"], one["COLUMNS"]) for one in tried}) >= 3


def test_depthwise_dp4a_adds_a_residual(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (1, 8, 5, 6)})
    x = graph.rounded("x")
    c = graph.product("Conv", x, (8, 1, 3, 3), bias="int32", group=8, pads=[1, 1, 1, 1])
    case = graph.case(graph.rounded(graph.add("Relu", graph.add("Add", graph.rounded(c), x))))
    assert check_tactics(case, "depthwise_int8", H200)


@pytest.mark.parametrize(
    ("channels", "attributes"),
    [(6, {}), (8, {"dilations": [2, 1]}), (8, {"strides": [3, 3]})],
    ids=["channels not divisible by four", "dilated", "strides of three"],
)
def test_other_depthwise_convolutions_do_not_use_dp4a(
    channels: int, attributes: dict[str, object], rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (1, channels, 9, 9)})
    weights = (channels, 1, 3, 3)
    y = graph.product("Conv", graph.rounded("x"), weights, group=channels, **attributes)
    assert check_tactics(graph.case(graph.rounded(y)), "depthwise_int8", H200) == []


def test_packed_weights_meet_their_pixels(rng: np.random.Generator) -> None:
    weights = rng.integers(-127, 128, (3, 2, 5)).astype(np.int8)
    pixels = rng.integers(-128, 128, (3, 16))
    packed = packed_taps(weights, 4)
    assert packed.shape == (2, 4, 2, 3)
    taps = packed.view(np.int8).reshape(2, 4, 2, 3, 4).astype(int)
    for o in range(4):  # the first tap lies o pixels behind the first of an int8x4
        sums = sum((taps[:, o, k] * pixels[:, 4 * k : 4 * k + 4]).sum(-1) for k in range(2))
        truth = (weights.astype(int) * pixels[:, None, o : o + 5]).sum(-1).T
        np.testing.assert_array_equal(sums, truth)


def test_sizes_may_be_dynamic(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": ("batch", 8, "height", 7)})
    y = graph.product(
        "Conv", graph.rounded("x"), (8, 1, 3, 3), bias="int32", group=8, pads=[1, 1, 1, 1]
    )
    case = graph.case(graph.rounded(graph.add("Relu", y)))
    check_dynamic(case, "depthwise_int8", ORIN, rng)
