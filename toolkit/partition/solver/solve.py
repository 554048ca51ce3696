"""The best placement of a problem, proven or with a gap.

The program of `milp_placement` bounds the value from below. Its placement is assessed. What the
program does not model (components too large or too small for a loadable, additional segments with
three lanes) is forbidden when it occurs, and the program is solved again, until its bound reaches
the best assessed value.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from device.engine.manifest import Processor
from toolkit.errors import PlanError
from toolkit.partition.solver.assess import (
    Cost,
    bad_components,
    idle_mj,
    overloads,
    rate_of,
    share_of,
    time_scale,
    utilisation,
    value_of,
    violations,
)
from toolkit.partition.solver.baselines import costs_of, dla_with_fallback, gpu_only, greedy
from toolkit.partition.solver.intervals import Figures, Rated, interval_placements
from toolkit.partition.solver.makespan import solve_makespan
from toolkit.partition.solver.milp import GAP, Outcome
from toolkit.partition.solver.milp_placement import placement_program
from toolkit.partition.solver.problem import Network, Objective, Placement, Problem, Solution

DEFAULT_SECONDS = 20.0
_LEAST_SECONDS = 0.01  # counted for a program that needs no steps
_NEAR = 0.01  # of the best value from the relaxation: to prove it takes no longer than a rough gap


def solve(
    problem: Problem,
    objective: Objective,
    seconds: float = DEFAULT_SECONDS,
    *,
    starts: Sequence[Placement] = (),
    gap: float = GAP,
    below: float | None = None,
    enough: float | None = None,
    bound: float = 0.0,
) -> Solution:
    """Return the best placement of a problem; for the makespan also the order of its segments.

    `seconds` of search are counted in steps of the solver: a busy machine finds the same placement.
    `starts`: placements to improve. The search ends at this relative `gap`, when no value `below`
    is possible, or at a value that is `enough`. `bound`: no placement is known to be better.

    Raises PlanError if the limits are infeasible (naming the overloaded processor if rates are the
    cause), or if no placement was found in the time.
    """
    began = time.process_time()
    if objective == "makespan":
        return solve_makespan(problem, seconds)
    search = _Search(problem, objective, seconds, gap, enough)
    search.bound = bound
    search.run(starts, below)
    if search.best is None:
        raise PlanError(_why_not(problem, objective, search))
    placement, costs, value = search.best
    bound = min(search.bound, value)
    return Solution(
        objective=objective,
        placement=placement,
        segments=tuple(s for net in problem.networks for s in costs[net.name].segments),
        value=value,
        bound=bound,
        proven=value - bound <= GAP * max(1.0, abs(value)),
        seconds=time.process_time() - began,
    )


class _Search:
    """The best placement so far and the bound, over a program with growing constraints."""

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        seconds: float,
        gap: float,
        enough: float | None = None,
    ) -> None:
        self._problem, self._objective = problem, objective
        self._seconds, self._gap, self._enough = seconds, gap, enough
        self._program = placement_program(problem, objective)
        self.best: tuple[Placement, Mapping[str, Cost], float] | None = None
        self.bound = 0.0
        self.infeasible = False

    def run(self, starts: Sequence[Placement] = (), below: float | None = None) -> None:
        """Search from the baselines to the proof, or until the seconds are used up."""
        problem = self._problem
        for placement in (*starts, gpu_only(problem), dla_with_fallback(problem)):
            self.consider(placement)
        if self._proven():
            return
        relaxed = self._program.program.relaxed(self._program.goal)
        if relaxed is not None:
            self.bound = max(self.bound, relaxed[1])
            if self._none_is_better(below):
                return
        self.consider(greedy(problem, self._objective))
        if relaxed is not None and self._over(below):
            return
        if not (starts and self._near()):
            self._try_intervals()
        if self._over(below):
            return
        if below is not None:
            self._program.program.at_most(self._program.goal, below)
        self._solve_and_forbid(below)

    def consider(self, placement: Placement) -> None:
        """Keep a placement if it violates no limit and is the best so far."""
        costs = costs_of(self._problem, placement)
        violated = violations(self._problem, placement, costs)
        value = value_of(self._problem, self._objective, costs)
        if self._objective != "utilisation":
            violated += overloads(self._problem, costs)
        if not violated and (self.best is None or value < self.best[2]):
            self.best = placement, costs, value

    def _try_intervals(self) -> None:
        """Improve each network in turn with the others fixed, until nothing improves."""
        value, previous = self._value, float("inf")
        while value() < previous:
            previous = value()
            for network in self._problem.networks:
                score = partial(self._score, network, self._others(network))
                for placed in list(interval_placements(self._problem, network, score)):
                    self.consider({**self._rest(), network.name: placed})

    def _none_is_better(self, below: float | None) -> bool:
        """Whether no value is possible that is below the best so far, or below `below`."""
        if self.best is None:
            return False
        return self.bound >= (self.best[2] if below is None else min(self.best[2], below))

    def _over(self, below: float | None) -> bool:
        """Whether the search may end: none is better, or the best is enough."""
        enough = self._enough is not None and self._value() <= self._enough
        return enough or self._none_is_better(below)

    def _others(self, network: Network) -> dict[str, Cost]:
        """Return the costs of the other networks in the best placement so far."""
        costs = {} if self.best is None else self.best[1]
        return {name: cost for name, cost in costs.items() if name != network.name}

    def _rest(self) -> Placement:
        return gpu_only(self._problem) if self.best is None else self.best[0]

    def _value(self) -> float:
        return float("inf") if self.best is None else self.best[2]

    def _score(self, network: Network, others: Mapping[str, Cost], rated: Rated) -> Figures:
        """Return the objective of candidates for one network, with a penalty for overload."""
        problem = self._problem
        if self._objective == "latency":
            return rated.latency_us
        scale = rate_of(network) * time_scale(problem, network.name)
        loads = [
            utilisation(problem, others)[p] + rated.load_us[p] * scale * share_of(problem, p)
            for p in problem.processors
        ]
        busiest: Figures = np.max(loads, axis=0)
        if self._objective == "utilisation":
            return busiest
        aim: Figures = (
            loads[0]
            if self._objective == "gpu_time"
            else rate_of(network) * rated.energy_mj + idle_mj(problem, 1.0) * busiest
        )
        if network.rate_hz is None:
            return aim
        excess: Figures = np.maximum(0.0, busiest - problem.utilisation_limit)
        return aim + 1e3 * (1 + aim) * excess

    def _solve_and_forbid(self, below: float | None) -> None:
        """Solve, assess and forbid until the bound meets the best value or time is up."""
        near = self._near()
        if near and below is None:
            self._gap = min(self._gap, GAP)
        while self._seconds > 0 and not self._over(below):
            outcome = self._program.program.minimise(
                self._program.goal, self._seconds, self._start(), self._gap, near=near
            )
            self._seconds -= max(outcome.seconds, _LEAST_SECONDS)
            self.infeasible = outcome.infeasible
            if outcome.infeasible and below is not None:
                self.bound = max(self.bound, below)
                return
            self.bound = max(self.bound, outcome.bound)
            if outcome.values is None or self._settled():
                return
            placement = self._placement(outcome)
            self.consider(placement)
            if self._settled():
                return
            self._forbid(placement)

    def _near(self) -> bool:
        return self.best is not None and self.best[2] - self.bound <= _NEAR * self.best[2]

    def _settled(self) -> bool:
        return self._proven(self._gap)

    def _proven(self, gap: float = GAP) -> bool:
        if self.best is None:
            return False
        value = self.best[2]
        return value - self.bound <= max(GAP * max(1.0, abs(value)), gap * abs(value))

    def _placement(self, outcome: Outcome) -> Placement:
        placement = {}
        for name, part in self._program.parts.items():
            placed: dict[str, Processor] = {}
            for (task, processor), here in part.on.items():
                if outcome.values is not None and here.at(outcome.values) > 0.5:
                    placed[task] = processor
            placement[name] = placed
        return placement

    def _start(self) -> dict[int, float]:
        """Return the binaries of the best placement so far."""
        start: dict[int, float] = {}
        if self.best is not None:
            for name, part in self._program.parts.items():
                for (task, processor), here in part.on.items():
                    if len(here.terms) == 1 and here.constant == 0.0:
                        start[next(iter(here.terms))] = float(self.best[0][name][task] == processor)
        return start

    def _forbid(self, placement: Placement) -> None:
        """Forbid each bad component of a placement, or else the placement itself."""
        any_bad = False
        for network in self._problem.networks:
            graph = network.graph
            for bad in bad_components(self._problem, network, placement[network.name]):
                any_bad = True
                inside = {network.tasks[index].name for index in bad.tasks}
                neighbours = {i for t in bad.tasks for i in graph.parents[t] + graph.children[t]}
                around = {network.tasks[index].name for index in neighbours} - inside
                if bad.too_small:
                    self._program.forbid_alone(
                        network.name, tuple(sorted(inside)), tuple(sorted(around)), bad.processor
                    )
                else:
                    processors = dict.fromkeys(sorted(inside), bad.processor)
                    self._program.forbid_all(network.name, processors)
        if not any_bad:
            self._program.forbid_placement(placement)


def _why_not(problem: Problem, objective: Objective, search: _Search) -> str:
    names = ", ".join(network.name for network in problem.networks)
    if not search.infeasible:
        return f"no placement of {names} was found in the time; allow more seconds"
    rated = all(network.rate_hz is not None for network in problem.networks)
    if rated and objective != "utilisation":
        relaxed = solve(problem, "utilisation")
        costs = costs_of(problem, relaxed.placement)
        busy = utilisation(problem, costs)
        worst = max(busy, key=lambda processor: busy[processor])
        return (
            f"the rates of {names} do not fit: at best {worst} would be busy {busy[worst]:.2f} of "
            f"the time, limit {problem.utilisation_limit:.2f}; lower the rates"
        )
    return f"no placement of {names} keeps the limits ({problem.limits}); relax one"
