"""Direct first convolutions, interpreted."""

from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_graphs import Case, convolution, node, normal
from int8_graphs import Graph

from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=4)
WINDOWS = {
    "3x3 of stride 2": ((2, 3, 13, 18), 16, (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "no border": ((1, 3, 9, 10), 20, (3, 3), {"strides": [2, 2]}),
    "3x3 of stride 1": ((2, 3, 8, 9), 33, (3, 3), {"pads": [1, 1, 1, 1]}),
    "one channel": ((2, 1, 12, 11), 64, (5, 5), {"strides": [3, 2], "pads": [2, 1, 2, 3]}),
    "exactly 32 numbers": ((1, 4, 9, 8), 5, (2, 4), {"pads": [0, 2, 1, 1]}),
    "dilated": ((1, 2, 12, 11), 7, (3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "same": ((1, 3, 10, 11), 12, (3, 3), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
}


def run_every_tactic(program: KernelProgram, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    (at,) = (
        i for i, one in enumerate(program.ops) if one.tactics[0][0].spec.title == "direct_conv"
    )
    found = []
    for tactic in program.ops[at].tactics:
        ops = [*program.ops]
        ops[at] = replace(ops[at], tactics=(tactic,))
        (result,) = gpu_interpreter.run(replace(program, ops=tuple(ops)), feeds).values()
        found.append(result)
    return found


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_read_from_the_image(name: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = WINDOWS[name]
    case = convolution(rng, shape, filters, taps, node("Relu", "c", "y"), **attributes)
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    for found in run_every_tactic(case.lower("fp16", HOPPER), feeds):
        assert found.shape == truth.shape
        assert np.linalg.norm(found - truth) < 2e-3 * np.linalg.norm(truth)


@pytest.mark.parametrize("bias", ["", "int32"])
@pytest.mark.parametrize("name", ["3x3 of stride 2", "3x3 of stride 1", "exactly 32 numbers"])
def test_an_image_is_rounded_as_it_is_read(name: str, bias: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = WINDOWS[name]
    graph = Graph(rng, {"x": shape})
    weights = (filters, shape[1], *taps)
    found = graph.product("Conv", graph.rounded("x"), weights, bias=bias, **attributes)
    case = graph.case(graph.rounded(graph.add("Relu", found)))
    feeds = case.feeds(rng)
    (truth,) = int8_reference.run(case.model(), feeds).values()
    assert len(np.unique(truth)) > 4
    for result in run_every_tactic(case.lower("int8", HOPPER), feeds):
        np.testing.assert_array_equal(result, truth, strict=True)


@pytest.mark.parametrize(
    ("shape", "filters", "taps"),
    [
        ((1, 3, 9, 9), 65, (3, 3)),  # filters
        ((1, 3, 12, 12), 8, (4, 3)),  # numbers under the window: 36
        ((1, 5, 9, 9), 8, (2, 2)),  # channels
        ((1, 3, 9, 9), 8, (1, 3)),  # taps in a row alone
    ],
)
def test_what_is_too_much_is_read_otherwise(
    shape: tuple[int, ...], filters: int, taps: tuple[int, int], rng: np.random.Generator
) -> None:
    case = convolution(rng, shape, filters, taps, strides=[2, 2])
    kernels = {call.spec.title for call in case.lower("fp16", HOPPER).launches}
    assert "direct_conv" not in kernels
    assert "gemm im2col" in kernels


def test_a_pooling_after_it_keeps_its_kernel(rng: np.random.Generator) -> None:
    pool = {"kernel_shape": [3, 3], "strides": [2, 2]}
    nodes = [
        node("Conv", "x w", "c", strides=[2, 2]),
        node("Relu", "c", "r"),
        node("MaxPool", "r", "y", **pool),
    ]
    case = Case(nodes, {"x": (1, 3, 21, 21)}, {"w": normal(rng, 64, 3, 3, 3)})
    kernels = {call.spec.title for call in case.lower("fp16", HOPPER).launches}
    assert "conv_max_pool" in kernels
    assert "direct_conv" not in kernels


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_only_where_it_was_measured(precision: str, rng: np.random.Generator) -> None:
    case = convolution(rng, (1, 3, 9, 9), 8, (3, 3), strides=[2, 2])
    gpu = HOPPER if precision == "fp32" else GpuTarget(sm=87, sm_count=8)
    assert "direct_conv" not in {call.spec.title for call in case.lower(precision, gpu).launches}
