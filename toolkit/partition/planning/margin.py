"""Takes back what moves to the DLA for less than the cost model's own error.

An island of nodes on the DLA pays if moving it back to the GPU would make the plan worse by more
than a share of what the island costs there; and the plan as a whole if it is better than the GPU
alone by that share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from device.engine.manifest import Processor
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.objectives import Goal
from toolkit.partition.planning.rates import full_rate
from toolkit.partition.solver.assess import (
    idle_mj,
    overloads,
    rate_of,
    time_scale,
    value_of,
    violations,
)
from toolkit.partition.solver.baselines import costs_of, gpu_only
from toolkit.partition.solver.problem import Network, Objective, Placement, Problem, Solution, Task
from toolkit.partition.solver.segmentation import components


@dataclass(frozen=True, slots=True)
class FilteredSolution:
    """A solution that keeps only what pays; `foregone`: the share that the rest would gain.

    `best`: the solution before. `min_gain`: the least share asked for; `model_error`: the one that
    is asked for by default.
    """

    best: Solution
    solution: Solution
    min_gain: float
    model_error: float
    foregone: float = 0.0


def errors_of(costs: CostModel) -> tuple[float, float]:
    """Return the shares below which a gain of time, and one of energy, is within the errors.

    They are half the spread of the DLA's times, and of power; 0 without a DLA.
    """
    if costs.board.dla is None:
        return 0.0, 0.0
    return costs.spread("dla").half / 2, costs.spread("power").half / 2


def default_min_gain(costs: CostModel, goal: Goal) -> float:
    """Return half the spread of the rows concerned: those of the DLA, or of power, as a share."""
    time_error, energy_error = errors_of(costs)
    return energy_error if goal.aim == "energy" else time_error


def keep_what_pays(
    problem: Problem, solution: Solution, goal: Goal, min_gain: float, model_error: float
) -> FilteredSolution:
    """Return the solution with islands moved back to the GPU that gain less than `min_gain`."""
    if min_gain <= 0 or len(problem.processors) == 1 or goal.aim == "makespan":
        return FilteredSolution(solution, solution, min_gain, model_error)
    best = solution.placement
    for network, island in _islands(problem, solution.placement, goal.aim):
        trial = _moved(best, network, island)
        before, after = _value(problem, goal.aim, best), _value(problem, goal.aim, trial)
        if after is not None and before is not None:
            stake = sum(_stake(problem, network, task, goal.aim) for task in island)
            if after - before < min_gain * stake:
                best = trial
    if all("gpu" in task.time_us for network in problem.networks for task in network.tasks):
        alone = gpu_only(problem)
        gain = share_gained(problem, goal.aim, best, alone)
        if gain is not None and gain < min_gain:
            best = alone
    value = _value(problem, goal.aim, best)
    if best == solution.placement or value is None:
        return FilteredSolution(solution, solution, min_gain, model_error)
    foregone = share_gained(problem, goal.aim, solution.placement, best) or 0.0
    costs = costs_of(problem, best)
    filtered = replace(
        solution,
        placement=best,
        segments=tuple(s for network in problem.networks for s in costs[network.name].segments),
        value=value,
        proven=False,
    )
    return FilteredSolution(solution, filtered, min_gain, model_error, max(0.0, foregone))


def share_gained(
    problem: Problem, aim: Objective, placement: Placement, baseline: Placement
) -> float | None:
    """Return the share of the objective that a placement saves, None if one breaks a limit.

    A throughput without rates is that of frames in flight, as the plan shows it: with contention
    it is less than the busiest processor allows.
    """
    value, without = _value(problem, aim, placement), _value(problem, aim, baseline)
    if value is None or without is None or without <= 0:
        return None
    gain = 1 - value / without
    if aim == "utilisation" and len(problem.networks) == 1 and problem.networks[0].rate_hz is None:
        network = problem.networks[0]
        rate, slower = (
            full_rate(problem, network, p).frames_per_second for p in (placement, baseline)
        )
        gain = min(gain, 1 - slower / rate) if rate > 0 else gain
    return gain


def _islands(
    problem: Problem, placement: Placement, aim: Objective
) -> list[tuple[Network, tuple[Task, ...]]]:
    """Return the connected pieces on the DLA, those with the least at stake first."""
    islands = []
    for network in problem.networks:
        homes = [placement[network.name][task.name] for task in network.tasks]
        for core in sorted({home for home in homes if home != "gpu"}):
            for piece in components(network.graph, homes, core):
                tasks = tuple(network.tasks[index] for index in piece)
                if all("gpu" in task.time_us for task in tasks):  # none that the user forced
                    islands.append((network, tasks))
    return sorted(
        islands, key=lambda row: sum(_stake(problem, row[0], task, aim) for task in row[1])
    )


def _moved(placement: Placement, network: Network, island: tuple[Task, ...]) -> Placement:
    homes: Mapping[str, Processor] = placement[network.name]
    return {**placement, network.name: {**homes, **dict.fromkeys((t.name for t in island), "gpu")}}


def _value(problem: Problem, aim: Objective, placement: Placement) -> float | None:
    """Return the objective, None if the placement breaks a limit or a rate."""
    costs = costs_of(problem, placement)
    if violations(problem, placement, costs) or overloads(problem, costs):
        return None
    return value_of(problem, aim, costs)


def _stake(problem: Problem, network: Network, task: Task, aim: Objective) -> float:
    """Return what a task adds to the objective on the GPU."""
    time_us = task.time_us.get("gpu", 0.0)
    if aim == "energy":
        return rate_of(network) * task.energy_mj.get("gpu", 0.0) + idle_mj(problem, time_us)
    if aim == "latency":
        return time_us
    return time_us * rate_of(network) * time_scale(problem, network.name)
