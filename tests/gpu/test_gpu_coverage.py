"""Segments that kernels cover in part: how they are cut, what is said, and what comes out."""

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import onnxruntime as ort
import pytest
from gpu_graphs import Case, node, normal
from hypothesis import given
from model_fixtures import save
from planning_graphs import constant, one_node

from device.engine.cuda_manifest import Cuda
from device.engine.manifest import DimRange
from device.profile import load_profile
from device.runtime.session import open_session
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.gpu import segments
from toolkit.gpu.codegen import compile_kernels as compiling
from toolkit.gpu.codegen.messages import Compiled
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.launch import KernelSpec
from toolkit.gpu.operations import OPERATIONS, OperatorRow
from toolkit.gpu.passes.fusion import Group
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.constants import load_costs
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.portable import cut_segments
from toolkit.quantize.ranges.measure import RangeOptions

PROFILE = "orin-nano-8gb"
BIG = one_node("Conv", [(1, 256, 64, 64), constant(256, 256, 3, 3)], (1, 256, 62, 62))


def convolution(name: str, reads: Sequence[str], output: str, like: NodeView = BIG) -> NodeView:
    first, weight = like.inputs
    assert first is not None
    inputs = tuple(replace(first, name=tensor) for tensor in reads)
    outputs = (replace(like.outputs[0], name=output),)
    return replace(like, name=name, inputs=(*inputs, weight), outputs=outputs, reads=tuple(reads))


def cut(views: Sequence[NodeView], refused: Sequence[str]) -> tuple[PlannedSegment, ...]:
    costs = CostModel(views, load_profile(PROFILE), precision="fp16")
    planned = PlannedSegment("gpu.0", "gpu", tuple(view.name for view in views))
    return cut_segments([planned], views, {name: f"{name} is odd" for name in refused}, costs)


@st.composite
def partly_covered(draw: st.DrawFn) -> tuple[tuple[NodeView, ...], tuple[str, ...]]:
    """Random graphs of up to 6 large convolutions, some of them refused."""
    views = []
    for index in range(draw(st.integers(1, 6))):
        reads = sorted(draw(st.sets(st.integers(0, index), min_size=1, max_size=3)))
        views.append(convolution(f"n{index + 1}", [f"t{i}" for i in reads], f"t{index + 1}"))
    names = [view.name for view in views]
    return tuple(views), tuple(draw(st.lists(st.sampled_from(names), unique=True)))


def fewest_pieces(views: Sequence[NodeView], refused: Sequence[str]) -> int:
    """Try every running order and count how often it passes between covered and refused nodes."""
    best = len(views)
    for order in itertools.permutations(views):
        tensors = {"t0"}
        for view in order:
            if not tensors.issuperset(view.reads):
                break
            tensors.add(view.outputs[0].name)
        else:
            kinds = [view.name in refused for view in order]
            best = min(best, sum(a != b for a, b in itertools.pairwise(kinds)) + 1)
    return best


@given(partly_covered())
def test_the_pieces_run_in_order_and_are_as_few_as_can_be(
    graph: tuple[tuple[NodeView, ...], tuple[str, ...]],
) -> None:
    views, refused = graph
    pieces = cut(views, refused)
    assert sorted(n for p in pieces for n in p.nodes) == sorted(v.name for v in views)
    assert len({piece.name for piece in pieces}) == len(pieces)
    by_name = {view.name: view for view in views}
    tensors = {"t0"}
    for piece in pieces:
        assert all((n in refused) == (piece.place == "portable") for n in piece.nodes)
        for name in piece.nodes:
            assert tensors.issuperset(by_name[name].reads)
            tensors.add(by_name[name].outputs[0].name)
    assert len(pieces) == fewest_pieces(views, refused)


def test_a_segment_without_refused_nodes_stays_as_it_is() -> None:
    small = one_node("Relu", [(1, 8, 4, 4)], (1, 8, 4, 4))
    (piece,) = cut([small], [])
    assert (piece.name, piece.place) == ("gpu.0", "gpu")


def test_only_segments_of_the_gpu_are_cut() -> None:
    views = [convolution(f"n{i}", [f"t{i}"], f"t{i + 1}") for i in range(6)]
    names = [view.name for view in views]
    planned = [
        PlannedSegment("gpu.0", "gpu", tuple(names[:1])),
        PlannedSegment("dla0.0", "dla0", tuple(names[1:3])),
        PlannedSegment("gpu.1", "gpu", tuple(names[3:])),
    ]
    costs = CostModel(views, load_profile(PROFILE), precision="int8")
    pieces = cut_segments(planned, views, {"n4": "odd"}, costs)
    assert [(p.name, p.processor, p.nodes) for p in pieces] == [
        ("gpu.0", "gpu", ("n0",)),
        ("dla0.0", "dla0", ("n1", "n2")),
        ("gpu.1.0", "gpu", ("n3",)),
        ("gpu.1.1", "gpu", ("n4",)),
        ("gpu.1.2", "gpu", ("n5",)),
    ]
    assert [piece.place for piece in pieces] == ["gpu", "dla", "gpu", "portable", "gpu"]


def crossings_us(elements: int) -> float:
    """Two crossings of a tensor of float32, from the constants of the cost model."""
    costs, profile = load_costs(), load_profile(PROFILE)
    bandwidth = profile.memory.bandwidth_gbps.value * 1e3 * costs.gpu.bandwidth_share.value
    return 2 * (costs.crossing.us.value + 2 * 4 * elements / bandwidth)


@pytest.mark.parametrize(
    ("channels", "expected"), [(8, False), (64, False), (96, False), (128, True), (256, True)]
)
def test_an_island_gets_kernels_where_they_save_more_than_its_crossings_take(
    channels: int, expected: bool
) -> None:
    shape = (1, channels, 14, 14)
    like = one_node("Conv", [shape, constant(channels, channels, 1, 1)], shape)
    views = [
        convolution("a", ["t0"], "t1", like),
        convolution("b", ["t1"], "t2", like),
        convolution("c", ["t2"], "t3", like),
    ]
    costs = CostModel(views, load_profile(PROFILE), precision="fp16")
    saved_us = costs.node("b", "cpu").time_us - costs.node("b", "gpu").time_us
    assert expected == (saved_us > crossings_us(math.prod(shape)))
    pieces = cut(views, ["a", "c"])
    alone = ["portable", "gpu", "portable"]
    assert [piece.place for piece in pieces] == (alone if expected else ["portable"])
    assert expected or pieces[0].unpaid == ("b",)


def test_all_nodes_without_kernels_are_found_at_once(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.delitem(OPERATIONS, "MaxPool")
    monkeypatch.delitem(OPERATIONS, "AveragePool")
    case = Case(
        [
            node("MaxPool", "x", "a", kernel_shape=[2, 2]),
            node("Conv", "a w", "b"),
            node("AveragePool", "b", "c", kernel_shape=[2, 2]),
            node("MaxPool", "c", "y", kernel_shape=[2, 2]),
        ],
        {"x": (1, 8, 8, 8)},
        {"w": normal(rng, 8, 8, 1, 1)},
    )
    with pytest.raises(NotCoveredError, match="and 2 more reasons") as caught:
        case.lower()
    assert sorted(caught.value.reasons) == ["AveragePool:c", "MaxPool:a", "MaxPool:y"]


def test_emitters_that_refuse_are_all_heard(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    def refuse(_: object, group: object) -> None:
        raise NotCoveredError("pooling is closed today")

    monkeypatch.setitem(OPERATIONS, "MaxPool", OperatorRow(refuse))
    case = Case(
        [
            node("MaxPool", "x", "a", kernel_shape=[2, 2]),
            node("Conv", "a w", "b"),
            node("MaxPool", "b", "y", kernel_shape=[2, 2]),
        ],
        {"x": (1, 8, 8, 8)},
        {"w": normal(rng, 8, 8, 1, 1)},
    )
    with pytest.raises(NotCoveredError, match="closed today") as caught:
        case.lower()
    assert sorted(caught.value.reasons) == ["MaxPool:a", "MaxPool:y"]


def two_halves(
    path: Path, rng: np.random.Generator, height: int | str = 64, width: int | str = 64
) -> Path:
    """Two large convolutions with a pooling between them, and one after."""
    weights = {"v": normal(rng, 64, 16, 3, 3), "w": normal(rng, 64, 64, 3, 3)}
    pads = [1, 1, 1, 1]
    nodes = [
        node("Conv", "x v", "a", pads=pads),
        node("Relu", "a", "b"),
        node("MaxPool", "b", "c", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", "c w", "d", pads=pads),
        node("MaxPool", "d", "e", kernel_shape=[2, 2], strides=[2, 2]),
        node("Relu", "e", "y"),
    ]
    quarters = (16, 16) if (height, width) == (64, 64) else ("rows", "columns")
    return save(path, nodes, {"x": (1, 16, height, width)}, {"y": (1, 64, *quarters)}, weights)


def without_compiler(
    specs: Sequence[KernelSpec], gpu: object, on_progress: object = None
) -> tuple[Compiled, ...]:
    """Stand in for Triton: kernels that nothing can start, for engines that are run portable."""
    return tuple(
        Compiled(
            function="none",
            cubin=hashlib.sha256(repr(spec).encode()).digest(),
            parameters=tuple(name for name, _ in spec.signature),
            threads=128,
            shared_bytes=0,
            registers=None,
            spill_bytes=None,
        )
        for spec in specs
    )


@pytest.fixture
def compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "has_compiler", lambda: True)
    monkeypatch.setattr(compiling, "compile_kernels", without_compiler)
    monkeypatch.setattr("toolkit.engine.provenance.version", lambda name: f"some {name}")


@pytest.fixture
def cut_at_poolings(monkeypatch: pytest.MonkeyPatch, compiled_elsewhere: None) -> None:
    monkeypatch.delitem(OPERATIONS, "MaxPool")


def build(model: Path, precision: str = "fp16") -> BuildResult:
    out = model.with_name(f"{len(list(model.parent.iterdir()))}.engine")
    return build_engine(model, PROFILE, out, BuildOptions(precision=precision))


def infer(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with open_session(path) as session:
        return session.infer(feeds)


@pytest.mark.usefixtures("cut_at_poolings")
def test_a_partly_covered_network_has_kernels_beside_portable_pieces(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = build(two_halves(tmp_path / "m.onnx", rng))
    manifest = result.manifest
    kinds = {
        one.name: [type(each).__name__ for each in one.implementations] for one in manifest.segments
    }
    assert kinds == {
        "gpu.0.0": ["Cuda", "Portable"],
        "gpu.0.1": ["Portable"],
        "gpu.0.2": ["Cuda", "Portable"],
        "gpu.0.3": ["Portable"],
    }
    nodes = {one.name: one.nodes for one in manifest.segments}
    assert nodes["gpu.0.1"] == ("MaxPool:c",)
    assert nodes["gpu.0.3"] == ("MaxPool:e", "Relu:y")  # a Relu is not worth a crossing
    assert {row.node: row.segment for row in manifest.plan} == {
        name: segment for segment, names in nodes.items() for name in names
    }
    notes = [note for note in result.notes if "no GPU kernels" in note]
    assert len(notes) == 2
    assert "gpu.0.1" in notes[0]
    assert "'MaxPool:c' (MaxPool) has no kernel" in notes[0]
    full, half = 4 * 64 * 64 * 64, 4 * 64 * 32 * 32
    assert f"{full} bytes cross to the CPU and {half} back" in notes[0]
    assert "kernels for 1 more nodes would not save their crossings" in notes[1]
    assert [one.nodes for one in result.plan.segments] == list(nodes.values())
    assert [one.place for one in result.plan.segments] == ["gpu", "portable"] * 2


PORTABLE_NOTE = "portable segments compute in FP32; FP16 is for the board"


@pytest.mark.usefixtures("cut_at_poolings")
def test_portable_pieces_of_fp16_are_said_to_compute_in_fp32(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    assert PORTABLE_NOTE in build(two_halves(tmp_path / "m.onnx", rng)).notes


@pytest.mark.usefixtures("compiled_elsewhere")
def test_a_network_that_is_all_kernels_has_no_note_on_portable_ones(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    result = build(two_halves(tmp_path / "m.onnx", rng))
    assert [len(one.implementations) for one in result.manifest.segments] == [2]
    assert PORTABLE_NOTE not in result.notes


@pytest.mark.usefixtures("cut_at_poolings")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_cut_engine_computes_what_the_uncut_one_does(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    model = two_halves(tmp_path / "m.onnx", rng)
    feeds = {"x": rng.normal(size=(1, 16, 64, 64)).astype(np.float32)}
    outputs = infer(build(model, precision).path, feeds)
    monkeypatch.setattr(segments, "has_compiler", lambda: False)
    whole = build(model, precision)
    assert [one.name for one in whole.manifest.segments] == ["gpu.0"]
    assert any("Triton is not installed" in note for note in whole.notes)
    np.testing.assert_allclose(outputs["y"], infer(whole.path, feeds)["y"], rtol=1e-5, atol=1e-6)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (truth,) = session.run(["y"], feeds)
    np.testing.assert_allclose(outputs["y"], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("cut_at_poolings")
def test_pieces_of_any_size_are_cut_by_what_they_cost_at_the_best(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    model = two_halves(tmp_path / "m.onnx", rng, "height", "width")
    dims = tuple(DimRange(name=name, min=32, opt=64, max=96) for name in ("height", "width"))
    result = build_engine(
        model, PROFILE, tmp_path / "m.engine", BuildOptions(precision="fp16", dims=dims)
    )
    kinds = [[type(i).__name__ for i in s.implementations] for s in result.manifest.segments]
    assert kinds == [["Cuda", "Portable"], ["Portable"], ["Cuda", "Portable"], ["Portable"]]
    shapes = [
        implementation.inputs[0].shape
        for segment in result.manifest.segments
        for implementation in segment.implementations
        if isinstance(implementation, Cuda)
    ]
    assert shapes == [(1, 16, "d0", "d1"), (1, 64, "(d0//2)", "(d1//2)")]
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for height, width in ((32, 96), (33, 71)):
        feeds = {"x": rng.normal(size=(1, 16, height, width)).astype(np.float32)}
        (truth,) = session.run(["y"], feeds)
        np.testing.assert_allclose(infer(result.path, feeds)["y"], truth, rtol=1e-5, atol=1e-6)


def refuse_where(
    monkeypatch: pytest.MonkeyPatch, kind: str, refuses: Callable[[LoweringContext], bool]
) -> None:
    """Make lowering refuse an operator that the backend said to support."""
    plain = OPERATIONS[kind].lower
    assert plain is not None

    def emit(ctx: LoweringContext, group: Group) -> None:
        if refuses(ctx):
            raise NotCoveredError(f"{kind} is closed today")
        plain(ctx, group)

    monkeypatch.setitem(OPERATIONS, kind, replace(OPERATIONS[kind], lower=emit))


@pytest.mark.usefixtures("compiled_elsewhere")
def test_a_plan_is_cut_once_more_where_lowering_refuses(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_where(monkeypatch, "MaxPool", lambda _: True)
    manifest = build(two_halves(tmp_path / "m.onnx", rng)).manifest
    kinds = [[type(i).__name__ for i in s.implementations] for s in manifest.segments]
    assert kinds == [["Cuda", "Portable"], ["Portable"], ["Cuda", "Portable"], ["Portable"]]


@pytest.mark.usefixtures("compiled_elsewhere")
def test_a_piece_that_is_refused_again_runs_portable(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alone(ctx: LoweringContext) -> bool:
        return all(op.kind != "MaxPool" for op in ctx.network.operations)

    refuse_where(monkeypatch, "MaxPool", lambda _: True)
    refuse_where(monkeypatch, "Conv", alone)
    model = two_halves(tmp_path / "m.onnx", rng)
    result = build(model)
    kinds = [[type(i).__name__ for i in s.implementations] for s in result.manifest.segments]
    assert kinds == [["Portable"]] * 4
    notes = [note for note in result.notes if "no GPU kernels" in note]
    assert len(notes) == 4
    assert "Conv is closed today" in notes[0]
    assert "MaxPool is closed today" in notes[1]
    feeds = {"x": rng.normal(size=(1, 16, 64, 64)).astype(np.float32)}
    (truth,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(["y"], feeds)
    np.testing.assert_allclose(infer(result.path, feeds)["y"], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("cut_at_poolings")
def test_what_crosses_in_an_int8_engine_is_int8_and_changes_no_bit(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = two_halves(tmp_path / "m.onnx", rng)
    samples = [{"x": rng.normal(size=(1, 16, 64, 64)).astype(np.float32)} for _ in range(2)]
    options = BuildOptions("int8", data=samples, ranges=RangeOptions("minmax"))
    cut_one = build_engine(model, PROFILE, tmp_path / "cut.engine", options)
    monkeypatch.setattr(segments, "has_compiler", lambda: False)
    whole = build_engine(model, PROFILE, tmp_path / "whole.engine", options)
    assert len(cut_one.manifest.segments) > len(whole.manifest.segments) == 1
    tensors = {tensor.name: tensor for tensor in cut_one.manifest.tensors}
    between = [name for one in cut_one.manifest.segments[:-1] for name in one.outputs]
    assert [tensors[name].dtype for name in between] == ["int8"] * len(between)
    # Optimised, onnxruntime fuses more of the whole one, and a tie may round to its other side.
    started = ort.InferenceSession

    def as_written(model: bytes, options: ort.SessionOptions, **given: object) -> object:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return started(model, options, **given)

    monkeypatch.setattr(ort, "InferenceSession", as_written)
    actual, truth = (infer(result.path, samples[0])["y"] for result in (cut_one, whole))
    assert np.array_equal(actual, truth)


@pytest.mark.usefixtures("cut_at_poolings")
def test_what_passes_between_pieces_lies_in_the_arena_while_it_lives(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    manifest = build(two_halves(tmp_path / "m.onnx", rng)).manifest
    extents = {one.tensor: (one.offset, one.offset + one.bytes) for one in manifest.memory.buffers}
    order = {name: at for at, s in enumerate(manifest.segments) for name in s.outputs}
    ends = {name: at for at, s in enumerate(manifest.segments) for name in s.inputs}
    ends |= dict.fromkeys(manifest.outputs, len(manifest.segments))
    assert {"b", "c", "d"} <= extents.keys()
    for one, second in itertools.combinations(extents, 2):
        alive = order[one] <= ends[second] and order[second] <= ends[one]
        apart = extents[one][1] <= extents[second][0] or extents[second][1] <= extents[one][0]
        assert apart or not alive


@pytest.mark.usefixtures("cut_at_poolings")
def test_a_network_whose_covered_nodes_are_not_worth_it_stays_whole(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    nodes = [
        node("Relu", "x", "a"),
        node("MaxPool", "a", "b", kernel_shape=[2, 2]),
        node("Sigmoid", "b", "y"),
    ]
    model = save(tmp_path / "m.onnx", nodes, {"x": (1, 8, 16, 16)}, {"y": (1, 8, 15, 15)})
    result = build(model)
    assert [one.name for one in result.manifest.segments] == ["gpu.0"]
    (note,) = [note for note in result.notes if "no GPU kernels" in note]
    assert "kernels for 2 more nodes would not save their crossings" in note
    assert "bytes cross" not in note
