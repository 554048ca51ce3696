"""Cut a placed network into the fewest segments, and find its connected pieces.

A running order of segments is a path through sets of finished tasks: each step picks a lane (a
processor and, on the DLA, a batch size) and runs all that can run there. Running less never helps,
so a shortest path over the lanes picked is the best cut. With two lanes they alternate and there
is nothing to search but the first one.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Network, Segment

Lane = tuple[Processor, str]

_MAX_STATES = 4000  # beyond it the search keeps to one next lane; placements so torn are no plans


@dataclass(frozen=True, slots=True)
class Graph:
    """The tasks of a network by index, with the tasks that each needs and those that need it."""

    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def arcs(self) -> Iterator[tuple[int, int]]:
        """All pairs of a task and one that reads from it, by the reader."""
        return ((u, v) for v, sources in enumerate(self.parents) for u in sources)


def graph_of(network: Network) -> Graph:
    """Return the dependencies of a network's tasks."""
    rank = {task.name: index for index, task in enumerate(network.tasks)}
    parents: list[set[int]] = [set() for _ in rank]
    children: list[set[int]] = [set() for _ in rank]
    for flow in network.flows:
        for target in flow.targets if flow.source is not None else ():
            source = rank[flow.source or ""]
            parents[rank[target]].add(source)
            children[source].add(rank[target])
    return Graph(
        tuple(tuple(sorted(p)) for p in parents), tuple(tuple(sorted(c)) for c in children)
    )


def segments_of(
    network: Network,
    placement: Mapping[str, Processor],
    segment_us: Mapping[Processor, float],
    graph: Graph | None = None,
) -> tuple[Segment, ...]:
    """Return the segments in running order that cost the least to start, then the fewest."""
    graph = graph or graph_of(network)
    lanes = [lane_of(placement[task.name], task.lane) for task in network.tasks]
    cuts: list[Segment] = []
    for lane, members in _search(graph, lanes, segment_us):
        names = tuple(network.tasks[index].name for index in sorted(members))
        cuts.append(Segment(network.name, lane[0], names))
    return tuple(cuts)


def pieces(
    graph: Graph, homes: Sequence[Processor], processor: Processor
) -> tuple[tuple[int, ...], ...]:
    """Return the connected sets of tasks on `processor`, by their first task."""
    found: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start, home in enumerate(homes):
        if home != processor or start in seen:
            continue
        stack, members = [start], {start}
        while stack:
            task = stack.pop()
            for other in graph.parents[task] + graph.children[task]:
                if homes[other] == processor and other not in members:
                    members.add(other)
                    stack.append(other)
        seen |= members
        found.append(tuple(sorted(members)))
    return tuple(found)


def lane_of(processor: Processor, lane: str) -> Lane:
    """Return the lane of a task: on the GPU all tasks share one."""
    return processor, lane if processor.startswith("dla") else ""


@dataclass(frozen=True, slots=True)
class _Run:
    """A way to have finished some tasks: the tasks of the last segment, and the run before it."""

    lane: Lane
    members: tuple[int, ...]
    before: "_Run | None"


def _search(
    graph: Graph, lanes: Sequence[Lane], segment_us: Mapping[Processor, float]
) -> list[tuple[Lane, tuple[int, ...]]]:
    """Return the lane and tasks of each segment: the cheapest path to all tasks finished."""
    kinds = sorted(set(lanes), key=lambda lane: (lane[0] != "gpu", lane))
    everything = (1 << len(lanes)) - 1
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]  # cost, segments, number, done
    runs: list[_Run | None] = [None]
    settled: set[int] = set()
    while queue:
        cost, count, number, done = heapq.heappop(queue)
        run = runs[number]
        if done == everything:
            return _path(run)
        if done in settled:
            continue
        settled.add(done)
        for lane in kinds:
            members = (
                () if run is not None and run.lane == lane else _ready(graph, lanes, lane, done)
            )
            if not members:
                continue
            after = done | sum(1 << index for index in members)
            runs.append(_Run(lane, members, run))
            entry = (cost + segment_us.get(lane[0], 0.0), count + 1, len(runs) - 1, after)
            heapq.heappush(queue, entry)
        if len(settled) > _MAX_STATES:
            queue = [max(queue, key=lambda entry: entry[3].bit_count())]
    return []


def _ready(graph: Graph, lanes: Sequence[Lane], lane: Lane, done: int) -> tuple[int, ...]:
    """Return all tasks that can run on `lane` without leaving it, given those that are done."""
    members: list[int] = []
    for index, home in enumerate(lanes):
        if home != lane or done >> index & 1:
            continue
        if all(done >> parent & 1 for parent in graph.parents[index]):
            members.append(index)
            done |= 1 << index
    return tuple(members)


def _path(run: _Run | None) -> list[tuple[Lane, tuple[int, ...]]]:
    path = []
    while run is not None:
        path.append((run.lane, run.members))
        run = run.before
    return path[::-1]
