"""Cut a placed graph into segments: maximal pieces on one processor that can run in sequence.

Nodes are first grouped by lane and depth (the number of lane changes on the longest path from
the inputs), which is always a valid cut; then groups of one lane are merged wherever no path leads
from one to the other through a third, until no merge is left.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from device.manifest import Crossing, Processor


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """What nodes of one segment share: the processor and, on the DLA, the batch (rule G7)."""

    processor: Processor
    batch: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One node as the cut reads it: the tensors that it needs and makes, and its lane."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    lane: Lane


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A maximal piece of the graph on one processor; nodes are in running order."""

    name: str
    processor: Processor
    nodes: tuple[str, ...]


def cut(steps: Sequence[Step]) -> tuple[PlannedSegment, ...]:
    """Return the segments of `steps` (in topological order), in running order."""
    edges = _edges(steps)
    groups = _merge(_by_depth(steps, edges), steps, edges)
    order = _running_order(groups, edges)
    counts: dict[Processor, int] = {}
    segments = []
    for members in order:
        processor = steps[members[0]].lane.processor
        number = counts.get(processor, 0)
        counts[processor] = number + 1
        nodes = tuple(steps[index].name for index in members)
        segments.append(PlannedSegment(f"{processor}.{number}", processor, nodes))
    return tuple(segments)


def find_crossings(
    segments: Sequence[PlannedSegment],
    steps: Sequence[Step],
    size_of: Callable[[str], int | None],
) -> tuple[Crossing, ...]:
    """Return the tensors that pass to another processor, in the order in which they are made."""
    home = {node: segment for segment in segments for node in segment.nodes}
    readers: dict[str, list[PlannedSegment]] = {}
    for step in steps:
        for tensor in step.reads:
            readers.setdefault(tensor, []).append(home[step.name])
    rank = {segment.name: index for index, segment in enumerate(segments)}
    crossings = []
    for step in sorted(steps, key=lambda step: rank[home[step.name].name]):
        source = home[step.name]
        for tensor in step.writes:
            users = [s for s in readers.get(tensor, ()) if s.processor != source.processor]
            targets = tuple(sorted({s.name for s in users}, key=lambda name: rank[name]))
            if targets:
                crossings.append(
                    Crossing(
                        tensor=tensor, source=source.name, targets=targets, bytes=size_of(tensor)
                    )
                )
    return tuple(crossings)


def _edges(steps: Sequence[Step]) -> tuple[tuple[int, ...], ...]:
    """For each step, the indices of the steps whose results it reads."""
    maker = {tensor: index for index, step in enumerate(steps) for tensor in step.writes}
    return tuple(
        tuple(sorted({maker[tensor] for tensor in step.reads if tensor in maker})) for step in steps
    )


def _by_depth(steps: Sequence[Step], edges: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    depth: list[int] = []
    groups: dict[tuple[int, Lane], list[int]] = {}
    for index, step in enumerate(steps):
        below = [depth[p] + (steps[p].lane != step.lane) for p in edges[index]]
        depth.append(max(below, default=0))
        groups.setdefault((depth[index], step.lane), []).append(index)
    # Every edge leads to a deeper group or stays inside one, so this order is a running order.
    return [tuple(groups[key]) for key in sorted(groups)]


def _merge(
    groups: list[tuple[int, ...]], steps: Sequence[Step], edges: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Merge groups of one lane, the earliest pair first, until every merge would close a cycle."""
    pair = _mergeable(groups, steps, edges)
    while pair is not None:
        first, second = pair
        merged = tuple(sorted(groups[first] + groups[second]))
        rest = [group for index, group in enumerate(groups) if index not in pair]
        groups = _running_order([*rest, merged], edges)
        pair = _mergeable(groups, steps, edges)
    return groups


def _mergeable(
    groups: Sequence[tuple[int, ...]], steps: Sequence[Step], edges: Sequence[tuple[int, ...]]
) -> tuple[int, int] | None:
    """Return the first two groups of one lane with no path between them through a third."""
    children = _children(groups, edges)
    after, before = [0] * len(groups), [0] * len(groups)  # bits: the groups reached, reaching
    for index in reversed(range(len(groups))):
        for child in children[index]:
            after[index] |= 1 << child | after[child]
    for index in range(len(groups)):
        for child in children[index]:
            before[child] |= 1 << index | before[index]
    lanes = [steps[group[0]].lane for group in groups]
    for first in range(len(groups)):
        for second in range(first + 1, len(groups)):
            if lanes[first] == lanes[second] and not after[first] & before[second]:
                return first, second
    return None


def _children(
    groups: Sequence[tuple[int, ...]], edges: Sequence[tuple[int, ...]]
) -> list[set[int]]:
    home = {node: index for index, group in enumerate(groups) for node in group}
    children: list[set[int]] = [set() for _ in groups]
    for node, group in home.items():
        for parent in edges[node]:
            if home[parent] != group:
                children[home[parent]].add(group)
    return children


def _running_order(
    groups: Iterable[tuple[int, ...]], edges: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Sort groups so that each follows those it reads; of those ready, the earliest node first."""
    waiting = sorted(groups)
    children = _children(waiting, edges)
    missing = [0] * len(waiting)
    for targets in children:
        for target in targets:
            missing[target] += 1
    ready = [index for index, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        index = min(ready)
        ready.remove(index)
        order.append(waiting[index])
        for child in children[index]:
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
    return order
