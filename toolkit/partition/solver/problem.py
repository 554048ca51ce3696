"""The values of a placement problem: tasks, the tensors between them, processors and limits.

Times are in microseconds, energies in millijoules, demands on memory in GB/s, sizes in bytes.
A frame runs the segments of its network one after the other; frames of several networks, or
several frames of one, share the processors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from device.engine.manifest import Processor
from toolkit.errors import PlanError

# "latency": time of a single frame, summed over networks. "utilisation": share of time of the
# busiest processor at the rates (without a rate: us per frame). "energy": per second at the rates,
# or per frame at full rate, with the idle power. "gpu_time": likewise. "makespan": one frame of
# each network.
Objective = Literal["latency", "utilisation", "energy", "gpu_time", "makespan"]
Direction = Literal["to_dla", "to_gpu", "between_dlas"]
Placement = Mapping[str, Mapping[str, Processor]]  # network -> task -> processor

PROCESSORS: tuple[Processor, ...] = ("gpu", "dla0", "dla1")


class Contention(Protocol):
    """Slowdown of a processor by the memory traffic of others."""

    def speed(self, processor: Processor, own_gbps: float, other_gbps: float) -> float:
        """Return the speed relative to running alone, in (0, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One node, or several that are never separated.

    A processor that is absent from `time_us` cannot run the task. `memory_gbps`: memory demand when
    it runs alone. DLA tasks of different `lane` never share a loadable
    (rule G7: one batch size in each).
    """

    name: str
    time_us: Mapping[Processor, float]
    energy_mj: Mapping[Processor, float] = field(default_factory=dict)
    memory_gbps: Mapping[Processor, float] = field(default_factory=dict)
    weight_bytes: int = 0
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor: its producer and its readers.

    It crosses at most once in each direction, for any number of readers. `source` None: an input of
    the network, in GPU memory; `output`: an output of the network, in GPU memory. A direction that
    is absent costs nothing, except "between_dlas", which then costs the sum of both others.
    """

    name: str
    source: str | None
    targets: tuple[str, ...]
    bytes: int = 0
    crossing_us: Mapping[Direction, float] = field(default_factory=dict)
    crossing_mj: Mapping[Direction, float] = field(default_factory=dict)
    output: bool = False


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """The dependencies between the tasks of a network, by index."""

    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def arcs(self) -> Iterator[tuple[int, int]]:
        """All pairs (producer, reader), by the reader."""
        return ((u, v) for v, sources in enumerate(self.parents) for u in sources)


@dataclass(frozen=True)  # no slots: it keeps its graph
class Network:
    """Tasks in a valid execution order, and the tensors between them."""

    name: str
    tasks: tuple[Task, ...]
    flows: tuple[Flow, ...]
    rate_hz: float | None = None

    @cached_property
    def graph(self) -> TaskGraph:
        """The dependencies of the tasks; a search asks for them hundreds of times."""
        rank = {task.name: index for index, task in enumerate(self.tasks)}
        parents: list[set[int]] = [set() for _ in rank]
        children: list[set[int]] = [set() for _ in rank]
        for flow in self.flows:
            for target in flow.targets if flow.source is not None else ():
                source = rank[flow.source or ""]
                parents[rank[target]].add(source)
                children[source].add(rank[target])
        return TaskGraph(
            tuple(tuple(sorted(p)) for p in parents), tuple(tuple(sorted(c)) for c in children)
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a placement.

    `max_crossings` and `max_switches` apply to each network: tensors that cross, and changes of
    segment in a frame. `max_loadables` applies to each DLA core over all networks (rule
    `loadables_rule`). Each loadable must be below `weight_bytes` (G9) and `intermediate_bytes`
    (G8). Each connected component on the DLA must take at least `min_segment_us`.
    """

    max_crossings: int | None = None
    max_switches: int | None = None
    max_loadables: int = 16
    loadables_rule: str = "G6"
    weight_bytes: int = 512 * 2**20
    intermediate_bytes: int = 2**30
    min_segment_us: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)  # two are equal if they are one
class Problem:
    """Networks, their shared processors, and common limits.

    `segment_us` and `segment_mj`: the cost of starting a segment. `crossing_on`: the processor that
    is busy during a crossing; None: a delay without load. `utilisation_limit`: maximum utilisation
    of any processor at the rates. `alternate_dlas`: every loadable is on both cores and frames
    alternate; tasks are then placed on "dla0" only. `idle_w`: the power of the idle board, which
    counts in the energy of frames that come as fast as they go.
    """

    networks: tuple[Network, ...]
    processors: tuple[Processor, ...] = PROCESSORS
    segment_us: Mapping[Processor, float] = field(default_factory=dict)
    segment_mj: Mapping[Processor, float] = field(default_factory=dict)
    crossing_on: Processor | None = "gpu"
    limits: Limits = field(default_factory=Limits)
    contention: Contention | None = None
    utilisation_limit: float = 1.0
    alternate_dlas: bool = False
    idle_w: float = 0.0

    @property
    def rated(self) -> bool:
        """True if a network has a rate: the board then idles whatever the placement is."""
        return any(network.rate_hz is not None for network in self.networks)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a network that runs without a switch; tasks are in execution order."""

    network: str
    processor: Processor
    tasks: tuple[str, ...]


class Interval(NamedTuple):  # a simulation makes tens of thousands of them
    """The execution of a segment of one frame."""

    network: str
    frame: int
    segment: int
    processor: Processor
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement, its value by the model, and a bound of the best value.

    `value` and `bound` are in the unit of the objective (us, mJ or a share of time). `proven`: no
    placement is better. `schedule` is set for the makespan.
    """

    objective: Objective
    placement: Placement
    segments: tuple[Segment, ...]  # of all networks, each in execution order
    value: float
    bound: float
    proven: bool
    seconds: float
    schedule: tuple[Interval, ...] = ()

    @property
    def gap(self) -> float:
        """The maximum relative improvement by a better placement."""
        return 0.0 if self.value <= 0 else max(0.0, (self.value - self.bound) / self.value)


def crossing_cost(costs: Mapping[Direction, float], direction: Direction) -> float:
    """Return the cost of a crossing; between DLAs it defaults to the sum of both others."""
    if direction == "between_dlas" and direction not in costs:
        return costs.get("to_gpu", 0.0) + costs.get("to_dla", 0.0)
    return costs.get(direction, 0.0)


def _check(problem: Problem) -> None:
    """Raise PlanError for inconsistent names and tasks that no processor supports."""
    names = [network.name for network in problem.networks]
    if len(set(names)) != len(names):
        raise PlanError(f"networks of one workload need different names, found {names}")
    for network in problem.networks:
        _check_network(network, problem.processors)
    if problem.alternate_dlas and "dla1" in problem.processors:
        raise PlanError("with alternating cores tasks are placed on dla0; leave dla1 out")


def _check_network(network: Network, processors: tuple[Processor, ...]) -> None:
    rank = {task.name: index for index, task in enumerate(network.tasks)}
    if len(rank) != len(network.tasks):
        raise PlanError(f"{network.name}: two tasks have the same name")
    for task in network.tasks:
        if not any(processor in task.time_us for processor in processors):
            raise PlanError(
                f"{network.name}: task '{task.name}' can run on none of {', '.join(processors)}; "
                "give it a time on one of them"
            )
    for flow in network.flows:
        known = [name for name in (*flow.targets, flow.source) if name is not None]
        if unknown := [name for name in known if name not in rank]:
            raise PlanError(
                f"{network.name}: tensor '{flow.name}' names unknown task '{unknown[0]}'"
            )
        source = -1 if flow.source is None else rank[flow.source]
        if early := [name for name in flow.targets if rank[name] <= source]:
            raise PlanError(
                f"{network.name}: task '{early[0]}' reads '{flow.name}' before it is made; "
                "list tasks in an order in which they can run"
            )
