"""Two DLA cores as one with half the load: a relaxation that is fast to solve.

Any placement on both cores is possible on the joined core: it has no more crossings and segments,
and the busier core carries at least half of the load of both.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Placement, Problem, Task

CORES: tuple[Processor, Processor] = ("dla0", "dla1")


def join_cores(problem: Problem) -> Problem | None:
    """Return the problem with its two cores joined, None if there are not two."""
    if not {"dla0", "dla1"} <= set(problem.processors):
        return None
    limits = replace(
        problem.limits,
        max_loadables=2 * problem.limits.max_loadables,
        weight_bytes=sys.maxsize,
        intermediate_bytes=sys.maxsize,
    )
    return replace(
        problem,
        networks=tuple(
            replace(network, tasks=tuple(_on_joined_core(task) for task in network.tasks))
            for network in problem.networks
        ),
        processors=tuple(p for p in problem.processors if p != "dla1"),
        segment_us=_cheaper(problem.segment_us),
        segment_mj=_cheaper(problem.segment_mj),
        limits=limits,
        alternate_dlas=True,
    )


def part_cores(problem: Problem, joined: Placement) -> Placement:
    """Return a placement of the joined problem with each network on the less loaded core.

    Tasks that this core cannot run go to the second core.
    """
    busy: dict[Processor, float] = {"dla0": 0.0, "dla1": 0.0}
    order = sorted(problem.networks, key=lambda net: -_dla_us(net.tasks, joined[net.name]))
    placement: dict[str, dict[str, Processor]] = {}
    for network in order:
        rate = network.rate_hz or 1.0
        core: Processor = "dla0" if busy["dla0"] <= busy["dla1"] else "dla1"
        second_core: Processor = "dla1" if core == "dla0" else "dla0"
        busy[core] += rate * _dla_us(network.tasks, joined[network.name])
        placement[network.name] = {
            task.name: joined[network.name][task.name]
            if joined[network.name][task.name] == "gpu"
            else (core if core in task.time_us else second_core)
            for task in network.tasks
        }
    return placement


def _on_joined_core(task: Task) -> Task:
    return replace(
        task, time_us=_cheaper(task.time_us), energy_mj=_cheaper(task.energy_mj, task.time_us)
    )


def _cheaper(
    figures: Mapping[Processor, float], among: Mapping[Processor, float] | None = None
) -> dict[Processor, float]:
    """Return figures with the minimum of both cores on the first, if `among` has either."""
    joined: dict[Processor, float] = {p: figure for p, figure in figures.items() if p == "gpu"}
    among = figures if among is None else among
    both = [figures.get(core, 0.0) for core in CORES if core in among]
    if both:
        joined["dla0"] = min(both)
    return joined


def _dla_us(tasks: tuple[Task, ...], placed: Mapping[str, Processor]) -> float:
    return sum(task.time_us.get("dla0", 0.0) for task in tasks if placed[task.name] != "gpu")
