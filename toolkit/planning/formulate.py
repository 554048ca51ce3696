"""The graph, what the rules allow and what the board costs -> a placement problem's network.

A task is a kernel: nodes that run as one. Where rules allow only some of its nodes on the DLA, the
kernel falls apart into those that may go there and those that may not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from device.manifest import Precision, Processor
from toolkit.costs.bytes import tensor_bytes
from toolkit.costs.fusion import Kernel, alone, fuse
from toolkit.costs.model import CostModel, NodeCost
from toolkit.node_view import NodeView, TensorView
from toolkit.scheduling.problem import Direction, Flow, Limits, Network, Problem, Task

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
    graph's own. The first of `processors` takes every node.
    """
    off_dla = frozenset(refused)
    kernels = _in_order(_kernels(views, off_dla))
    home = {v.name: kernel.head.name for kernel in kernels for v in kernel.nodes}
    tasks = _tasks(kernels, off_dla, costs, processors)
    flows = tuple(_flows(views, home, frozenset(outputs), costs))
    nodes = {kernel.head.name: kernel.nodes for kernel in kernels}
    return Formulated(Network(name, tasks, flows, rate_hz), nodes)


def _kernels(views: Sequence[NodeView], off_dla: frozenset[str]) -> list[Kernel]:
    """Fuse the nodes; a kernel that the rules part is fused again, part by part."""
    kernels = []
    for kernel in fuse(views):
        sides = [[v for v in kernel.nodes if (v.name in off_dla) == side] for side in (False, True)]
        parts = [side for side in sides if side]
        kernels += [kernel] if len(parts) == 1 else [k for part in parts for k in fuse(part)]
    return kernels


def _in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Sort kernels so that each follows those it reads; a cycle of kernels falls apart."""
    while True:
        maker = {t.name: i for i, k in enumerate(kernels) for v in k.nodes for t in v.outputs}
        needs = {
            index: {
                maker[name]
                for v in kernel.nodes
                for name in v.reads
                if name in maker and maker[name] != index
            }
            for index, kernel in enumerate(kernels)
        }
        sorter = TopologicalSorter(needs)
        try:
            sorter.prepare()
        except CycleError as err:
            torn = set(err.args[1])
            kernels = [
                part
                for index, kernel in enumerate(kernels)
                for part in ([alone(v) for v in kernel.nodes] if index in torn else [kernel])
            ]
            continue
        order: list[int] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready())
            order += ready
            sorter.done(*ready)
        return [kernels[index] for index in order]


def _tasks(
    kernels: Sequence[Kernel],
    off_dla: frozenset[str],
    costs: CostModel,
    processors: Sequence[Processor],
) -> tuple[Task, ...]:
    prices = {processor: costs.price(kernels, processor) for processor in processors}
    tasks = []
    for index, kernel in enumerate(kernels):
        stays = any(v.name in off_dla for v in kernel.nodes)
        found = {p: prices[p][index] for p in (processors[:1] if stays else processors)}
        tasks.append(_task(kernel, found, costs.precision))
    return tuple(tasks)


def _task(kernel: Kernel, found: Mapping[Processor, NodeCost], precision: Precision) -> Task:
    return Task(
        name=kernel.head.name,
        time_us={p: cost.time_us for p, cost in found.items()},
        energy_mj={p: cost.energy_mj for p, cost in found.items()},
        memory_gbps={p: cost.bandwidth_gbps for p, cost in found.items()},
        weight_bytes=sum(tensor_bytes(t, precision) or 0 for t in kernel.constants),
        lane=_batch_lane(kernel.nodes[0]),
    )


def _batch_lane(view: NodeView) -> str:
    """The batch size, which the layers of one loadable share (rule G7)."""
    shape = view.outputs[0].shape if view.outputs else None
    return str(shape[0]) if shape else ""


def _flows(
    views: Sequence[NodeView],
    home: Mapping[str, str],
    outputs: frozenset[str],
    costs: CostModel,
) -> Iterable[Flow]:
    readers: dict[str, list[str]] = {}
    for view in views:
        for name in view.reads:
            readers.setdefault(name, []).append(home[view.name])
    made: dict[str, str] = {t.name: home[v.name] for v in views for t in v.outputs}
    tensors: dict[str, TensorView] = {
        t.name: t for v in views for t in (*v.activations, *v.outputs)
    }
    for name, tensor in tensors.items():
        source = made.get(name)
        targets = tuple(dict.fromkeys(t for t in readers.get(name, ()) if t != source))
        if not targets and name not in outputs:
            continue
        size = tensor_bytes(tensor, costs.precision) or 0
        crossings = {d: costs.crossing(size, *ends) for d, ends in _DIRECTIONS.items()}
        yield Flow(
            name=name,
            source=source,
            targets=targets,
            bytes=size,
            crossing_us={d: c.time_us for d, c in crossings.items()},
            crossing_mj={d: c.energy_mj for d, c in crossings.items()},
            output=name in outputs,
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
        contention=SharedMemory(costs),
    )
