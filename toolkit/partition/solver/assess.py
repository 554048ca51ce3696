"""The cost of a placement: segments, crossings, latency, load, energy, limits.

This is the definition of every figure; the solver's programs are checked against it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import (
    Direction,
    Flow,
    Network,
    Objective,
    Placement,
    Problem,
    Segment,
    crossing_cost,
)
from toolkit.partition.solver.segmentation import components, segments_of


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that passes to another processor; `before`: the first segment that reads it.

    For an output of the network, `before` is the number of segments.
    """

    flow: Flow
    direction: Direction
    before: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one frame of a network. `load_us`: busy time of each processor."""

    segments: tuple[Segment, ...]
    crossings: tuple[Crossing, ...]
    latency_us: float
    load_us: Mapping[Processor, float]
    energy_mj: float


def limits_are_far(problem: Problem, network: Network) -> bool:
    """Return True if no placement of a network can break a limit of loadables."""
    limits = problem.limits
    return (
        limits.min_segment_us == 0
        and sum(task.weight_bytes for task in network.tasks) < limits.weight_bytes
        and sum(flow.bytes for flow in network.flows) < limits.intermediate_bytes
    )


def assess(
    problem: Problem,
    network: Network,
    placed: Mapping[str, Processor],
) -> Cost:
    """Return the cost of one frame; segments run in sequence."""
    segments = segments_of(network, placed, problem.segment_us)
    crossings = tuple(crossings_of(network, placed, segments))
    load = dict.fromkeys(problem.processors, 0.0)
    energy = 0.0
    for task in network.tasks:
        processor = placed[task.name]
        load[processor] += task.time_us[processor]
        energy += task.energy_mj.get(processor, 0.0)
    for segment in segments:
        load[segment.processor] += problem.segment_us.get(segment.processor, 0.0)
        energy += problem.segment_mj.get(segment.processor, 0.0)
    waits = sum(crossing_cost(c.flow.crossing_us, c.direction) for c in crossings)
    energy += sum(crossing_cost(c.flow.crossing_mj, c.direction) for c in crossings)
    latency = sum(load.values()) + waits
    if problem.crossing_on is not None:
        load[problem.crossing_on] += waits
    return Cost(segments, crossings, latency, load, energy)


def value_of(problem: Problem, objective: Objective, costs: Mapping[str, Cost]) -> float:
    """Return the objective of assessed networks; makespan needs a schedule and has none here."""
    rates = {network.name: rate_of(network) for network in problem.networks}
    if objective == "latency":
        return sum(cost.latency_us for cost in costs.values())
    loads = utilisation(problem, costs)
    if objective == "energy":
        active = sum(rates[name] * cost.energy_mj for name, cost in costs.items())
        return active + idle_mj(problem, max(loads.values()))
    return loads["gpu"] if objective == "gpu_time" else max(loads.values())


def idle_mj(problem: Problem, frame_us: float) -> float:
    """Return the energy of the idle board from one frame to the next, 0 at given rates."""
    return 0.0 if problem.rated else problem.idle_w * frame_us * 1e-3


def utilisation(problem: Problem, costs: Mapping[str, Cost]) -> dict[Processor, float]:
    """Return the share of time that each processor is busy, us per frame without a rate."""
    rates = {network.name: rate_of(network) for network in problem.networks}
    return {
        processor: sum(
            rates[name] * time_scale(problem, name) * cost.load_us[processor]
            for name, cost in costs.items()
        )
        * share_of(problem, processor)
        for processor in problem.processors
    }


def rate_of(network: Network) -> float:
    """Return the rate in Hz, 1 for a network without one."""
    return 1.0 if network.rate_hz is None else network.rate_hz


def time_scale(problem: Problem, name: str) -> float:
    """Return the factor from us per frame to the unit of load: seconds under a rate, else us."""
    rates = {network.name: network.rate_hz for network in problem.networks}
    return 1.0 if rates[name] is None else 1e-6


def share_of(problem: Problem, processor: Processor) -> float:
    """Return the share of the load on `processor` that one core carries."""
    return 0.5 if problem.alternate_dlas and processor == "dla0" else 1.0


def violations(problem: Problem, placement: Placement, costs: Mapping[str, Cost]) -> list[str]:
    """Return the limits that a placement violates, as text; see `overloads` for rates."""
    limits = problem.limits
    violated: list[str] = []
    for network in problem.networks:
        cost = costs[network.name]
        switches = len(cost.segments) - 1
        if limits.max_switches is not None and switches > limits.max_switches:
            violated.append(f"{network.name}: {switches} switches, at most {limits.max_switches}")
        crossings = len(cost.crossings)
        if limits.max_crossings is not None and crossings > limits.max_crossings:
            violated.append(
                f"{network.name}: {crossings} crossings, at most {limits.max_crossings}"
            )
        violated.extend(_bad_component_texts(problem, network, placement[network.name]))
    for core in dlas(problem):
        loadables = sum(s.processor == core for cost in costs.values() for s in cost.segments)
        if loadables > limits.max_loadables:
            limit = f"at most {limits.max_loadables} ({limits.loadables_rule})"
            violated.append(f"{core}: {loadables} loadables, {limit}")
    return violated


def overloads(problem: Problem, costs: Mapping[str, Cost]) -> list[str]:
    """Return the processors that the rates overload, as text."""
    if any(network.rate_hz is None for network in problem.networks):
        return []
    return [
        f"{processor}: busy {busy:.4g} of the time, at most {problem.utilisation_limit:.4g}"
        for processor, busy in utilisation(problem, costs).items()
        if busy > problem.utilisation_limit * (1 + 1e-9)
    ]


def dlas(problem: Problem) -> tuple[Processor, ...]:
    """Return the DLA cores of a problem."""
    return tuple(p for p in problem.processors if p != "gpu")


@dataclass(frozen=True, slots=True)
class BadComponent:
    """A connected component on a DLA core that violates a limit of loadables."""

    processor: Processor
    tasks: tuple[int, ...]
    too_small: bool
    text: str


def bad_components(
    problem: Problem, network: Network, placed: Mapping[str, Processor]
) -> Iterator[BadComponent]:
    """Yield the components that are too small or too large for a loadable."""
    processors = [placed[task.name] for task in network.tasks]
    limits = problem.limits
    for core in dlas(problem):
        pieces = components(network.graph, processors, core)
        intermediates = intermediate_bytes(network, pieces)
        for component, inside in zip(pieces, intermediates, strict=True):
            tasks = [network.tasks[index] for index in component]
            time = sum(task.time_us[core] for task in tasks)
            weights = sum(task.weight_bytes for task in tasks)
            if time < limits.min_segment_us:
                text = f"{time:.4g} us, at least {limits.min_segment_us:.4g}"
                yield BadComponent(core, component, True, text)
            if weights >= limits.weight_bytes:
                text = f"{weights} bytes of weights, below {limits.weight_bytes} (G9)"
                yield BadComponent(core, component, False, text)
            if inside >= limits.intermediate_bytes:
                text = f"{inside} bytes of intermediates, below {limits.intermediate_bytes} (G8)"
                yield BadComponent(core, component, False, text)


def intermediate_bytes(network: Network, pieces: Sequence[Sequence[int]]) -> list[int]:
    """Return for each piece of the tasks the bytes of tensors that only it writes and reads."""
    piece_of = {network.tasks[t].name: number for number, piece in enumerate(pieces) for t in piece}
    totals = [0] * len(pieces)
    for flow in network.flows:
        piece = None if flow.source is None else piece_of.get(flow.source)
        if piece is None or flow.output:
            continue
        if all(piece_of.get(target) == piece for target in flow.targets):
            totals[piece] += flow.bytes
    return totals


def _bad_component_texts(
    problem: Problem, network: Network, placed: Mapping[str, Processor]
) -> Iterator[str]:
    for bad in bad_components(problem, network, placed):
        first = network.tasks[bad.tasks[0]].name
        yield f"{network.name}: the piece of '{first}' on {bad.processor}: {bad.text}"


def crossings_of(
    network: Network, placed: Mapping[str, Processor], segments: Sequence[Segment]
) -> Iterator[Crossing]:
    """Yield the tensors that pass between the segments of a network; these are in order."""
    segment_of = {task: index for index, segment in enumerate(segments) for task in segment.tasks}
    for flow in network.flows:
        source: Processor = "gpu" if flow.source is None else placed[flow.source]
        away = [target for target in flow.targets if placed[target] != source]
        if not away and not flow.output:
            continue
        first: dict[Direction, int] = {}
        for target in away:
            direction = direction_of(source, placed[target])
            first[direction] = min(segment_of[target], first.get(direction, len(segments)))
        if flow.output and source != "gpu":
            first.setdefault("to_gpu", len(segments))
        for direction, before in first.items():
            yield Crossing(flow, direction, before)


def direction_of(source: Processor, target: Processor) -> Direction:
    """Return the direction between two processors."""
    if target == "gpu":
        return "to_gpu"
    return "to_dla" if source == "gpu" else "between_dlas"
