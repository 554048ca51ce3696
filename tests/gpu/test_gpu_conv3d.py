"""1-D, 3-D and transposed convolutions, interpreted."""

import numpy as np
import pytest
from gpu_graphs import Case, node, normal
from gpu_interpreter import check

pytest.importorskip("triton", reason="Triton is not installed")

PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "fp16"])


VOLUMES = {
    "signal": ((2, 5, 40), 6, (3,), {"pads": [1, 1]}),
    "strided signal": ((1, 8, 41), 16, (5,), {"strides": [2], "pads": [2, 1]}),
    "dilated signal": ((1, 8, 41), 16, (3,), {"dilations": [4]}),
    "depthwise signal": ((2, 7, 20), 7, (3,), {"group": 7, "auto_pad": "SAME_LOWER"}),
    "same signal": ((2, 4, 20), 6, (4,), {"strides": [3], "auto_pad": "SAME_UPPER"}),
    "conv3d": ((2, 3, 5, 6, 7), 8, (3, 3, 3), {"pads": [1, 1, 1, 1, 1, 1]}),
    "uneven volume": (
        (1, 4, 6, 5, 8),
        6,
        (2, 1, 3),
        {"pads": [1, 0, 2, 0, 0, 1], "strides": [2, 1, 2], "dilations": [1, 1, 2]},
    ),
    "grouped volume": ((1, 6, 4, 4, 4), 9, (1, 2, 2), {"group": 3}),
}


@PRECISIONS
@pytest.mark.parametrize("name", VOLUMES)
def test_convolutions(name: str, precision: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = VOLUMES[name]
    weights = {
        "w": normal(rng, filters, shape[1] // attributes.get("group", 1), *taps),
        "b": rng.normal(size=filters).astype(np.float32),
    }
    nodes = [node("Conv", "x w b", "c", **attributes), node("Relu", "c", "y")]
    case = Case(nodes, {"x": shape}, weights)
    assert "gemm im2col_3d" in [call.spec.title for call in case.lower(precision).launches]
    check(case, precision, rng)


TRANSPOSED = {
    "doubling": ((1, 8, 5, 6), 4, (2, 2), {"strides": [2, 2]}),
    "overlapping": ((2, 5, 4, 3), 6, (4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "odd": ((1, 3, 4, 5), 2, (3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "no stride": ((1, 3, 6, 5), 4, (3, 3), {"pads": [1, 0, 1, 2]}),
    "output padding": ((1, 3, 4, 4), 2, (3, 3), {"strides": [3, 2], "output_padding": [2, 1]}),
    "gaps": ((1, 3, 4, 4), 2, (2, 1), {"strides": [3, 4]}),
    "dilated": ((1, 3, 5, 4), 4, (3, 2), {"strides": [2, 3], "dilations": [2, 2]}),
    "grouped": ((1, 6, 4, 5), 6, (3, 3), {"strides": [2, 2], "group": 3}),
    "depthwise": ((2, 5, 4, 4), 5, (4, 4), {"strides": [2, 2], "group": 5, "pads": [1, 1, 1, 1]}),
    "same upper": ((1, 3, 5, 4), 4, (3, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    "same lower": ((1, 3, 5, 4), 4, (3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    "given shape": ((1, 3, 5, 4), 4, (3, 3), {"strides": [2, 2], "output_shape": [10, 9]}),
    "signal": ((2, 3, 9), 4, (5,), {"strides": [3], "pads": [1, 2]}),
    "conv3d": ((1, 3, 3, 4, 2), 4, (2, 3, 2), {"strides": [2, 1, 2], "pads": [0, 1, 0, 1, 1, 0]}),
}


@PRECISIONS
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str, precision: str, rng: np.random.Generator) -> None:
    shape, filters, taps, attributes = TRANSPOSED[name]
    group = attributes.get("group", 1)
    weights = {
        "w": normal(rng, shape[1], filters // group, *taps),
        "b": rng.normal(size=filters).astype(np.float32),
    }
    nodes = [node("ConvTranspose", "x w b", "c", **attributes), node("LeakyRelu", "c", "y")]
    check(Case(nodes, {"x": shape}, weights), precision, rng)


def test_transposed_convolutions_of_random_sizes(rng: np.random.Generator) -> None:
    for _ in range(5):
        taps, strides = (rng.integers(1, 5, 2).tolist() for _ in range(2))
        dilations = rng.integers(1, 3, 2).tolist()
        pads = [
            int(rng.integers(0, (t - 1) * d + 1))
            for t, d in zip(taps * 2, dilations * 2, strict=True)
        ]
        shape = (int(rng.integers(1, 3)), *(int(n) for n in rng.integers(5, 9, 3)))
        weights = {"w": normal(rng, shape[1], int(rng.integers(1, 20)), *taps)}
        attributes = {"strides": strides, "dilations": dilations, "pads": pads}
        check(
            Case([node("ConvTranspose", "x w", "y", **attributes)], {"x": shape}, weights),
            "fp32",
            rng,
        )


@PRECISIONS
def test_a_residual_joins_a_transposed_convolution(
    precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("ConvTranspose", "x w", "c", strides=[2, 2]),
        node("Add", "c r", "y"),
    ]
    case = Case(nodes, {"x": (1, 8, 4, 5), "r": (1, 6, 8, 10)}, {"w": normal(rng, 8, 6, 2, 2)})
    check(case, precision, rng)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("taps", [(3,), (2, 3), (2, 1, 2)])
def test_weights_that_are_made_while_running(
    taps: tuple[int, ...], group: int, rng: np.random.Generator
) -> None:
    shape = (2, 6, *(7, 6, 5)[: len(taps)])
    case = Case(
        [node("Conv", "x w b", "y", group=group)],
        {"x": shape, "w": (8, 6 // group, *taps), "b": (8,)},
        {},
    )
    check(case, "fp32", rng)
