"""Join tasks that need never part, so that the programs get smaller without losing an optimum.

A task that takes no time and no energy, reads one tensor of one task that nobody else reads, and
makes nothing dearer to pass on than what it reads, may as well run where that task runs: no load,
crossing, energy or number of segments grows by it. (Activations in a layer's kernel, reshapes.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Direction, Flow, Network, Problem, Task, crossing_cost

_DIRECTIONS: tuple[Direction, ...] = ("to_dla", "to_gpu", "between_dlas")


@dataclass(frozen=True, slots=True)
class Merged:
    """A smaller network and, for each task of the original, the task that stands for it."""

    network: Network
    stand_in: Mapping[str, str]

    def expand(self, placed: Mapping[str, Processor]) -> dict[str, Processor]:
        """Return the placement of the original tasks."""
        return {name: placed[stand_in] for name, stand_in in self.stand_in.items()}

    def shrink(self, placed: Mapping[str, Processor]) -> dict[str, Processor]:
        """Return the placement of the tasks that stand for others."""
        return {name: placed[name] for name in dict.fromkeys(self.stand_in.values())}


def merge(problem: Problem, network: Network) -> Merged:
    """Return the network with such tasks joined; the network itself where limits could matter."""
    stand_in = {task.name: task.name for task in network.tasks}
    if _limits_are_far(problem, network):
        tasks = {task.name: task for task in network.tasks}
        reads: dict[str, list[Flow]] = {name: [] for name in tasks}
        makes: dict[str, list[Flow]] = {name: [] for name in tasks}
        for flow in network.flows:
            for target in flow.targets:
                reads[target].append(flow)
            if flow.source is not None:
                makes[flow.source].append(flow)
        for task in network.tasks:
            source = _host(problem, task, tasks, reads[task.name], makes)
            if source is not None:
                stand_in[task.name] = stand_in[source]
    return Merged(_joined(network, stand_in), stand_in)


def _limits_are_far(problem: Problem, network: Network) -> bool:
    limits = problem.limits
    return (
        limits.min_segment_us == 0
        and sum(task.weight_bytes for task in network.tasks) < limits.weight_bytes
        and sum(flow.bytes for flow in network.flows) < limits.intermediate_bytes
    )


def _host(
    problem: Problem,
    task: Task,
    tasks: Mapping[str, Task],
    reads: list[Flow],
    makes: Mapping[str, list[Flow]],
) -> str | None:
    """Return the task beside which `task` may always run, if there is one."""
    if len(reads) != 1 or reads[0].source is None:
        return None
    given, source = reads[0], tasks[reads[0].source]
    made = makes[task.name]
    if len(given.targets) != 1 or given.output or len(made) > 1 or task.lane != source.lane:
        return None
    allowed = [p for p in problem.processors if p in source.time_us]
    if any(task.time_us.get(p, 1.0) or task.energy_mj.get(p, 0.0) for p in allowed):
        return None
    if any(task.time_us[p] < 0 for p in task.time_us):
        return None
    split = len(problem.processors) > 2 and any(len(f.targets) > 1 or f.output for f in made)
    return None if split or any(_dearer(flow, given) for flow in made) else source.name


def _dearer(flow: Flow, than: Flow) -> bool:
    """Return whether some crossing of `flow` costs more than that of `than`."""
    pairs = ((flow.crossing_us, than.crossing_us), (flow.crossing_mj, than.crossing_mj))
    return any(
        crossing_cost(mine, direction) > crossing_cost(theirs, direction)
        for mine, theirs in pairs
        for direction in _DIRECTIONS
    )


def _joined(network: Network, stand_in: Mapping[str, str]) -> Network:
    tasks = tuple(task for task in network.tasks if stand_in[task.name] == task.name)
    flows = tuple(
        replace(
            flow,
            source=None if flow.source is None else stand_in[flow.source],
            targets=tuple(dict.fromkeys(stand_in[name] for name in flow.targets)),
        )
        for flow in network.flows
        if flow.source is None
        or not flow.targets
        or any(stand_in[name] != stand_in[flow.source] for name in flow.targets)
    )
    return replace(network, tasks=tasks, flows=flows)
