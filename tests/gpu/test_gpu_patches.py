"""Convolutions that cut a picture into patches, as products; interpreted on the CPU."""

import gpu_interpreter
import int8_reference
import numpy as np
import pytest
from gpu_graphs import Case, node, normal
from int8_graphs import Graph

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-4, "fp16": 1e-2}


def patches(rng: np.random.Generator, **attributes: object) -> Case:
    """Tokens of a picture, as a vision transformer reads it."""
    weights = {"w": normal(rng, 20, 3, 8, 8), "b": normal(rng, 20)}
    nodes = [
        node("Conv", "x w b", "c", **{"strides": [8, 8], **attributes}),
        node("Flatten", "c", "y"),
    ]
    return Case(nodes, {"x": (2, 3, 32, 24)}, weights)


def kernels(case: Case, precision: str) -> list[str]:
    return [call.spec.title for call in case.lower(precision).launches]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_patches_are_copied_once_and_multiplied(precision: str, rng: np.random.Generator) -> None:
    case = patches(rng)
    assert kernels(case, precision)[:2] == ["elementwise", "gemm strided"]
    feeds = case.feeds(rng)
    actual = gpu_interpreter.run(case.lower(precision), feeds)["y"]
    truth = case.truth(feeds)["y"]
    assert np.linalg.norm(actual - truth) < LIMITS[precision] * np.linalg.norm(truth)


def test_patches_that_are_rounded_stay_a_convolution(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 3, 32, 48)})
    tokens = graph.product("Conv", graph.rounded("x"), (20, 3, 16, 16), strides=[16, 16])
    assert "gemm im2col" in kernels(graph.case(graph.rounded(tokens)), "int8")


@pytest.mark.parametrize(
    "attributes",
    [{"strides": [8, 4]}, {"pads": [0, 0, 0, 8]}, {"dilations": [2, 2], "strides": [8, 8]}],
)
def test_windows_that_overlap_or_reach_out_stay_convolutions(
    attributes: dict[str, object], rng: np.random.Generator
) -> None:
    assert "gemm im2col" in kernels(patches(rng, **attributes), "fp16")


def test_an_image_is_reordered_as_it_is_rounded(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 3, 32, 48)})
    tokens = graph.product(
        "Conv", graph.rounded("x"), (20, 3, 16, 16), bias="int32", strides=[16, 16]
    )
    case = graph.case(graph.add("Transpose", tokens, perm=[0, 2, 3, 1]))
    assert kernels(case, "int8")[:2] == ["elementwise", "gemm strided"]
    feeds = case.feeds(rng)
    (actual,) = gpu_interpreter.run(case.lower("int8"), feeds).values()
    truth = int8_reference.run(case.model(), feeds)[case.outputs[0]]
    assert np.linalg.norm(actual - truth) < 1e-3 * np.linalg.norm(truth)  # stored in FP16
