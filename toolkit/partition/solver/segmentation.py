"""Split a placed network into the fewest segments, and find its connected components.

An order of segments is a path through sets of finished tasks: each step selects a lane (a processor
and, on the DLA, a batch size) and runs all ready tasks there. Running fewer never helps, so a
shortest path over lanes is optimal. Two lanes alternate: only the first is to be chosen.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Network, Segment, TaskGraph

Lane = tuple[Processor, str]

_MAX_STATES = 4000  # beyond it the search is greedy; placements this fragmented are no plans


def segments_of(
    network: Network,
    placement: Mapping[str, Processor],
    segment_us: Mapping[Processor, float],
) -> tuple[Segment, ...]:
    """Return the segments in execution order with the lowest start cost, then the fewest."""
    lanes = [lane_of(placement[task.name], task.lane) for task in network.tasks]
    cuts: list[Segment] = []
    for lane, members in _search(network.graph, lanes, segment_us):
        names = tuple(network.tasks[index].name for index in sorted(members))
        cuts.append(Segment(network.name, lane[0], names))
    return tuple(cuts)


def components(
    graph: TaskGraph, processors: Sequence[Processor], processor: Processor
) -> tuple[tuple[int, ...], ...]:
    """Return the connected components of tasks on `processor`, by their first task."""
    components: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for start, home in enumerate(processors):
        if home != processor or start in seen:
            continue
        stack, members = [start], {start}
        while stack:
            task = stack.pop()
            for neighbour in graph.parents[task] + graph.children[task]:
                if processors[neighbour] == processor and neighbour not in members:
                    members.add(neighbour)
                    stack.append(neighbour)
        seen |= members
        components.append(tuple(sorted(members)))
    return tuple(components)


def lane_of(processor: Processor, lane: str) -> Lane:
    """Return the lane of a task: on the GPU all tasks share one."""
    return processor, lane if processor.startswith("dla") else ""


@dataclass(frozen=True, slots=True)
class _Path:
    """A path to a set of finished tasks: the last segment, and the path before it."""

    lane: Lane
    members: tuple[int, ...]
    before: "_Path | None"


def _search(
    graph: TaskGraph, lanes: Sequence[Lane], segment_us: Mapping[Processor, float]
) -> list[tuple[Lane, tuple[int, ...]]]:
    """Return the lane and tasks of each segment: the cheapest path to all tasks finished."""
    kinds = sorted(set(lanes), key=lambda lane: (lane[0] != "gpu", lane))
    if len(kinds) <= 2:
        return _alternating(graph, lanes, kinds, segment_us)
    all_tasks = (1 << len(lanes)) - 1
    queue: list[tuple[float, int, int, int]] = [(0.0, 0, 0, 0)]  # cost, segments, number, done
    runs: list[_Path | None] = [None]
    settled: set[int] = set()
    while queue:
        cost, count, number, done = heapq.heappop(queue)
        run = runs[number]
        if done == all_tasks:
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
            runs.append(_Path(lane, members, run))
            entry = (cost + segment_us.get(lane[0], 0.0), count + 1, len(runs) - 1, after)
            heapq.heappush(queue, entry)
        if len(settled) > _MAX_STATES:
            queue = [max(queue, key=lambda entry: entry[3].bit_count())]
    return []


def _alternating(
    graph: TaskGraph,
    lanes: Sequence[Lane],
    kinds: Sequence[Lane],
    segment_us: Mapping[Processor, float],
) -> list[tuple[Lane, tuple[int, ...]]]:
    """Return what the search finds for up to two lanes: which one is first decides the rest."""
    runs: list[list[list[int]]] = []
    keys: list[tuple[float, ...]] = []
    for turn, first in enumerate(kinds):
        steps = _steps(graph, lanes, first)
        if 0 not in steps:
            continue
        members: list[list[int]] = [[] for _ in range(max(steps) + 1)]
        for index, step in enumerate(steps):
            members[step].append(index)
        order = (first, kinds[turn - 1])
        costs = [0.0]
        for step in range(len(members)):
            costs.append(costs[-1] + segment_us.get(order[step % 2][0], 0.0))
        runs.append(members)
        # Of equal ones the search finds that first whose part before the last step costs less.
        keys.append((costs[-1], len(members), *costs[-2::-1], turn))
    if not runs:
        return []
    best = min(range(len(runs)), key=keys.__getitem__)
    return [(lanes[members[0]], tuple(members)) for members in runs[best]]


def _steps(graph: TaskGraph, lanes: Sequence[Lane], first: Lane) -> list[int]:
    """Return the step of each task where two lanes take turns, each running all that is ready."""
    steps: list[int] = []
    for lane, parents in zip(lanes, graph.parents, strict=True):
        step = 0 if lane == first else 1
        for parent in parents:
            earliest = steps[parent] if lanes[parent] == lane else steps[parent] + 1
            step = max(step, earliest)
        steps.append(step)
    return steps


def _ready(graph: TaskGraph, lanes: Sequence[Lane], lane: Lane, done: int) -> tuple[int, ...]:
    """Return all tasks that can run on `lane` without leaving it, after those that are done."""
    members: list[int] = []
    for index, home in enumerate(lanes):
        if home != lane or done >> index & 1:
            continue
        if all(done >> parent & 1 for parent in graph.parents[index]):
            members.append(index)
            done |= 1 << index
    return tuple(members)


def _path(run: _Path | None) -> list[tuple[Lane, tuple[int, ...]]]:
    path = []
    while run is not None:
        path.append((run.lane, run.members))
        run = run.before
    return path[::-1]
