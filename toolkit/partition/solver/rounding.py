"""Placements from the linear relaxation of a program, for problems with one DLA.

Where two processors are balanced, the relaxation is a mix of two placements. Tasks that it divides
are placed whole: those before some task on one side, those after it on the other. The best of these
placements are improved by moving single tasks. All candidates of a step are rated at once.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from toolkit.partition.solver.intervals import Figures, Rated, Score
from toolkit.partition.solver.problem import Direction, Network, Problem, crossing_cost

OnDla = npt.NDArray[np.bool_]  # (candidates, tasks), or (tasks)

_IMPROVED = 3  # candidates that are improved
_DIVIDED = 1e-6  # a share on the DLA between this and its complement
_LEAST_GAIN = 1e-9  # of the score, for a step


def rounded_placements(
    problem: Problem, network: Network, shares: Figures, score: Score
) -> Iterator[OnDla]:
    """Yield placements with low scores: for each task whether it is on the DLA.

    `shares` (tasks): how much of each task the relaxation puts on the DLA. `problem` has two
    processors, the GPU first.
    """
    rating = Rating(problem, network)
    candidates = rating.allowed(_candidates(shares))

    def points(on: OnDla) -> Figures:
        return score(rating.rate(on))

    for index in np.argsort(points(candidates), kind="stable")[:_IMPROVED]:
        yield _improved(candidates[index], rating.free, points)


def _candidates(shares: Figures) -> OnDla:
    some, whole = shares > _DIVIDED, shares > 1 - _DIVIDED
    divided = np.flatnonzero(some & ~whole)
    rows = [some, whole]
    for count in range(1, len(divided)):
        first, second = whole.copy(), whole.copy()
        first[divided[:count]] = True
        second[divided[count:]] = True
        rows += [first, second]
    return np.array(rows)


def _improved(on: OnDla, free: npt.NDArray[np.intp], points: Callable[[OnDla], Figures]) -> OnDla:
    """Return the placement after moving one task at a time, as long as the best move helps."""
    best = float(points(on[None])[0])
    while len(free):
        moves = np.repeat(on[None], len(free), axis=0)
        moves[np.arange(len(free)), free] ^= True
        scores = points(moves)
        index = int(np.argmin(scores))
        if scores[index] >= best - _LEAST_GAIN * abs(best):
            break
        on, best = moves[index], float(scores[index])
    return on


class Rating:
    """Rates many placements of one network at once, as `assess` does each (lanes left out)."""

    def __init__(self, problem: Problem, network: Network) -> None:
        self._problem = problem
        self._core = problem.processors[1]
        self._readers = [row for row in enumerate(network.graph.parents) if row[1]]
        rank = {task.name: index for index, task in enumerate(network.tasks, start=1)}
        flows = [flow for flow in network.flows if flow.targets or flow.output]
        # Column 0 stands for the memory of the GPU, where inputs and outputs are.
        self._source = np.array([rank[f.source] if f.source else 0 for f in flows], int)
        ends = [[*(rank[name] for name in f.targets), *([0] if f.output else [])] for f in flows]
        self._ends = np.array([end for row in ends for end in row], int)
        self._first_end = np.cumsum([0, *(len(row) for row in ends)])[:-1]
        directions: tuple[Direction, ...] = ("to_dla", "to_gpu")
        self._crossing_us = {
            d: np.array([crossing_cost(f.crossing_us, d) for f in flows]) for d in directions
        }
        self._crossing_mj = {
            d: np.array([crossing_cost(f.crossing_mj, d) for f in flows]) for d in directions
        }
        self._time_us = {
            p: np.array([task.time_us.get(p, 0.0) for task in network.tasks])
            for p in problem.processors
        }
        self._energy_mj = {
            p: np.array([task.energy_mj.get(p, 0.0) for task in network.tasks])
            for p in problem.processors
        }
        choice = [("gpu" in t.time_us, self._core in t.time_us) for t in network.tasks]
        self._must = np.array([not gpu for gpu, _ in choice])
        self._may = np.array([dla for _, dla in choice])
        self.free = np.flatnonzero(self._may & ~self._must)

    def allowed(self, on: OnDla) -> OnDla:
        """Return placements with each task where it can run."""
        allowed: OnDla = (on | self._must) & self._may
        return allowed

    def rate(self, on: OnDla) -> Rated:
        """Return the costs of placements."""
        problem, core = self._problem, self._core
        waits, crossing_mj = self._crossings(on)
        starts = {"gpu": self._entries(~on), core: self._entries(on)}
        here = {"gpu": ~on, core: on}
        load = {
            p: here[p] @ self._time_us[p] + starts[p] * problem.segment_us.get(p, 0.0)
            for p in problem.processors
        }
        energy = crossing_mj + sum(
            here[p] @ self._energy_mj[p] + starts[p] * problem.segment_mj.get(p, 0.0)
            for p in problem.processors
        )
        latency = sum(load.values(), waits)
        if problem.crossing_on is not None:
            load[problem.crossing_on] = load[problem.crossing_on] + waits
        return Rated(load, latency, energy)

    def _crossings(self, on: OnDla) -> tuple[Figures, Figures]:
        """Return the time and energy of all crossings."""
        if not len(self._source):
            return np.zeros(len(on)), np.zeros(len(on))
        places = np.concatenate([np.zeros((len(on), 1), bool), on], axis=1)
        ends, source = places[:, self._ends], places[:, self._source]
        to_dla = ~source & np.logical_or.reduceat(ends, self._first_end, axis=1)
        to_gpu = source & ~np.logical_and.reduceat(ends, self._first_end, axis=1)
        time, energy = (
            to_dla @ prices["to_dla"] + to_gpu @ prices["to_gpu"]
            for prices in (self._crossing_us, self._crossing_mj)
        )
        return time, energy

    def _entries(self, here: OnDla) -> Figures:
        """Return how often a path enters a processor, at most over all paths."""
        inside = np.ascontiguousarray(here.T)
        outside, depth = ~inside, inside.astype(np.int32)
        for index, (first, *others) in self._readers:
            np.add(depth[first], inside[index] & outside[first], out=depth[index])
            for parent in others:
                enters = depth[parent] + (inside[index] & outside[parent])
                np.maximum(depth[index], enters, out=depth[index])
        entries: Figures = depth.max(axis=0, initial=0).astype(np.float64)
        return entries
