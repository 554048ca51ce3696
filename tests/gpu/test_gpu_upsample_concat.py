"""1x1 convolutions of an upsampled tensor and a larger one, interpreted."""

from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, node, normal
from int8_graphs import Graph

from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

HOPPER = GpuTarget(sm=90, sm_count=4)
HALF_PIXELS = {
    "coordinate_transformation_mode": "half_pixel",
    "nearest_mode": "round_prefer_floor",
}


def resize(source: str, result: str, **attributes: object) -> onnx.NodeProto:
    wanted = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    made = node("Resize", source, result, mode="nearest", **{**wanted, **attributes})
    made.input[:] = [source, "", "scales"]
    return made


def pyramid(
    rng: np.random.Generator,
    *,
    factors: tuple[int, int] = (2, 2),
    channels: tuple[int, int] = (64, 128),
    after: tuple[onnx.NodeProto, ...] = (),
    **attributes: object,
) -> Case:
    """Pictures of 3x5 pixels beside ones of whole times that."""
    nodes = [
        resize("x", "u", **attributes),
        node("Concat", "u z", "j", axis=1),
        node("Conv", "j w b", "c"),
        *(after or (node("Relu", "c", "y"),)),
    ]
    weights = {
        "w": normal(rng, 24, sum(channels), 1, 1),
        "b": rng.normal(size=24).astype(np.float32),
        "scales": np.array([1, 1, *factors], np.float32),
    }
    large = (2, channels[1], 3 * factors[0], 5 * factors[1])
    return Case(nodes, {"x": (2, channels[0], 3, 5), "z": large}, weights)


def kernels(program: KernelProgram) -> set[str]:
    return {call.spec.title for call in program.launches}


def each_tactic(program: KernelProgram) -> list[KernelProgram]:
    (at,) = (
        i
        for i, one in enumerate(program.ops)
        if one.tactics[0][0].spec.title == "conv_upsample_concat"
    )
    choices = (replace(program.ops[at], tactics=(tactic,)) for tactic in program.ops[at].tactics)
    return [
        replace(program, ops=(*program.ops[:at], one, *program.ops[at + 1 :])) for one in choices
    ]


@pytest.mark.parametrize("attributes", [{}, HALF_PIXELS])
@pytest.mark.parametrize("factors", [(2, 2), (3, 1), (1, 2)])
def test_the_small_image_is_read_itself(
    factors: tuple[int, int], attributes: dict[str, object], rng: np.random.Generator
) -> None:
    case = pyramid(rng, factors=factors, **attributes)
    feeds = case.feeds(rng)
    truth = case.truth(feeds)["y"]
    for program in each_tactic(case.lower("fp16", HOPPER)):
        found = gpu_interpreter.run(program, feeds)["y"]
        assert np.linalg.norm(found - truth) < 2e-3 * np.linalg.norm(truth)


@pytest.mark.parametrize("filters", [24, 64])
def test_it_is_exact_in_int8(filters: int, rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (2, 128, 3, 2), "z": (2, 64, 6, 4)})
    scale = graph.scale()
    scales = graph.constant(np.array([1, 1, 2, 2], np.float32))
    up = graph.name()
    graph.nodes.append(resize(graph.rounded("x", scale), up))
    graph.nodes[-1].input[2] = scales
    joined = graph.rounded(graph.add("Concat", up, graph.rounded("z", scale), axis=1), scale)
    sums = graph.product("Conv", joined, (filters, 192, 1, 1), bias="int32")
    case = graph.case(graph.rounded(graph.add("Relu", sums)))
    feeds = case.feeds(rng)
    (truth,) = int8_reference.run(case.model(), feeds).values()
    assert len(np.unique(truth)) > 4
    for program in each_tactic(case.lower("int8", HOPPER)):
        (found,) = gpu_interpreter.run(program, feeds).values()
        np.testing.assert_array_equal(found, truth, strict=True)


def test_what_others_read_is_joined(rng: np.random.Generator) -> None:
    """The repeated picture is there anyway."""
    after = (node("Neg", "u", "v"), node("Relu", "c", "y"))
    case = pyramid(rng, after=after)
    program = Case(case.nodes, case.inputs, case.weights, ("y", "v")).lower("fp16", HOPPER)
    assert "conv_upsample_concat" not in kernels(program)


@pytest.mark.parametrize("channels", [(32, 64), (64, 96)])
def test_channels_that_are_no_whole_steps_are_joined(
    channels: tuple[int, int], rng: np.random.Generator
) -> None:
    assert "conv_upsample_concat" not in kernels(
        pyramid(rng, channels=channels).lower("fp16", HOPPER)
    )


def test_a_repeated_image_beside_itself_is_joined(rng: np.random.Generator) -> None:
    case = pyramid(rng, channels=(64, 64))
    nodes = [case.nodes[0], node("Concat", "u u", "j", axis=1), *case.nodes[2:]]
    case = replace(case, nodes=nodes, inputs={"x": case.inputs["x"]})
    program, feeds = case.lower("fp16", HOPPER), case.feeds(rng)
    assert "conv_upsample_concat" not in kernels(program)
    found, truth = gpu_interpreter.run(program, feeds)["y"], case.truth(feeds)["y"]
    assert np.linalg.norm(found - truth) < 2e-3 * np.linalg.norm(truth)


def test_two_rows_that_become_four_by_a_scale_that_is_not_two_are_joined(
    rng: np.random.Generator,
) -> None:
    case = pyramid(rng)
    weights = {**case.weights, "scales": np.array([1, 1, 2.4, 2], np.float32)}
    inputs = {"x": (2, 64, 2, 5), "z": (2, 128, 4, 10)}
    case = replace(case, inputs=inputs, weights=weights)
    program, feeds = case.lower("fp16", HOPPER), case.feeds(rng)
    assert "conv_upsample_concat" not in kernels(program)
    found, truth = gpu_interpreter.run(program, feeds)["y"], case.truth(feeds)["y"]
    assert np.linalg.norm(found - truth) < 2e-3 * np.linalg.norm(truth)


def test_other_coordinates_are_joined(rng: np.random.Generator) -> None:
    case = pyramid(rng, coordinate_transformation_mode="align_corners")
    assert "conv_upsample_concat" not in kernels(case.lower("fp16", HOPPER))
