"""Crossings between the segments of a placed graph."""

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given
from planning_graphs import one_node

from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.planning.segments import find_crossings

PROCESSORS = ("gpu", "dla0", "dla1")


def node(name: str, reads: Sequence[str], result: str) -> NodeView:
    shape = (1, 8, 4, 4)
    one = one_node("Relu", [shape], shape)
    return replace(
        one,
        name=name,
        inputs=tuple(replace(one.inputs[0], name=tensor) for tensor in reads),
        outputs=(replace(one.outputs[0], name=result),),
        reads=tuple(reads),
    )


@st.composite
def placed_graphs(draw: st.DrawFn) -> tuple[tuple[NodeView, ...], tuple[PlannedSegment, ...]]:
    """Random graphs of up to 12 nodes, each node a segment of its own."""
    count = draw(st.integers(1, 12))
    views, segments = [], []
    for index in range(count):
        reads = sorted(draw(st.sets(st.integers(0, index), max_size=3)))  # 0: the graph's input
        views.append(node(f"n{index + 1}", [f"t{i}" for i in reads], f"t{index + 1}"))
        processor = draw(st.sampled_from(PROCESSORS))
        segments.append(PlannedSegment(f"s{index + 1}", processor, (f"n{index + 1}",)))
    return tuple(views), tuple(segments)


@given(placed_graphs())
def test_crossings_are_the_tensors_read_on_another_processor(graph):
    views, segments = graph
    on = {segment.nodes[0]: segment for segment in segments}
    expected = {
        (result.name, on[maker.name].name, on[reader.name].name)
        for maker in views
        for result in maker.outputs
        for reader in views
        if result.name in reader.reads and on[reader.name].processor != on[maker.name].processor
    }
    crossings = find_crossings(segments, views, len)
    assert {(c.tensor, c.source, target) for c in crossings for target in c.targets} == expected
    assert len({c.tensor for c in crossings}) == len(crossings)
    assert all(crossing.bytes == len(crossing.tensor) for crossing in crossings)


def test_a_crossing_lists_its_targets_in_running_order():
    views = (node("a", ["x"], "t"), node("b", ["t"], "u"), node("c", ["t", "u"], "v"))
    segments = (
        PlannedSegment("gpu.0", "gpu", ("a",)),
        PlannedSegment("dla1.0", "dla1", ("b",)),
        PlannedSegment("dla0.0", "dla0", ("c",)),
    )
    first = find_crossings(segments, views, lambda tensor: None)[0]
    assert (first.tensor, first.source, first.targets) == ("t", "gpu.0", ("dla1.0", "dla0.0"))
    assert first.bytes is None
