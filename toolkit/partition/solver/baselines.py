"""Placements that need no solver: what to compare a plan with, and where the solver starts."""

from collections.abc import Callable

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import Cost, assess, dlas, overloads, value_of, violations
from toolkit.partition.solver.problem import Network, Objective, Placement, Problem, Task
from toolkit.partition.solver.segmentation import segments_of


def gpu_only(problem: Problem) -> Placement:
    """Return every task on the GPU, or on the first processor that can run it."""
    return _placed(problem, lambda _: problem.processors)


def dla_with_fallback(problem: Problem) -> Placement:
    """Return every task on the DLA that can run there; networks take the cores in turn."""
    cores = dlas(problem)

    def preferred(number: int) -> tuple[Processor, ...]:
        turn = number % len(cores) if cores else 0
        return cores[turn:] + cores[:turn] + problem.processors

    return _placed(problem, preferred)


def greedy(problem: Problem, objective: Objective) -> Placement:
    """Return the islands of the naive placement on the DLA, the largest first, each if it pays.

    From all on the GPU, each island moves to the core where the objective is least, if it is then
    less than before and no limit is broken that was kept.
    """
    placement = {name: dict(homes) for name, homes in gpu_only(problem).items()}
    best = _judged(problem, objective, placement)
    for network, island in _islands(problem):
        choice: dict[str, Processor] | None = None
        for core in dlas(problem):
            moved = {task.name: core for task in island if core in task.time_us}
            if len(moved) < len(island):
                continue
            trial = placement | {network.name: placement[network.name] | moved}
            judged = _judged(problem, objective, trial)
            if judged < best:
                best, choice = judged, moved
        if choice is not None:
            placement[network.name] |= choice
    return placement


def costs_of(problem: Problem, placement: Placement) -> dict[str, Cost]:
    """Return the cost of one frame of each network."""
    return {net.name: assess(problem, net, placement[net.name]) for net in problem.networks}


def _islands(problem: Problem) -> list[tuple[Network, tuple[Task, ...]]]:
    naive = dla_with_fallback(problem)
    found = []
    for network in problem.networks:
        tasks = {task.name: task for task in network.tasks}
        for cut in segments_of(network, naive[network.name], problem.segment_us):
            if cut.processor != "gpu":
                found.append((network, tuple(tasks[name] for name in cut.tasks)))
    return sorted(found, key=lambda island: -sum(t.time_us.get("gpu", 0.0) for t in island[1]))


def _judged(problem: Problem, objective: Objective, placement: Placement) -> tuple[int, float]:
    """Return how many limits are broken, and the objective."""
    costs = costs_of(problem, placement)
    broken = violations(problem, placement, costs)
    if objective != "utilisation":
        broken += overloads(problem, costs)
    return len(broken), value_of(problem, objective, costs)


def _placed(problem: Problem, order: Callable[[int], tuple[Processor, ...]]) -> Placement:
    return {
        network.name: {
            task.name: next(p for p in order(number) if p in task.time_us) for task in network.tasks
        }
        for number, network in enumerate(problem.networks)
    }
