"""Heads of detectors: what they join and split leaves the kernels that make it, interpreted."""

from collections import Counter
from dataclasses import replace

import gpu_interpreter
import int8_reference
import numpy as np
import onnx
import pytest
from gpu_graphs import Case, ints, node, normal
from int8_graphs import Graph

from toolkit.gpu.target import GpuTarget

pytest.importorskip("triton", reason="Triton is not installed")

LIMITS = {"fp32": 1e-5, "fp16": 1e-2}
PRECISIONS = pytest.mark.parametrize("precision", LIMITS)


def check(case: Case, precision: str, rng: np.random.Generator) -> Counter[str]:
    """Compare with onnxruntime; return how often each kernel is started."""
    feeds, program = case.feeds(rng), case.lower(precision)
    outputs = gpu_interpreter.run(program, feeds)
    for name, truth in case.truth(feeds).items():
        assert outputs[name].shape == truth.shape
        difference = np.linalg.norm(outputs[name].astype(np.float64) - truth)
        assert difference < LIMITS[precision] * np.linalg.norm(truth), name
    return Counter(call.spec.title for call in program.launches)


def head(
    rng: np.random.Generator, images: int, *, end: list[onnx.NodeProto], boxes: int = 8
) -> Case:
    """Boxes and scores of two scales: joined, flattened, joined and split again."""
    nodes: list[onnx.NodeProto] = []
    weights = {"flat": ints(0, 0, -1), "parts": ints(boxes, 6)}
    inputs = {"x0": (images, 16, 6, 8), "x1": (images, 16, 3, 4)}
    for scale in inputs:
        for part, filters in (("b", boxes), ("s", 6)):
            weights |= {
                f"w{part}{scale}": normal(rng, filters, 16, 1, 1),
                f"c{part}{scale}": rng.normal(size=filters).astype(np.float32),
            }
            names = f"{scale} w{part}{scale} c{part}{scale}"
            nodes.append(node("Conv", names, f"{part}{scale}"))
        nodes.append(node("Concat", f"b{scale} s{scale}", f"j{scale}", axis=1))
        nodes.append(node("Reshape", f"j{scale} flat", f"r{scale}"))
    split = node("Split", "all parts", "boxes", axis=1)
    split.output.append("scores")
    nodes += [node("Concat", "rx0 rx1", "all", axis=2), split, *end]
    return Case(nodes, inputs, weights)


@PRECISIONS
@pytest.mark.parametrize("images", [1, 3])
def test_a_head_is_written_once(images: int, precision: str, rng: np.random.Generator) -> None:
    end = [node("Sigmoid", "scores", "p"), node("Concat", "boxes p", "y", axis=1)]
    kernels = check(head(rng, images, end=end), precision, rng)
    assert set(kernels) <= {"gemm strided nchw", "transpose_tiles", "elementwise"}
    assert kernels["gemm strided nchw"] == 4
    assert kernels["transpose_tiles"] + kernels["elementwise"] == 2  # the inputs, channels last


@PRECISIONS
def test_boxes_and_scores_leave_as_two_outputs(precision: str, rng: np.random.Generator) -> None:
    end = [node("Sigmoid", "scores", "z"), node("Identity", "boxes", "y")]
    case = head(rng, 2, end=end)
    case = Case(case.nodes, case.inputs, case.weights, ("y", "z"))
    assert check(case, precision, rng)["gemm strided nchw"] == 4


@PRECISIONS
def test_a_slice_across_parts_joins_them_again(precision: str, rng: np.random.Generator) -> None:
    """Indices 3 to 9 of 8 + 6 are no whole parts: the concatenation stays."""
    case = head(rng, 2, end=[])
    ends = {"from": ints(3), "to": ints(9), "axis": ints(1)}
    nodes = [*case.nodes[:-1], node("Slice", "all from to axis", "y")]
    check(Case(nodes, case.inputs, {**case.weights, **ends}), precision, rng)


@PRECISIONS
@pytest.mark.parametrize(("start", "end"), [(-99, 5), (-99, 99), (9, 99), (-5, -1)])
def test_a_slice_may_begin_and_end_beyond_what_is_joined(
    start: int, end: int, precision: str, rng: np.random.Generator
) -> None:
    case = head(rng, 2, end=[])
    ends = {"from": ints(start), "to": ints(end), "axis": ints(1)}
    nodes = [*case.nodes[:-1], node("Slice", "all from to axis", "y")]
    check(Case(nodes, case.inputs, {**case.weights, **ends}), precision, rng)


@PRECISIONS
def test_what_others_read_stays_joined(precision: str, rng: np.random.Generator) -> None:
    end = [node("Sigmoid", "scores", "z"), node("Relu", "all", "y"), node("Neg", "boxes", "v")]
    case = head(rng, 2, end=end)
    check(Case(case.nodes, case.inputs, case.weights, ("y", "z", "v")), precision, rng)


@PRECISIONS
def test_a_function_of_parts_that_others_read_stays(
    precision: str, rng: np.random.Generator
) -> None:
    nodes = [
        node("Conv", "x v", "a"),
        node("Conv", "x w", "b"),
        node("Concat", "a b", "c", axis=1),
        node("Tanh", "c", "y"),
        node("Neg", "a", "z"),
    ]
    weights = {"v": normal(rng, 8, 4, 1, 1), "w": normal(rng, 8, 4, 3, 3)}
    nodes[1].attribute.append(onnx.helper.make_attribute("pads", [1, 1, 1, 1]))
    check(Case(nodes, {"x": (2, 4, 5, 6)}, weights, ("y", "z")), precision, rng)


@PRECISIONS
@pytest.mark.parametrize("filters", [3, 16, 80])
def test_a_last_convolution_writes_its_output_as_it_leaves(
    filters: int, precision: str, rng: np.random.Generator
) -> None:
    nodes = [node("Conv", "x w b", "c"), node("Sigmoid", "c", "y")]
    weights = {
        "w": normal(rng, filters, 20, 1, 1),
        "b": rng.normal(size=filters).astype(np.float32),
    }
    kernels = check(Case(nodes, {"x": (2, 20, 7, 11)}, weights), precision, rng)
    assert kernels["gemm strided nchw"] == 1
    assert sum(kernels.values()) == 2  # the input, channels last


@PRECISIONS
def test_a_residual_excludes_nchw_results(precision: str, rng: np.random.Generator) -> None:
    nodes = [node("Conv", "x w", "c"), node("Add", "c x", "y")]
    kernels = check(
        Case(nodes, {"x": (2, 8, 5, 5)}, {"w": normal(rng, 8, 8, 1, 1)}), precision, rng
    )
    assert "gemm strided nchw" not in kernels


def test_nchw_results_of_int8_are_exact(rng: np.random.Generator) -> None:
    graph = Graph(rng, {"x": (3, 20, 5, 7)})
    case = graph.case(graph.product("Conv", graph.rounded("x"), (21, 20, 1, 1)))
    program = case.lower("int8")
    assert "gemm strided nchw" in {call.spec.title for call in program.launches}
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(program, feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


@pytest.mark.parametrize("sm", [87, 90])
@pytest.mark.parametrize("filters", [80, 128])
def test_nchw_results_stored_as_int8_are_exact(
    filters: int, sm: int, rng: np.random.Generator
) -> None:
    """INT8 in NCHW is exact, from tiles in registers and in shared memory."""
    graph, step = Graph(rng, {"x0": (2, 64, 16, 16), "x1": (2, 64, 16, 8)}), np.float32(0.05)
    heads = []
    for x in graph.inputs:
        y = graph.product("Conv", graph.rounded(x), (filters, 64, 1, 1))
        shape = graph.constant(ints(2, filters, -1))
        heads.append(graph.rounded(graph.add("Reshape", graph.add("Relu", y), shape), step))
    joined = graph.rounded(graph.add("Concat", *heads, axis=2), step)
    case = graph.case(graph.product("MatMul", joined, (384, 16), axis=1))
    program = case.lower("int8", GpuTarget(sm=sm, sm_count=1))
    assert "gemm strided nchw" in {launch.spec.title for launch in program.launches}
    feeds = case.feeds(rng)
    outputs = gpu_interpreter.run(program, feeds)
    for name, truth in int8_reference.run(case.model(), feeds).items():
        np.testing.assert_array_equal(outputs[name], truth, strict=True)


@pytest.mark.parametrize("filters", [40, 72, 80, 96, 200])
def test_blocks_of_a_power_of_two_and_a_few_filters(filters: int, rng: np.random.Generator) -> None:
    weights = {"w": normal(rng, filters, 20, 1, 1)}
    case = Case([node("Conv", "x w", "y")], {"x": (2, 20, 7, 11)}, weights)
    feeds, program = case.feeds(rng), case.lower("fp16", GpuTarget(sm=90, sm_count=4))
    (at,) = (
        i
        for i, one in enumerate(program.ops)
        if one.tactics[0][0].spec.title == "gemm strided nchw"
    )
    parted = [dict(call.spec.constants)["TAIL_N"] for (call,) in program.ops[at].tactics]
    assert any(parted) == (filters < 128)
    truth = case.truth(feeds)["y"]
    for tactic in program.ops[at].tactics:
        ops = (
            *program.ops[:at],
            replace(program.ops[at], tactics=(tactic,)),
            *program.ops[at + 1 :],
        )
        actual = gpu_interpreter.run(replace(program, ops=ops), feeds)["y"]
        assert np.linalg.norm(actual - truth) < 2e-3 * np.linalg.norm(truth)
