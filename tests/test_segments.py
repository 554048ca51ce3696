"""Cutting a placed graph: complete, in order, pure, maximal and always the same."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from toolkit.planning.segments import Lane, PlannedSegment, Step, cut, find_crossings

LANES = (Lane("gpu"), Lane("dla0", "1"), Lane("dla0", "2"), Lane("cpu"))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Step, ...]:
    """Random graphs of up to 16 nodes with one output each, on random lanes."""
    count = draw(st.integers(1, 16))
    lanes = draw(st.integers(1, len(LANES)))
    steps = []
    for index in range(count):
        reads = draw(st.sets(st.integers(0, index), max_size=3))  # 0 is the input of the graph
        lane = LANES[draw(st.integers(0, lanes - 1))]
        steps.append(Step(f"n{index + 1}", tuple(f"t{i}" for i in reads), (f"t{index + 1}",), lane))
    return tuple(steps)


def chain(*tags: str) -> tuple[Step, ...]:
    """A chain of nodes on the processors given."""
    return tuple(Step(f"n{i}", (f"t{i}",), (f"t{i + 1}",), Lane(tag)) for i, tag in enumerate(tags))


def home_of(segments: tuple[PlannedSegment, ...]) -> dict[str, int]:
    return {node: index for index, segment in enumerate(segments) for node in segment.nodes}


def parents_of(steps: tuple[Step, ...]) -> dict[str, set[str]]:
    maker = {tensor: step.name for step in steps for tensor in step.writes}
    return {step.name: {maker[t] for t in step.reads if t in maker} for step in steps}


@given(graphs())
def test_every_node_is_in_one_segment(steps):
    nodes = [node for segment in cut(steps) for node in segment.nodes]
    assert sorted(nodes) == sorted(step.name for step in steps)


@given(graphs())
def test_segments_and_nodes_follow_what_they_read(steps):
    segments = cut(steps)
    order = [node for segment in segments for node in segment.nodes]
    place = {node: index for index, node in enumerate(order)}
    for node, parents in parents_of(steps).items():
        assert all(place[parent] < place[node] for parent in parents)


@given(graphs())
def test_no_segment_mixes_processors_or_batches(steps):
    lanes = {step.name: step.lane for step in steps}
    for segment in cut(steps):
        assert len({lanes[node] for node in segment.nodes}) == 1
        assert segment.processor == lanes[segment.nodes[0]].processor


@given(graphs())
def test_no_two_segments_of_a_lane_could_be_merged(steps):
    segments = cut(steps)
    home, lanes = home_of(segments), {step.name: step.lane for step in steps}
    for second in range(len(segments)):
        for first in range(second):
            if lanes[segments[first].nodes[0]] == lanes[segments[second].nodes[0]]:
                merged = {n: first if h == second else h for n, h in home.items()}
                assert has_cycle(merged, parents_of(steps))


def has_cycle(home: dict[str, int], parents: dict[str, set[str]]) -> bool:
    """Whether the graph of groups has a cycle, found by taking away groups that wait for none."""
    needs: dict[int, set[int]] = {group: set() for group in home.values()}
    for node, above in parents.items():
        needs[home[node]] |= {home[parent] for parent in above} - {home[node]}
    while needs:
        free = {group for group, above in needs.items() if not above & needs.keys()}
        if not free:
            return True
        for group in free:
            del needs[group]
    return False


@given(graphs())
def test_the_cut_does_not_hang_on_the_order_of_operands(steps):
    turned = tuple(replace(step, reads=step.reads[::-1]) for step in steps)
    assert cut(turned) == cut(steps)


@given(graphs())
def test_crossings_are_the_tensors_read_on_another_processor(steps):
    segments = cut(steps)
    by_name = {segment.name: segment for segment in segments}
    home = {node: segment for segment in segments for node in segment.nodes}
    expected = set()
    for step in steps:
        for reader in steps:
            for tensor in set(step.writes) & set(reader.reads):
                if home[reader.name].processor != home[step.name].processor:
                    expected.add((tensor, home[step.name].name, home[reader.name].name))
    found = find_crossings(segments, steps, len)
    assert {(c.tensor, c.source, target) for c in found for target in c.targets} == expected
    assert all(
        by_name[c.source].processor != by_name[t].processor for c in found for t in c.targets
    )
    assert all(crossing.bytes == len(crossing.tensor) for crossing in found)


def test_names_count_per_processor_in_running_order():
    names = [segment.name for segment in cut(chain("gpu", "dla0", "dla0", "gpu", "dla0"))]
    assert names == ["gpu.0", "dla0.0", "gpu.1", "dla0.1"]


def test_a_side_branch_joins_the_later_segment_of_its_processor():
    # n1 (gpu) could run before or after n2 (dla); only with n3 (gpu) does it need no segment.
    steps = (
        Step("n1", ("x",), ("a",), Lane("gpu")),
        Step("n2", ("x",), ("b",), Lane("dla0")),
        Step("n3", ("a", "b"), ("c",), Lane("gpu")),
    )
    assert [segment.nodes for segment in cut(steps)] == [("n2",), ("n1", "n3")]


def test_a_path_through_another_processor_keeps_segments_apart():
    segments = cut(chain("gpu", "dla0", "gpu"))
    assert [segment.nodes for segment in segments] == [("n0",), ("n1",), ("n2",)]


def test_a_crossing_lists_its_targets_in_running_order():
    steps = (*chain("gpu", "dla0", "gpu"), Step("n3", ("t1", "t3"), ("t4",), Lane("dla0")))
    first = find_crossings(cut(steps), steps, lambda tensor: None)[0]
    assert (first.tensor, first.source, first.targets) == ("t1", "gpu.0", ("dla0.0", "dla0.1"))
    assert first.bytes is None


def test_an_unconnected_branch_adds_no_segment():
    left, right = chain("dla0", "dla0"), (Step("side", ("x",), ("y",), Lane("dla0")),)
    assert [len(segment.nodes) for segment in cut(left + right)] == [3]


def test_a_long_alternating_chain_is_cut_between_all_neighbours():
    tags = ["gpu", "dla0"] * 30
    segments = cut(chain(*tags))
    assert [segment.processor for segment in segments] == tags
    assert all(a.processor != b.processor for a, b in pairwise(segments))
