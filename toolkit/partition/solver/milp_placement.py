"""The placement of networks as a linear program: every objective but the makespan.

For each task and each processor but one that it may run on there is a binary. A tensor's crossing
is a variable at least the difference of its ends. With two lanes the least number of segments on a
processor is the largest number of times that a path through the graph enters it; a potential along
the dependencies counts that. With more lanes it can be larger, so the program's value is a bound:
`solve` compares it with the assessed one and forbids what the program got wrong.

Without starting costs, limits and rates the program is a minimum cut, whose relaxation is whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import dlas, rate_of, share_of, time_scale
from toolkit.partition.solver.milp import Expr, Program, total
from toolkit.partition.solver.problem import (
    Direction,
    Flow,
    Network,
    Objective,
    Placement,
    Problem,
    Task,
    crossing_cost,
)
from toolkit.partition.solver.segmentation import Graph, graph_of


@dataclass(frozen=True, slots=True)
class NetworkPart:
    """The expressions of one network in a program."""

    on: Mapping[tuple[str, Processor], Expr]  # 1 where the task runs on the processor
    segments: Mapping[Processor, Expr]
    latency_us: Expr
    load_us: Mapping[Processor, Expr]
    energy_mj: Expr


@dataclass(frozen=True, slots=True)
class PlacementProgram:
    """A program, its objective and where its networks are in it."""

    program: Program
    goal: Expr
    parts: Mapping[str, NetworkPart]

    def forbid_all(self, network: str, homes: Mapping[str, Processor]) -> None:
        """Demand that one of these tasks of a network runs elsewhere."""
        on = self.parts[network].on
        self.program.at_least(
            total(Expr(1.0) - on[name, home] for name, home in homes.items()), 1.0
        )

    def forbid_placement(self, placement: Placement) -> None:
        """Demand that some task of some network runs elsewhere."""
        self.program.at_least(
            total(
                Expr(1.0) - self.parts[name].on[task, home]
                for name, placed in placement.items()
                for task, home in placed.items()
            ),
            1.0,
        )

    def forbid_alone(
        self, network: str, inside: tuple[str, ...], around: tuple[str, ...], processor: Processor
    ) -> None:
        """Demand that tasks do not run together on a processor unless one around them joins."""
        on = self.parts[network].on
        leaving = total(Expr(1.0) - on[name, processor] for name in inside)
        joining = total(on.get((name, processor), Expr()) for name in around)
        self.program.at_least(leaving + joining, 1.0)


def placement_program(problem: Problem, objective: Objective) -> PlacementProgram:
    """Return the program of a problem for any objective but "makespan"."""
    program = Program()
    parts = {net.name: _network_part(program, problem, net) for net in problem.networks}
    busy = {
        processor: total(
            Expr().add(
                parts[net.name].load_us[processor],
                rate_of(net) * time_scale(problem, net.name) * share_of(problem, processor),
            )
            for net in problem.networks
        )
        for processor in problem.processors
    }
    for core in dlas(problem):
        used = total(part.segments[core] for part in parts.values())
        program.at_most(used, float(problem.limits.max_loadables))
    if all(net.rate_hz is not None for net in problem.networks) and objective != "utilisation":
        for load in busy.values():
            program.at_most(load, problem.utilisation_limit)
    return PlacementProgram(program, _goal(program, problem, objective, parts, busy), parts)


def _goal(
    program: Program,
    problem: Problem,
    objective: Objective,
    parts: Mapping[str, NetworkPart],
    busy: Mapping[Processor, Expr],
) -> Expr:
    if objective == "latency":
        return total(part.latency_us for part in parts.values())
    if objective == "energy":
        return total(
            Expr().add(parts[net.name].energy_mj, rate_of(net)) for net in problem.networks
        )
    if objective == "gpu_time":
        return busy["gpu"]
    busiest = program.column(0.0, float("inf"))
    for load in busy.values():
        program.at_least(busiest - load)
    return busiest


def _network_part(program: Program, problem: Problem, network: Network) -> NetworkPart:
    graph = graph_of(network)
    on: dict[tuple[str, Processor], Expr] = {}
    for task in network.tasks:
        on |= _homes(program, problem, task)
    first = _first_lane(program, problem, graph)
    segments = {
        p: _segments(program, network, graph, on, p, first=first.get(p))
        if _counted(problem, p)
        else Expr()
        for p in problem.processors
    }
    load = {
        processor: total(
            Expr().add(on[task.name, processor], task.time_us.get(processor, 0.0))
            for task in network.tasks
        ).add(segments[processor], problem.segment_us.get(processor, 0.0))
        for processor in problem.processors
    }
    energy = total(
        Expr().add(on[task.name, p], task.energy_mj.get(p, 0.0))
        for task in network.tasks
        for p in problem.processors
    )
    for processor, count in segments.items():
        energy.add(count, problem.segment_mj.get(processor, 0.0))
    crossings, waits = Expr(), Expr()
    for flow in network.flows:
        for direction, crosses in _crossings(program, problem, flow, on).items():
            crossings.add(crosses)
            waits.add(crosses, crossing_cost(flow.crossing_us, direction))
            energy.add(crosses, crossing_cost(flow.crossing_mj, direction))
    latency = total(load.values()) + waits
    if problem.crossing_on is not None:
        load[problem.crossing_on] = load[problem.crossing_on] + waits
    limits = problem.limits
    if limits.max_crossings is not None:
        program.at_most(crossings, float(limits.max_crossings))
    if limits.max_switches is not None:
        program.at_most(total(segments.values()), float(limits.max_switches + 1))
    return NetworkPart(on, segments, latency, load, energy)


def _homes(program: Program, problem: Problem, task: Task) -> dict[tuple[str, Processor], Expr]:
    """Return where a task may run: the last processor is what the others leave."""
    allowed = [p for p in problem.processors if p in task.time_us]
    homes = {(task.name, p): Expr() for p in problem.processors}
    rest = Expr(1.0)
    for processor in allowed[1:]:
        chosen = program.binary()
        homes[task.name, processor] = chosen
        rest = rest - chosen
    if len(allowed) > 2:
        program.at_least(rest)
    homes[task.name, allowed[0]] = rest
    return homes


def _crossings(
    program: Program, problem: Problem, flow: Flow, on: Mapping[tuple[str, Processor], Expr]
) -> dict[Direction, Expr]:
    """Return a variable for each direction in which the tensor can cross."""
    gpu = Expr(1.0) if flow.source is None else on[flow.source, "gpu"]
    readers = [on[name, "gpu"] for name in flow.targets]
    found: dict[Direction, Expr] = {}
    found["to_dla"] = _largest(program, [gpu - reader for reader in readers])
    leaving = [reader - gpu for reader in readers]
    if flow.output:
        leaving.append(Expr(1.0) - gpu)
    found["to_gpu"] = _largest(program, leaving)
    if len(problem.processors) > 2 and flow.source is not None:
        one, other = dlas(problem)
        ends = ((one, other), (other, one))
        found["between_dlas"] = _largest(
            program,
            [
                on[flow.source, a] + on[name, b] - Expr(1.0)
                for name in flow.targets
                for a, b in ends
            ],
        )
    return found


def _largest(program: Program, exprs: list[Expr]) -> Expr:
    """Return a variable from 0 to 1 that is at least each expression."""
    exprs = [expr for expr in exprs if any(expr.terms.values()) or expr.constant > 0]
    if not exprs:
        return Expr()
    if len(exprs) == 1 and exprs[0].constant == 0 and min(exprs[0].terms.values()) > 0:
        return exprs[0]
    result = program.column(0.0, 1.0)
    for expr in exprs:
        program.at_least(result - expr)
    return result


def _first_lane(program: Program, problem: Problem, graph: Graph) -> dict[Processor, Expr]:
    """Return which of two processors begins, if paths could begin on both: they cannot both."""
    if len(problem.processors) != 2 or sum(not parents for parents in graph.parents) < 2:
        return {}
    begins = program.binary()
    one, other = problem.processors
    return {one: begins, other: Expr(1.0) - begins}


def _segments(
    program: Program,
    network: Network,
    graph: Graph,
    on: Mapping[tuple[str, Processor], Expr],
    processor: Processor,
    *,
    first: Expr | None,
) -> Expr:
    """Return a variable that is at least the times a path enters `processor`.

    `first` is 1 if a segment on the processor begins the network, None where that needs no say.
    """
    tasks = network.tasks
    most = program.column(0.0, float(len(tasks)))
    depth = [program.column(0.0, float(len(tasks))) for _ in tasks]
    opening = Expr() if first is None else program.column(0.0, 1.0)
    for index, task in enumerate(tasks):
        here = on[task.name, processor]
        if not graph.parents[index]:
            program.at_least(depth[index] - opening)
            program.at_least(depth[index] - opening - here + (first or Expr()))
            if first is not None:
                program.at_least(opening - here - first, -1.0)
        for parent in graph.parents[index]:
            same = processor == "gpu" or tasks[parent].lane == task.lane
            there = on[tasks[parent].name, processor] if same else Expr()
            program.at_least(depth[index] - depth[parent])
            program.at_least(depth[index] - depth[parent] - (here - there))
        if not graph.children[index]:
            program.at_least(most - depth[index])
    return most


def _counted(problem: Problem, processor: Processor) -> bool:
    """Return whether the number of segments matters on a processor."""
    costs = problem.segment_us.get(processor, 0.0) or problem.segment_mj.get(processor, 0.0)
    return bool(costs) or problem.limits.max_switches is not None or processor != "gpu"
