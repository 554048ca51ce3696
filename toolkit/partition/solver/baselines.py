"""Placements without a solver: baselines of a plan, and starting points of the solver."""

from collections.abc import Callable
from functools import lru_cache

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import Cost, assess, dlas, overloads, value_of, violations
from toolkit.partition.solver.problem import Network, Objective, Placement, Problem, Task
from toolkit.partition.solver.segmentation import segments_of


def gpu_only(problem: Problem) -> Placement:
    """Return every task on the GPU, or on the first processor that can run it."""
    return _placed(problem, lambda _: problem.processors)


def dla_with_fallback(problem: Problem) -> Placement:
    """Return every supported task on the DLA; networks alternate between cores."""
    cores = dlas(problem)

    def preferred(number: int) -> tuple[Processor, ...]:
        turn = number % len(cores) if cores else 0
        return cores[turn:] + cores[:turn] + problem.processors

    return _placed(problem, preferred)


@lru_cache(maxsize=1)  # a plan shows the one that its search began with
def greedy(problem: Problem, objective: Objective) -> Placement:
    """Move the DLA segments of `dla_with_fallback` from the GPU to the DLA, the largest first.

    Each moves to the core with the smallest objective, if that is smaller than before and no
    further limit is violated.
    """
    placement = {name: dict(homes) for name, homes in gpu_only(problem).items()}
    best = _ranking(problem, objective, placement)
    for network, island in _islands(problem):
        choice: dict[str, Processor] | None = None
        for core in dlas(problem):
            moved = {task.name: core for task in island if core in task.time_us}
            if len(moved) < len(island):
                continue
            trial = placement | {network.name: placement[network.name] | moved}
            ranking = _ranking(problem, objective, trial)
            if ranking < best:
                best, choice = ranking, moved
        if choice is not None:
            placement[network.name] |= choice
    return placement


def costs_of(problem: Problem, placement: Placement) -> dict[str, Cost]:
    """Return the cost of one frame of each network."""
    return {net.name: assess(problem, net, placement[net.name]) for net in problem.networks}


def _islands(problem: Problem) -> list[tuple[Network, tuple[Task, ...]]]:
    fallback = dla_with_fallback(problem)
    islands = []
    for network in problem.networks:
        tasks = {task.name: task for task in network.tasks}
        for segment in segments_of(network, fallback[network.name], problem.segment_us):
            if segment.processor != "gpu":
                islands.append((network, tuple(tasks[name] for name in segment.tasks)))
    return sorted(islands, key=lambda island: -sum(t.time_us.get("gpu", 0.0) for t in island[1]))


def _ranking(problem: Problem, objective: Objective, placement: Placement) -> tuple[int, float]:
    """Return the number of violated limits, and the objective."""
    costs = costs_of(problem, placement)
    violated = violations(problem, placement, costs)
    if objective != "utilisation":
        violated += overloads(problem, costs)
    return len(violated), value_of(problem, objective, costs)


def _placed(problem: Problem, order: Callable[[int], tuple[Processor, ...]]) -> Placement:
    return {
        network.name: {
            task.name: next(p for p in order(number) if p in task.time_us) for task in network.tasks
        }
        for number, network in enumerate(problem.networks)
    }
