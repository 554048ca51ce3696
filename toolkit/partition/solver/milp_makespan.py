"""The makespan of one frame of each network as a program: placement, segments and their order.

Each network has a fixed number of slots. A slot is a segment on one processor; tasks are in slots
by dependency order. Slots of one network run in sequence; binaries order those of different
networks on one processor. A crossing delays the network but occupies no processor, whatever
`crossing_on` is: it takes place in any gap between the producer of the tensor and its first reader.
Contention is not modelled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import dlas
from toolkit.partition.solver.jobs import Job
from toolkit.partition.solver.milp import Expr, Program, Values, total
from toolkit.partition.solver.problem import (
    Direction,
    Flow,
    Network,
    Problem,
    Segment,
    crossing_cost,
)
from toolkit.partition.solver.segmentation import Lane, lane_of

_Precedes = dict[tuple[int, int], Expr]  # slots of two networks -> 1 if the first starts before


@dataclass(frozen=True, slots=True)
class _Slots:
    """The expressions of one network; lists have one entry a slot."""

    network: Network
    inside: Mapping[tuple[str, int, Lane], Expr]  # 1 if a task is in a slot on a lane
    done: Mapping[tuple[str, int], Expr]  # 1 if a task is in this slot or before
    lane: Sequence[Mapping[Lane, Expr]]
    start: Sequence[Expr]
    time_us: Sequence[Expr]
    wait: Sequence[Expr]  # before each slot, and one after the last

    def uses(self, slot: int, processor: Processor) -> Expr:
        """Return 1 if a slot is on a processor."""
        return total(used for lane, used in self.lane[slot].items() if lane[0] == processor)

    def end(self, slot: int) -> Expr:
        """Return when a slot ends, in us."""
        return self.start[slot] + self.time_us[slot]


@dataclass(frozen=True, slots=True)
class SlotOutcome:
    """What the program found: segments in the order in which they start, None for nothing.

    `seconds`: what the search took, in the unit of its limit.
    """

    jobs: tuple[Job, ...] | None
    bound: float
    infeasible: bool
    seconds: float


def solve_slots(
    problem: Problem, max_switches: int, seconds: float, start: Sequence[Segment]
) -> SlotOutcome:
    """Return the shortest makespan with at most `max_switches` + 1 segments a network.

    `start`: the segments of an order to improve, or none.
    """
    horizon = _horizon(problem, max_switches)
    program = Program()
    parts = [_slots(program, problem, net, horizon, max_switches) for net in problem.networks]
    end = program.column(0.0, horizon)
    for part in parts:
        program.at_least(end - part.end(len(part.start) - 1) - part.wait[-1])
        program.at_least(end - total((*part.time_us, *part.wait)))
    for processor in problem.processors:
        busy = [_busy(problem, part, slot, processor) for part in parts for slot in _range(part)]
        program.at_least(end - total(busy))
    for core in dlas(problem):
        loadables = total(part.uses(slot, core) for part in parts for slot in _range(part))
        program.at_most(loadables, float(problem.limits.max_loadables))
    orders = {
        (a, b): _exclude(program, problem, parts[a], parts[b], horizon)
        for a, b in combinations(range(len(parts)), 2)
    }
    outcome = program.minimise(end, seconds, _start(parts, orders, start))
    jobs = None if outcome.values is None else _jobs(problem, parts, outcome.values)
    return SlotOutcome(jobs, outcome.bound, outcome.infeasible, outcome.seconds)


def _range(part: _Slots) -> range:
    return range(len(part.start))


def _horizon(problem: Problem, max_switches: int) -> float:
    """Return an upper bound of the makespan: all networks in sequence, on the GPU if supported.

    Otherwise every task at its slowest, with every crossing and the start of every slot.
    """
    horizon = 0.0
    for net in problem.networks:
        if all("gpu" in task.time_us for task in net.tasks):
            horizon += sum(task.time_us["gpu"] for task in net.tasks)
            horizon += problem.segment_us.get("gpu", 0.0)
            continue
        horizon += sum(max(task.time_us.values()) for task in net.tasks)
        horizon += sum(crossing_cost(f.crossing_us, "between_dlas") for f in net.flows)
        horizon += sum(crossing_cost(f.crossing_us, d) for f in net.flows for d in _DIRECTIONS)
        horizon += _slot_count(net, max_switches) * max(problem.segment_us.values(), default=0.0)
    return horizon * (1 + 1e-6)


_DIRECTIONS: tuple[Direction, ...] = ("to_dla", "to_gpu")


def _slot_count(network: Network, max_switches: int) -> int:
    return min(len(network.tasks), max_switches + 1)


def _slots(
    program: Program, problem: Problem, network: Network, horizon: float, max_switches: int
) -> _Slots:
    count = _slot_count(network, max_switches)
    lanes = sorted({lane_of(p, t.lane) for t in network.tasks for p in problem.processors})
    used = [{lane: program.binary() for lane in lanes} for _ in range(count)]
    for choice in used:
        program.at_most(total(choice.values()), 1.0)
    inside: dict[tuple[str, int, Lane], Expr] = {}
    done: dict[tuple[str, int], Expr] = {}
    for task in network.tasks:
        before = Expr()
        for slot in range(count):
            here = Expr(1.0) if slot == count - 1 else program.binary()
            done[task.name, slot] = here
            program.at_least(here - before)
            choices = [
                lane
                for lane in lanes
                if lane[0] in task.time_us and lane == lane_of(lane[0], task.lane)
            ]
            for lane in choices:
                inside[task.name, slot, lane] = program.column(0.0, 1.0)
                program.at_least(used[slot][lane] - inside[task.name, slot, lane])
            chosen = total(inside[task.name, slot, lane] for lane in choices)
            program.at_least(chosen - (here - before))
            program.at_most(chosen - (here - before), 0.0)
            before = here
    names = [task.name for task in network.tasks]
    for source, reader in network.graph.arcs:
        for slot in range(count - 1):
            program.at_least(done[names[source], slot] - done[names[reader], slot])
    part = _Slots(
        network,
        inside,
        done,
        used,
        [program.column(0.0, horizon) for _ in range(count)],
        [Expr() for _ in range(count)],
        _waits(program, problem, network, inside, done=done, count=count),
    )
    for slot in range(count):
        part.time_us[slot].add(total(_busy(problem, part, slot, p) for p in problem.processors))
        _limit_loadable(program, problem, part, slot)
        free_from = part.end(slot - 1) if slot else Expr()
        program.at_least(part.start[slot] - free_from - part.wait[slot])
    return part


def _busy(problem: Problem, part: _Slots, slot: int, processor: Processor) -> Expr:
    """Return the busy time of a processor in a slot."""
    busy = Expr().add(part.uses(slot, processor), problem.segment_us.get(processor, 0.0))
    for task in part.network.tasks:
        lane = lane_of(processor, task.lane)
        if (task.name, slot, lane) in part.inside:
            busy.add(part.inside[task.name, slot, lane], task.time_us[processor])
    return busy


def _limit_loadable(program: Program, problem: Problem, part: _Slots, slot: int) -> None:
    """Limit a slot on the DLA to one loadable; conservative for intermediates."""
    limits, tasks = problem.limits, {task.name: task for task in part.network.tasks}
    output_bytes = dict.fromkeys(tasks, 0)
    for flow in part.network.flows:
        if flow.source is not None:
            output_bytes[flow.source] += flow.bytes
    for core in dlas(problem):
        on_core = {n: e for (n, s, lane), e in part.inside.items() if s == slot and lane[0] == core}
        weights = total(
            Expr().add(e, float(tasks[name].weight_bytes)) for name, e in on_core.items()
        )
        if sum(task.weight_bytes for task in tasks.values()) >= limits.weight_bytes:
            program.at_most(weights, limits.weight_bytes - 1.0)
        if sum(output_bytes.values()) >= limits.intermediate_bytes:
            inner = total(Expr().add(e, float(output_bytes[name])) for name, e in on_core.items())
            program.at_most(inner, limits.intermediate_bytes - 1.0)
        if limits.min_segment_us:
            duration = total(
                Expr().add(e, tasks[name].time_us[core]) for name, e in on_core.items()
            )
            program.at_least(duration.add(part.uses(slot, core), -limits.min_segment_us))


def _waits(
    program: Program,
    problem: Problem,
    network: Network,
    inside: Mapping[tuple[str, int, Lane], Expr],
    *,
    done: Mapping[tuple[str, int], Expr],
    count: int,
) -> list[Expr]:
    """Return the wait for crossings before each slot and after the last."""
    waits = [Expr() for _ in range(count + 1)]
    crossings = Expr()
    placed = _ProcessorsBySlot(problem, network, inside, count)
    for flow in network.flows:
        for direction, needs in _needs(problem, flow, placed, count):
            price = crossing_cost(flow.crossing_us, direction)
            so_far = Expr()
            for slot in range(count + 1):
                crosses = program.column(0.0, 1.0)
                if flow.source is not None:
                    produced = done[flow.source, slot - 1] if slot else Expr()
                    program.at_least(produced - crosses)
                waits[slot].add(crosses, price)
                so_far.add(crosses)
                for need in needs[slot]:
                    program.at_least(so_far - need)
            crossings.add(so_far)
    if problem.limits.max_crossings is not None:
        program.at_most(crossings, float(problem.limits.max_crossings))
    return waits


class _ProcessorsBySlot:
    """Processors of tasks, cumulative over slots."""

    def __init__(
        self,
        problem: Problem,
        network: Network,
        inside: Mapping[tuple[str, int, Lane], Expr],
        count: int,
    ) -> None:
        self._upto: dict[tuple[str, Processor, int], Expr] = {}
        for task in network.tasks:
            for processor in problem.processors:
                lane, so_far = lane_of(processor, task.lane), Expr()
                for slot in range(count):
                    so_far = so_far + inside.get((task.name, slot, lane), Expr())
                    self._upto[task.name, processor, slot] = so_far
        self._last = count - 1

    def upto(self, task: str, processor: Processor, slot: int) -> Expr:
        """Return 1 if a task is on a processor in this slot or before."""
        return self._upto[task, processor, min(slot, self._last)]

    def ever(self, task: str, processor: Processor) -> Expr:
        """Return 1 if a task is on a processor."""
        return self._upto[task, processor, self._last]


def _needs(
    problem: Problem, flow: Flow, placed: _ProcessorsBySlot, count: int
) -> Iterable[tuple[Direction, list[list[Expr]]]]:
    """Yield each direction with lower bounds of the crossings up to each slot."""
    cores, slots = dlas(problem), range(count + 1)
    gpu = Expr(1.0) if flow.source is None else placed.ever(flow.source, "gpu")
    to_dla = [
        [
            total(placed.upto(name, core, slot) for core in cores) - (Expr(1.0) - gpu)
            for name in flow.targets
        ]
        for slot in slots
    ]
    to_gpu = [[placed.upto(name, "gpu", slot) - gpu for name in flow.targets] for slot in slots]
    if flow.output:
        to_gpu[count].append(Expr(1.0) - gpu)
    if cores:
        yield "to_dla", to_dla
        yield "to_gpu", to_gpu
    if len(cores) > 1 and flow.source is not None:
        source = flow.source
        yield (
            "between_dlas",
            [
                [
                    placed.upto(name, b, slot) + placed.ever(source, a) - Expr(1.0)
                    for name in flow.targets
                    for a, b in (cores, cores[::-1])
                ]
                for slot in slots
            ],
        )


def _exclude(
    program: Program, problem: Problem, first_part: _Slots, second_part: _Slots, horizon: float
) -> _Precedes:
    """Exclude slots of two networks from sharing a processor; return the order binaries."""
    precedes = {(i, j): program.binary() for i in _range(first_part) for j in _range(second_part)}
    for (i, j), before in precedes.items():
        if i:
            program.at_least(
                precedes[i - 1, j] - before
            )  # what starts before i starts before j too
        if j:
            program.at_least(before - precedes[i, j - 1])
        for processor in problem.processors:
            apart = Expr(2.0) - first_part.uses(i, processor) - second_part.uses(j, processor)
            gap = second_part.start[j] - first_part.end(i)
            program.at_least(gap.add(Expr(1.0) - before + apart, horizon))
            gap = first_part.start[i] - second_part.end(j)
            program.at_least(gap.add(before + apart, horizon))
    return precedes


def _start(
    parts: Sequence[_Slots],
    orders: Mapping[tuple[int, int], _Precedes],
    segments: Sequence[Segment],
) -> dict[int, float]:
    """Return the binaries of an order of segments; none where it needs more slots."""
    ranks: list[list[int]] = []  # of each slot among all segments; unused ones come last
    start: dict[int, float] = {}
    for part in parts:
        places = [i for i, row in enumerate(segments) if row.network == part.network.name]
        if not places or len(places) > len(part.start):
            return {}
        lane_of_task = {task.name: task.lane for task in part.network.tasks}
        slot_of = {name: slot for slot, i in enumerate(places) for name in segments[i].tasks}
        for (name, slot), here in part.done.items():
            start |= dict.fromkeys(here.terms, float(slot_of[name] <= slot))
        for slot in _range(part):
            lane = None
            if slot < len(places):
                row = segments[places[slot]]
                task = next(name for name in row.tasks if name in lane_of_task)
                lane = lane_of(row.processor, lane_of_task[task])
            for kind, used in part.lane[slot].items():
                start |= dict.fromkeys(used.terms, float(kind == lane))
        ranks.append(places + [len(segments)] * (len(part.start) - len(places)))
    for (a, b), precedes in orders.items():
        for (i, j), before in precedes.items():
            start |= dict.fromkeys(before.terms, float(ranks[a][i] <= ranks[b][j]))
    return start


def _jobs(problem: Problem, parts: Sequence[_Slots], values: Values) -> tuple[Job, ...]:
    """Return the used slots of all networks in the order in which they start."""
    jobs: list[tuple[float, str, Job]] = []
    for part in parts:
        waiting = 0.0
        slots = []
        for slot in _range(part):
            waiting += part.wait[slot].at(values)
            home = [
                (name, lane[0])
                for (name, s, lane), here in part.inside.items()
                if s == slot and here.at(values) > 0.5
            ]
            if home:
                slots.append((slot, home[0][1], {name for name, _ in home}, waiting))
                waiting = 0.0
        after = waiting + part.wait[-1].at(values)
        times = {task.name: task.time_us for task in part.network.tasks}
        for slot, processor, names, wait in slots:
            tasks = tuple(name for name in times if name in names)
            length = sum(times[name][processor] for name in names)
            length += problem.segment_us.get(processor, 0.0)
            last = slot == slots[-1][0]
            segment = Segment(part.network.name, processor, tasks)
            job = Job(segment, length, wait, after if last else 0.0)
            jobs.append((part.start[slot].at(values), segment.network, job))
    return tuple(job for _, _, job in sorted(jobs, key=lambda row: row[:2]))
