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
    first = sum(1 << index for index, parents in enumerate(graph.parents) if not parents)
    tasks_of = {lane: sum(1 << i for i, home in enumerate(lanes) if home == lane) for lane in kinds}
    queue = [(0.0, 0, 0, 0, first)]  # cost, segments, number, done, ready
    runs: list[_Path | None] = [None]
    settled: set[int] = set()
    while queue:
        cost, count, number, done, ready = heapq.heappop(queue)
        run = runs[number]
        if done == all_tasks:
            return _path(run)
        if done in settled:
            continue
        settled.add(done)
        for lane in kinds:
            if not ready & tasks_of[lane] or (run is not None and run.lane == lane):
                continue
            members, after, later = _run(graph, tasks_of[lane], done, ready)
            runs.append(_Path(lane, members, run))
            start_us = segment_us.get(lane[0], 0.0)
            heapq.heappush(queue, (cost + start_us, count + 1, len(runs) - 1, after, later))
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
        turn = step = 0 if lane == first else 1
        for parent in parents:
            step = max(step, steps[parent])
        steps.append(step + (step - turn) % 2)  # the next step of its lane
    return steps


def _run(graph: TaskGraph, lane: int, done: int, ready: int) -> tuple[tuple[int, ...], int, int]:
    """Run all tasks of a lane that can run without leaving it.

    `lane`, `done` and `ready` are sets of tasks, as bits. Returns the tasks in order, and what is
    done and ready afterwards.
    """
    members: list[int] = []
    while here := ready & lane:
        bit = here & -here
        index = bit.bit_length() - 1
        members.append(index)
        done |= bit
        ready ^= bit
        for child in graph.children[index]:
            if all(done >> parent & 1 for parent in graph.parents[child]):
                ready |= 1 << child
    return tuple(sorted(members)), done, ready


def _path(run: _Path | None) -> list[tuple[Lane, tuple[int, ...]]]:
    path = []
    while run is not None:
        path.append((run.lane, run.members))
        run = run.before
    return path[::-1]
