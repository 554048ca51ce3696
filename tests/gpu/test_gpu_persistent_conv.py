"""Persistent INT8 convolutions: interpreted, bit by bit.

Every tactic gives the bits of `int8_reference`, the formulas in NumPy.
"""

import numpy as np
import pytest
from int8_graphs import Graph
from int8_tactics import check_dynamic, check_tactics

from toolkit.gpu.sm90.persistent_conv import operand_order
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

H200 = GpuTarget(sm=90, sm_count=3)


CONVOLUTIONS = {
    "64 channels": ((2, 64, 5, 6), 64, (3, 3), {"pads": [1, 1, 1, 1]}),
    "32 to 16, strided": ((1, 32, 9, 8), 16, (3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "80": ((1, 80, 4, 5), 80, (3, 3), {"pads": [1, 1, 1, 1]}),
    "16 to 112, a row": ((1, 16, 3, 9), 112, (1, 5), {"pads": [0, 2, 0, 2]}),
    "128 filters": ((1, 16, 6, 7), 128, (3, 3), {"dilations": [1, 2]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_weight_stationary_convolutions_are_exact(name: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = CONVOLUTIONS[name]
    graph = Graph(rng, {"x": shape})
    weights = (filters, shape[1], *taps)
    y = graph.product("Conv", graph.rounded("x"), weights, bias="int32", **attributes)
    tried = check_tactics(graph.case(graph.rounded(graph.add("Relu", y))), "persistent_conv", H200)
    assert {sum(one["WIDTHS"]) for one in tried} == {filters}


def test_a_weight_stationary_convolution_adds_a_residual(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 48, 6, 7)})
    x = graph.rounded("x")
    c = graph.product("Conv", x, (48, 48, 3, 3), bias="int32", pads=[1, 1, 1, 1])
    total = graph.rounded(graph.add("Relu", graph.add("Add", graph.rounded(c), x)))
    assert check_tactics(graph.case(total), "persistent_conv", H200)


@pytest.mark.parametrize(
    ("channels", "filters", "sm", "attributes"),
    [
        (24, 64, 90, {}),
        (64, 40, 90, {}),
        (64, 64, 87, {}),
        (32, 32, 90, {"group": 2}),
        (512, 512, 90, {}),
    ],
    ids=["channels", "filters", "another GPU", "groups", "too many weights"],
)
def test_other_convolutions_keep_no_weights(
    channels: int, filters: int, sm: int, attributes: dict[str, object], rng: np.random.Generator
) -> None:
    graph = Graph(rng, {"x": (1, channels, 4, 4)})
    weights = (filters, channels // int(attributes.get("group", 1)), 3, 3)
    y = graph.product("Conv", graph.rounded("x"), weights, **attributes)
    case = graph.case(graph.rounded(y))
    assert check_tactics(case, "persistent_conv", GpuTarget(sm, sm_count=3)) == []


def test_weights_lie_in_the_order_of_the_operand(rng: np.random.Generator) -> None:
    weights = rng.integers(-127, 128, (3, 16, 3, 3)).astype(np.int8)
    packed = operand_order(weights)
    assert packed.shape == (3, 192)
    k = weights.transpose(0, 2, 3, 1).reshape(3, 144)
    for position in range(192):
        s, h, q, b = position // 32 % 2, position // 16 % 2, position // 4 % 4, position % 4
        number = position // 64 * 64 + 16 * q + 8 * s + 4 * h + b
        truth = k[:, number] if number < 144 else 0
        np.testing.assert_array_equal(packed[:, position], truth)


def test_sizes_may_be_dynamic(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": ("batch", 16, "height", 7)})
    y = graph.product(
        "Conv", graph.rounded("x"), (32, 16, 3, 3), bias="int32", pads=[1, 1, 1, 1], strides=[2, 2]
    )
    case = graph.case(graph.rounded(graph.add("Relu", y)))
    check_dynamic(case, "persistent_conv", H200, rng)
