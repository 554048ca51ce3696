"""Heuristic placements: the execution order split into four blocks, each on one processor.

The program of `milp_placement` converges much faster from a good start. Blocks are rated by prefix
sums over the order, with crossings priced as the tensors that are live at each cut; only the best
few are assessed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import dlas
from toolkit.partition.solver.problem import Direction, Network, Problem, crossing_cost

Figures = npt.NDArray[np.float64]
Cuts = npt.NDArray[np.int64]  # (candidates, 3): first positions of blocks 1, 2 and 3
Pattern = tuple[Processor, Processor, Processor, Processor]

_POSITIONS = 60  # cuts tried at first: 60**3 / 6 = 36,000 candidates a pattern
_REACH = 8  # positions tried on either side of each cut of the best
_ASSESSED = 6


@dataclass(frozen=True, slots=True)
class Rated:
    """Costs of one frame, one entry per candidate."""

    load_us: dict[Processor, Figures]
    latency_us: Figures
    energy_mj: Figures


Score = Callable[[Rated], Figures]


def interval_placements(
    problem: Problem, network: Network, score: Score
) -> Iterator[dict[str, Processor]]:
    """Yield the placements of a network with the lowest scores, for each pattern of processors."""
    sums = _PrefixSums(problem, network)
    for pattern in _patterns(problem):
        cuts = _ordered(sums.coarse(), sums.coarse(), sums.coarse())
        best = cuts[int(np.argmin(score(sums.rate(pattern, cuts))))]
        nearby = _ordered(*(sums.near(int(cut)) for cut in best))
        points = score(sums.rate(pattern, nearby))
        for index in np.argsort(points, kind="stable")[:_ASSESSED]:
            yield sums.placement(pattern, nearby[index])


def _patterns(problem: Problem) -> tuple[Pattern, ...]:
    cores = dlas(problem)
    if not cores:
        return ()
    first_core, second_core = cores[0], cores[-1]
    return (
        ("gpu", first_core, "gpu", second_core),
        (first_core, "gpu", second_core, "gpu"),
        ("gpu", first_core, second_core, "gpu"),
    )


def _ordered(first: Cuts, second: Cuts, third: Cuts) -> Cuts:
    candidates = np.stack(np.meshgrid(first, second, third, indexing="ij"), axis=-1).reshape(-1, 3)
    return candidates[
        (candidates[:, 0] <= candidates[:, 1]) & (candidates[:, 1] <= candidates[:, 2])
    ]


def _passes(pattern: Pattern, ends: Cuts) -> Iterator[tuple[Direction, Cuts]]:
    """Yield the positions of crossings in each candidate, -1 for none."""
    used = ends[:, 1:] > ends[:, :-1]
    for block, processor in enumerate(pattern):
        if processor == "gpu":
            continue
        after = block > 0 and pattern[block - 1] != "gpu"
        before = block < len(pattern) - 1 and pattern[block + 1] != "gpu"
        joined = used[:, block] & used[:, block - 1] if after else np.zeros(len(ends), bool)
        leaves = used[:, block] & ~used[:, block + 1] if before else used[:, block]
        yield "to_dla", np.where(used[:, block] & ~joined, ends[:, block], -1)
        yield "to_gpu", np.where(leaves, ends[:, block + 1], -1)
        if after and pattern[block - 1] != processor:
            yield "between_dlas", np.where(joined, ends[:, block], -1)


class _PrefixSums:
    """Prefix sums over the tasks of a network: times, energies and costs of cuts."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self._problem, self._network = problem, network
        self._time = {p: self._prefix_sums(p, "time_us") for p in problem.processors}
        self._energy = {p: self._prefix_sums(p, "energy_mj") for p in problem.processors}
        self._cut_us = {d: self._live_cost(d, "crossing_us") for d in _DIRECTIONS}
        self._cut_mj = {d: self._live_cost(d, "crossing_mj") for d in _DIRECTIONS}

    def coarse(self) -> Cuts:
        """Return positions spread evenly over GPU time, the cheapest cut in each bin."""
        count = len(self._network.tasks)
        if count < _POSITIONS:
            return np.arange(count + 1)
        total: Figures = np.sum([self._time[p][:, 0] for p in self._problem.processors], axis=0)
        stretch = np.floor(total / max(float(total[-1]), 1e-9) * (_POSITIONS - 2)).astype(int)
        price = self._cut_us["to_dla"] + self._cut_us["to_gpu"]
        order = np.lexsort((-price, stretch))  # the cheapest of each stretch comes last and stays
        cheapest = {int(stretch[index]): int(index) for index in order}
        return np.array(sorted({0, count, *cheapest.values()}))

    def near(self, cut: int) -> Cuts:
        """Return the positions around a cut."""
        return np.arange(max(0, cut - _REACH), min(len(self._network.tasks), cut + _REACH) + 1)

    def rate(self, pattern: Pattern, cuts: Cuts) -> Rated:
        """Return the costs of candidates; a task unsupported in its block stays on the GPU."""
        problem = self._problem
        ends = np.column_stack([np.zeros(len(cuts), int), cuts])
        ends = np.column_stack([ends, np.full(len(cuts), len(self._network.tasks))])
        load = {p: np.zeros(len(cuts)) for p in problem.processors}
        energy, waits = np.zeros(len(cuts)), np.zeros(len(cuts))
        for block, processor in enumerate(pattern):
            begin, end = ends[:, block], ends[:, block + 1]
            used = end > begin
            load[processor] += used * problem.segment_us.get(processor, 0.0)
            energy += used * problem.segment_mj.get(processor, 0.0)
            time, spent = self._time[processor], self._energy[processor]
            load[processor] += time[end, 0] - time[begin, 0]
            load["gpu"] += time[end, 1] - time[begin, 1]
            energy += (spent[end] - spent[begin]).sum(axis=1)
        for direction, where in _passes(pattern, ends):
            waits += self._cut_us[direction][where] * (where >= 0)
            energy += self._cut_mj[direction][where] * (where >= 0)
        latency = sum(load.values(), waits)
        if problem.crossing_on is not None:
            load[problem.crossing_on] += waits
        return Rated(load, latency, energy)

    def placement(self, pattern: Pattern, cuts: Cuts) -> dict[str, Processor]:
        """Return the processor of each task."""
        placed: dict[str, Processor] = {}
        for index, task in enumerate(self._network.tasks):
            processor = pattern[int(np.sum(cuts <= index))]
            options = (processor, *self._problem.processors)
            placed[task.name] = next(p for p in options if p in task.time_us)
        return placed

    def _prefix_sums(self, processor: Processor, figure: str) -> Figures:
        """Return prefix sums of a figure: on the processor, and on others for unsupported tasks."""
        steps = np.zeros((len(self._network.tasks) + 1, 2))
        for index, task in enumerate(self._network.tasks, start=1):
            here = processor in task.time_us
            actual = next(p for p in (processor, *self._problem.processors) if p in task.time_us)
            steps[index, 0 if here else 1] = getattr(task, figure).get(actual, 0.0)
        return np.cumsum(steps, axis=0)

    def _live_cost(self, direction: Direction, figure: str) -> Figures:
        """Return the cost of passing all tensors that are live at each position."""
        rank = {task.name: index for index, task in enumerate(self._network.tasks)}
        count = len(rank)
        change = np.zeros(count + 2)
        for flow in self._network.flows:
            first = 0 if flow.source is None else rank[flow.source] + 1
            last = count if flow.output else max((rank[name] for name in flow.targets), default=-1)
            if last >= first:
                price = crossing_cost(getattr(flow, figure), direction)
                change[first] += price
                change[last + 1] -= price
        return np.cumsum(change)[: count + 1]


_DIRECTIONS: tuple[Direction, ...] = ("to_dla", "to_gpu", "between_dlas")
