"""Turns a graph, its DLA refusals and its costs into a network of the placement problem.

A task is a kernel: nodes that run as one. Where rules allow only some of its nodes on the DLA, the
kernel has a part, and a task, for each run of nodes that may go there or may not. On the GPU the
parts still run as one: together they cost what the kernel does. If what comes before a part is on
the DLA, the part is a kernel of its own, and what that takes more comes with the crossing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from device.engine.manifest import Precision, Processor
from toolkit.dla.rules.memory import stored_bytes
from toolkit.dla.rules.rule import Generation
from toolkit.graph.node_view import NodeView, TensorView
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.fusion import FusedKernel, fuse
from toolkit.partition.costs.model import CostModel, CrossingCost, NodeCost
from toolkit.partition.solver.problem import Direction, Flow, Limits, Network, Problem, Task

_DIRECTIONS: Mapping[Direction, tuple[Processor, Processor]] = {
    "to_dla": ("gpu", "dla0"),
    "to_gpu": ("dla0", "gpu"),
    "between_dlas": ("dla0", "dla1"),
}


@dataclass(frozen=True)
class SharedMemory:
    """How processors slow each other down by the board's cost model."""

    costs: CostModel

    def speed(self, processor: Processor, own_gbps: float, other_gbps: float) -> float:
        """Return the share of its speed that a processor keeps, above 0 and at most 1."""
        return 1.0 / self.costs.slowdown(own_gbps, other_gbps)


@dataclass(frozen=True)
class Formulated:
    """A network as the solver sees it, and the nodes behind each of its tasks."""

    network: Network
    nodes: Mapping[str, tuple[NodeView, ...]]  # task -> nodes, in running order


def formulate(
    name: str,
    views: Sequence[NodeView],
    refused: Iterable[str],
    costs: CostModel,
    processors: Sequence[Processor],
    *,
    outputs: Iterable[str],
    rate_hz: float | None = None,
) -> Formulated:
    """Return the network of a graph.

    `views` are its nodes in running order, `refused` those that no DLA takes, `outputs` the
    graph's own. The first of `processors` takes every node. Energies are beyond the idle board.
    """
    off_dla = frozenset(refused)
    wholes = fuse(views)
    parts = [_parts(kernel, off_dla) for kernel in wholes]
    kernels = [part for group in parts for part in group]
    prices = {processor: costs.price(kernels, processor) for processor in processors}
    first = processors[0]
    alone = iter(prices[first])
    shares: list[NodeCost] = []
    extra: dict[str, CrossingCost] = {}
    for group, price in zip(parts, costs.price(wholes, first), strict=True):
        part_costs = [next(alone) for _ in group]
        shared = _shares(price, part_costs)
        shares += shared
        extra |= _extra(group, part_costs, shared, off_dla)
    task_of = {v.name: kernel.head.name for kernel in kernels for v in kernel.nodes}
    tasks = tuple(_tasks(kernels, off_dla, {**prices, first: shares}, costs))
    ends = frozenset(outputs) if first == "gpu" else None
    flows = tuple(_flows(views, task_of, ends, costs, extra=extra))
    nodes = {kernel.head.name: kernel.nodes for kernel in kernels}
    return Formulated(Network(name, tasks, flows, rate_hz), nodes)


def _parts(kernel: FusedKernel, off_dla: frozenset[str]) -> tuple[FusedKernel, ...]:
    """Split a kernel where the DLA rules cut it; parts are in running order."""
    runs = [tuple(run) for _, run in groupby(kernel.nodes, lambda v: v.name in off_dla)]
    return (kernel,) if len(runs) == 1 else tuple(part for run in runs for part in fuse(run))


def _shares(whole: NodeCost, part_costs: Sequence[NodeCost]) -> list[NodeCost]:
    """Return the cost of a kernel by part: the first takes what it would alone, or all there is."""
    if len(part_costs) == 1:
        return list(part_costs)
    first = part_costs[0]
    time, energy = min(first.time_us, whole.time_us), min(first.energy_mj, whole.energy_mj)
    rest = [
        NodeCost(
            (whole.time_us - time) / (len(part_costs) - 1),
            (whole.energy_mj - energy) / (len(part_costs) - 1),
            0,
            0,
            "nothing",
        )
    ] * (len(part_costs) - 1)
    return [replace(whole, time_us=time, energy_mj=energy), *rest]


def _extra(
    parts: Sequence[FusedKernel],
    part_costs: Sequence[NodeCost],
    shared: Sequence[NodeCost],
    off_dla: frozenset[str],
) -> dict[str, CrossingCost]:
    """Return the extra cost of each part that follows a DLA part, by crossing tensor."""
    extra: dict[str, CrossingCost] = {}
    dla_outputs: dict[str, int] = {}  # by parts that the DLA takes
    for index, part in enumerate(parts):
        if part.head.name not in off_dla:
            dla_outputs |= {t.name: index for v in part.nodes for t in v.outputs}
            continue
        read = [t.name for t in part.reads if t.name in dla_outputs]
        if read:
            latest = max(read, key=dla_outputs.__getitem__)
            before = extra.get(latest, CrossingCost(0.0, 0.0))
            extra[latest] = CrossingCost(
                before.time_us + max(0.0, part_costs[index].time_us - shared[index].time_us),
                before.energy_mj + max(0.0, part_costs[index].energy_mj - shared[index].energy_mj),
            )
    return extra


def _tasks(
    kernels: Sequence[FusedKernel],
    off_dla: frozenset[str],
    prices: Mapping[Processor, Sequence[NodeCost]],
    costs: CostModel,
) -> Iterable[Task]:
    processors, generation = tuple(prices), costs.board.dla
    for index, kernel in enumerate(kernels):
        stays = any(v.name in off_dla for v in kernel.nodes)
        node_costs = {p: prices[p][index] for p in (processors[:1] if stays else processors)}
        yield _task(kernel, node_costs, _stored(kernel, costs.precision, generation))


def _stored(kernel: FusedKernel, precision: Precision, generation: Generation | None) -> int:
    """Return the bytes of a kernel's constants in a loadable; 0 on a board without a DLA."""
    if generation is None:
        return 0
    return sum(stored_bytes(view, precision, generation) for view in kernel.nodes)


def _task(kernel: FusedKernel, node_costs: Mapping[Processor, NodeCost], stored: int) -> Task:
    return Task(
        name=kernel.head.name,
        time_us={p: cost.time_us for p, cost in node_costs.items()},
        energy_mj={p: cost.energy_mj for p, cost in node_costs.items()},
        memory_gbps={p: cost.bandwidth_gbps for p, cost in node_costs.items()},
        weight_bytes=stored,
        lane=_batch_lane(kernel.nodes[0]),
    )


def _batch_lane(view: NodeView) -> str:
    """The batch size, which the layers of one loadable share (rule G7)."""
    shape = view.outputs[0].shape if view.outputs else None
    return str(shape[0]) if shape else ""


def _flows(
    views: Sequence[NodeView],
    task_of: Mapping[str, str],
    outputs: frozenset[str] | None,
    costs: CostModel,
    *,
    extra: Mapping[str, CrossingCost],
) -> Iterable[Flow]:
    """Yield the tensors between tasks, and those at the graph's ends.

    `outputs` None: inputs and outputs lie where everything runs, and pass nowhere.
    """
    readers: dict[str, list[str]] = {}
    for view in views:
        for name in view.reads:
            readers.setdefault(name, []).append(task_of[view.name])
    producer_of: dict[str, str] = {t.name: task_of[v.name] for v in views for t in v.outputs}
    tensors: dict[str, TensorView] = {
        t.name: t for v in views for t in (*v.activations, *v.outputs)
    }
    for name, tensor in tensors.items():
        source = producer_of.get(name)
        targets = tuple(dict.fromkeys(t for t in readers.get(name, ()) if t != source))
        leaves = outputs is not None and name in outputs
        if (source is None and outputs is None) or not (targets or leaves):
            continue
        size = tensor_bytes(tensor, costs.precision) or 0
        crossings = {d: costs.crossing(size, *ends) for d, ends in _DIRECTIONS.items()}
        if name in extra:
            crossing, more = crossings["to_gpu"], extra[name]
            crossings["to_gpu"] = CrossingCost(
                crossing.time_us + more.time_us, crossing.energy_mj + more.energy_mj
            )
        yield Flow(
            name=name,
            source=source,
            targets=targets,
            bytes=size,
            crossing_us={d: c.time_us for d, c in crossings.items()},
            crossing_mj={d: c.energy_mj for d, c in crossings.items()},
            output=leaves,
        )


def problem_of(
    networks: Sequence[Network],
    costs: CostModel,
    processors: Sequence[Processor],
    limits: Limits,
    *,
    alternate_dlas: bool = False,
) -> Problem:
    """Return the problem of networks that share a board."""
    return Problem(
        networks=tuple(networks),
        processors=tuple(processors),
        crossing_on="gpu" if "gpu" in processors else None,
        limits=limits,
        alternate_dlas=alternate_dlas,
        segment_us={p: costs.segment_overhead_us(p) for p in processors},
        segment_mj={p: costs.segment_overhead_mj(p) for p in processors},
        contention=SharedMemory(costs),
        idle_w=costs.idle_w,
    )
