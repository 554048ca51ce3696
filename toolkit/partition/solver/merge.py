"""Merge tasks that need never be separated: smaller programs with the same optimum.

A task without time and energy, which is the only reader of one tensor and whose output costs no
more to cross, runs with its producer at no cost: no load, crossing, energy or number of segments
grows. (Activations fused into a kernel, reshapes.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Direction, Flow, Network, Problem, Task, crossing_cost

_DIRECTIONS: tuple[Direction, ...] = ("to_dla", "to_gpu", "between_dlas")


@dataclass(frozen=True, slots=True)
class Merged:
    """A smaller network and the representative of each original task."""

    network: Network
    representative: Mapping[str, str]

    def expand(self, placed: Mapping[str, Processor]) -> dict[str, Processor]:
        """Return the placement of the original tasks."""
        return {
            name: placed[representative] for name, representative in self.representative.items()
        }

    def shrink(self, placed: Mapping[str, Processor]) -> dict[str, Processor]:
        """Return the placement of the representatives."""
        return {name: placed[name] for name in dict.fromkeys(self.representative.values())}


def merge(problem: Problem, network: Network) -> Merged:
    """Return the network with such tasks merged; unchanged if limits could matter."""
    representative = {task.name: task.name for task in network.tasks}
    if limits_are_far(problem, network):
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
                representative[task.name] = representative[source]
    return Merged(_merged_network(network, representative), representative)


def limits_are_far(problem: Problem, network: Network) -> bool:
    """Return True if no placement of a network can break a limit of loadables."""
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
    """Return the task with which `task` may always run, if any."""
    if len(reads) != 1 or reads[0].source is None:
        return None
    input_flow, source = reads[0], tasks[reads[0].source]
    output_flows = makes[task.name]
    if (
        len(input_flow.targets) != 1
        or input_flow.output
        or len(output_flows) > 1
        or task.lane != source.lane
    ):
        return None
    allowed = [p for p in problem.processors if p in source.time_us]
    if any(task.time_us.get(p, 1.0) or task.energy_mj.get(p, 0.0) for p in allowed):
        return None
    if any(task.time_us[p] < 0 for p in task.time_us):
        return None
    split = len(problem.processors) > 2 and any(
        len(f.targets) > 1 or f.output for f in output_flows
    )
    return (
        None
        if split or any(_costs_more(flow, input_flow) for flow in output_flows)
        else source.name
    )


def _costs_more(flow: Flow, reference: Flow) -> bool:
    """Return True if a crossing of `flow` costs more than that of `reference`."""
    pairs = ((flow.crossing_us, reference.crossing_us), (flow.crossing_mj, reference.crossing_mj))
    return any(
        crossing_cost(own_costs, direction) > crossing_cost(reference_costs, direction)
        for own_costs, reference_costs in pairs
        for direction in _DIRECTIONS
    )


def _merged_network(network: Network, representative: Mapping[str, str]) -> Network:
    tasks = tuple(task for task in network.tasks if representative[task.name] == task.name)
    flows = tuple(
        replace(
            flow,
            source=None if flow.source is None else representative[flow.source],
            targets=tuple(dict.fromkeys(representative[name] for name in flow.targets)),
        )
        for flow in network.flows
        if flow.source is None
        or not flow.targets
        or any(representative[name] != representative[flow.source] for name in flow.targets)
    )
    return replace(network, tasks=tasks, flows=flows)
