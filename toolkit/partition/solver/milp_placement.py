"""The placement of networks as a linear program: every objective but the makespan.

Each task has a binary for each supported processor but one. A crossing is a variable that is at
least the difference of its ends. With two lanes the minimum number of segments on a processor is
the maximum number of times that a path enters it; a potential along the dependencies counts that.
With more lanes it can be larger, so the program's value is a bound: `solve` compares it with the
assessed value and forbids placements that the program underestimates.

Without start costs, limits and rates the program is a minimum cut with an integral relaxation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import dlas, idle_mj, rate_of, share_of, time_scale
from toolkit.partition.solver.milp import Expr, Program, total
from toolkit.partition.solver.problem import (
    Direction,
    Flow,
    Network,
    Objective,
    Placement,
    Problem,
    Task,
    TaskGraph,
    crossing_cost,
)


@dataclass(frozen=True, slots=True)
class NetworkPart:
    """The expressions of one network in a program."""

    on: Mapping[tuple[str, Processor], Expr]  # 1 if the task runs on the processor
    segments: Mapping[Processor, Expr]
    latency_us: Expr
    load_us: Mapping[Processor, Expr]
    energy_mj: Expr


@dataclass(frozen=True, slots=True)
class PlacementProgram:
    """A program, its objective and the expressions of its networks."""

    program: Program
    goal: Expr
    parts: Mapping[str, NetworkPart]

    def forbid_all(self, network: str, homes: Mapping[str, Processor]) -> None:
        """Require that one of these tasks of a network runs elsewhere."""
        on = self.parts[network].on
        self.program.at_least(
            total(Expr(1.0) - on[name, home] for name, home in homes.items()), 1.0
        )

    def forbid_placement(self, placement: Placement) -> None:
        """Require that some task of some network runs elsewhere."""
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
        """Require that tasks do not run together on a processor without one of their neighbours."""
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
    if objective == "gpu_time":
        return busy["gpu"]
    active = total(Expr().add(parts[net.name].energy_mj, rate_of(net)) for net in problem.networks)
    idle_mj_per_us = idle_mj(problem, 1.0)
    if objective == "energy" and not idle_mj_per_us:
        return active
    busiest = program.column(0.0, float("inf"))
    for load in busy.values():
        program.at_least(busiest - load)
    return busiest if objective == "utilisation" else active.add(busiest, idle_mj_per_us)


def _network_part(program: Program, problem: Problem, network: Network) -> NetworkPart:
    graph = network.graph
    on: dict[tuple[str, Processor], Expr] = {}
    for task in network.tasks:
        on |= _task_binaries(program, problem, task)
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


def _task_binaries(
    program: Program, problem: Problem, task: Task
) -> dict[tuple[str, Processor], Expr]:
    """Return the binaries of a task; one processor is the complement of the others."""
    allowed = [p for p in problem.processors if p in task.time_us]
    binaries = {(task.name, p): Expr() for p in problem.processors}
    rest = Expr(1.0)
    for processor in allowed[1:]:
        chosen = program.binary()
        binaries[task.name, processor] = chosen
        rest = rest - chosen
    if len(allowed) > 2:
        program.at_least(rest)
    binaries[task.name, allowed[0]] = rest
    return binaries


def _crossings(
    program: Program, problem: Problem, flow: Flow, on: Mapping[tuple[str, Processor], Expr]
) -> dict[Direction, Expr]:
    """Return a variable for each direction in which the tensor can cross."""
    gpu = Expr(1.0) if flow.source is None else on[flow.source, "gpu"]
    readers = [on[name, "gpu"] for name in flow.targets]
    crossings: dict[Direction, Expr] = {}
    crossings["to_dla"] = _largest(program, [gpu - reader for reader in readers])
    leaving = [reader - gpu for reader in readers]
    if flow.output:
        leaving.append(Expr(1.0) - gpu)
    crossings["to_gpu"] = _largest(program, leaving)
    if len(problem.processors) > 2 and flow.source is not None:
        first_core, second_core = dlas(problem)
        ends = ((first_core, second_core), (second_core, first_core))
        crossings["between_dlas"] = _largest(
            program,
            [
                on[flow.source, a] + on[name, b] - Expr(1.0)
                for name in flow.targets
                for a, b in ends
            ],
        )
    return crossings


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


def _first_lane(program: Program, problem: Problem, graph: TaskGraph) -> dict[Processor, Expr]:
    """Return which of two processors runs first, if paths could start on both."""
    if len(problem.processors) != 2 or sum(not parents for parents in graph.parents) < 2:
        return {}
    begins = program.binary()
    first_processor, second_processor = problem.processors
    return {first_processor: begins, second_processor: Expr(1.0) - begins}


def _segments(
    program: Program,
    network: Network,
    graph: TaskGraph,
    on: Mapping[tuple[str, Processor], Expr],
    processor: Processor,
    *,
    first: Expr | None,
) -> Expr:
    """Return a variable that is at least the number of times a path enters `processor`.

    `first` is 1 if a segment on the processor starts the network, None if that is implied.
    """
    tasks = network.tasks
    entries = program.column(0.0, float(len(tasks)))
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
            program.at_least(entries - depth[index])
    return entries


def _counted(problem: Problem, processor: Processor) -> bool:
    """Return True if the number of segments matters on a processor."""
    costs = problem.segment_us.get(processor, 0.0) or problem.segment_mj.get(processor, 0.0)
    return bool(costs) or problem.limits.max_switches is not None or processor != "gpu"
