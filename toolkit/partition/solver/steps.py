"""All ways in which one network can run on the GPU and a DLA core of its own, as a graph of steps.

A node says which tasks are done, where the tensors are that are still needed, and which processor
ran last. A step runs one task; a tensor crosses in the step that first needs it.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from device.engine.manifest import Processor
from toolkit.partition.solver.problem import Network, Problem, crossing_cost

MOST_NODES = 40_000  # about two seconds
MOST_WAYS = 256  # from a node


Crossing = tuple[int, float]  # the number of a tensor, and its time in us


class Step(NamedTuple):
    """A delay of the network alone (DLA, crossings), then time on the GPU.

    `task` and `processor` None: the outputs cross, at the end. Times are in us.
    """

    alone_us: float  # with the crossings
    gpu_us: float
    to: int
    task: int | None
    processor: Processor | None
    wait_us: float  # of the crossings
    crossings: tuple[Crossing, ...]


class _Tensor(NamedTuple):
    flow: int
    on_dla: bool
    crossed: bool


class _Node(NamedTuple):
    done: int  # bits of tasks; -1 is the end, with the outputs in GPU memory
    tensors: tuple[_Tensor, ...]
    on_dla: bool


_END = _Node(-1, (), on_dla=False)


class Rest(NamedTuple):
    """Ways to the end, by increasing time of the GPU: that time, and minus the whole time, us."""

    gpu_us: "array[float]"
    minus_us: "array[float]"


@dataclass(frozen=True, slots=True)
class StepGraph:
    """Steps from each node; node 0 is the start. `rank` grows by one with every step.

    `early`: at each node, the tensors that have not crossed and are still needed.
    """

    steps: list[list[Step]]
    early: list[tuple[Crossing, ...]]
    rank: list[int]
    end: int

    @property
    def nodes(self) -> list[int]:
        """All nodes in an order in which every step leads forward."""
        return sorted(range(len(self.steps)), key=self.rank.__getitem__)

    def rests(self) -> list[Rest]:
        """Return, from each node to the end, the ways of which none is better in both times."""
        rests: list[Rest] = [Rest(array("d"), array("d"))] * len(self.steps)
        rests[self.end] = Rest(array("d", [0.0]), array("d", [0.0]))
        for node in reversed(self.nodes):
            ways = sorted(
                (gpu + on_gpu, alone + on_gpu - minus_us)
                for alone, on_gpu, to, *_ in self.steps[node]
                for gpu, minus_us in zip(*rests[to], strict=True)
            )
            if node != self.end:
                rests[node] = _best(ways)
        return rests


def _best(ways: list[tuple[float, float]]) -> Rest:
    """Return the best of ways, sorted by time of the GPU and time; of too many, a better few."""
    best: list[tuple[float, float]] = []
    for gpu, time in ways:
        if not best or time < best[-1][1]:
            best.append((gpu, time))
    size = -(-len(best) // MOST_WAYS) or 1  # of groups, each as fast as its best in both times
    return Rest(
        array("d", [gpu for gpu, _ in best[::size]]),
        array("d", [-best[min(i + size, len(best)) - 1][1] for i in range(0, len(best), size)]),
    )


def step_graph(problem: Problem, network: Network, core: Processor) -> StepGraph | None:
    """Return the graph of a network whose own core is `core`; None if it is too large."""
    return _Steps(problem, network, core).graph()


class _Steps:
    """The nodes of a network by what they stand for."""

    def __init__(self, problem: Problem, network: Network, core: Processor) -> None:
        index = {task.name: i for i, task in enumerate(network.tasks)}
        self._core, self._start_us = core, problem.segment_us.get(core, 0.0)
        self._parents = [sum(1 << p for p in parents) for parents in network.graph.parents]
        self._full = (1 << len(network.tasks)) - 1
        self._gpu_us = [task.time_us.get("gpu") for task in network.tasks]
        self._dla_us = [task.time_us.get(core) for task in network.tasks]
        self._readers = [sum(1 << index[name] for name in set(f.targets)) for f in network.flows]
        self._output = [flow.output for flow in network.flows]
        self._cross = [
            tuple(crossing_cost(f.crossing_us, d) for d in ("to_dla", "to_gpu"))
            for f in network.flows
        ]
        self._makes: list[list[int]] = [[] for _ in network.tasks]
        inputs = []
        for number, flow in enumerate(network.flows):
            if flow.source is None:
                inputs.append(_Tensor(number, on_dla=False, crossed=False))
            else:
                self._makes[index[flow.source]].append(number)
        self._first = _Node(0, tuple(t for t in inputs if self._needed(t, 0)), on_dla=False)

    def graph(self) -> StepGraph | None:
        """Return the graph, breadth first."""
        number = {self._first: 0}
        nodes = [self._first]
        steps: list[list[Step]] = []
        while len(steps) < len(nodes):
            row = []
            for node, step in self._after(nodes[len(steps)]):
                if node not in number:
                    number[node] = len(nodes)
                    nodes.append(node)
                row.append(step._replace(to=number[node]))
            steps.append(row)
            if len(nodes) > MOST_NODES:
                return None
        last = self._full.bit_count() + 1
        rank = [last if node == _END else node.done.bit_count() for node in nodes]
        return StepGraph(steps, [self._early(node) for node in nodes], rank, number[_END])

    def _after(self, node: _Node) -> Iterator[tuple[_Node, Step]]:
        if node == _END:
            return
        if node.done == self._full:
            crossings = self._early(node)
            wait = _total(crossings)
            yield _END, Step(wait, 0.0, 0, None, None, wait, crossings)
            return
        for task, parents in enumerate(self._parents):
            if node.done >> task & 1 or parents & node.done != parents:
                continue
            if (on_gpu := self._gpu_us[task]) is not None:
                after, crossings = self._run(node, task, on_dla=False)
                wait = _total(crossings)
                yield after, Step(wait, on_gpu, 0, task, "gpu", wait, crossings)
            if (on_core := self._dla_us[task]) is not None:
                after, crossings = self._run(node, task, on_dla=True)
                start = 0.0 if node.on_dla else self._start_us
                wait = _total(crossings)
                alone = wait + start + on_core
                yield after, Step(alone, 0.0, 0, task, self._core, wait, crossings)

    def _early(self, node: _Node) -> tuple[Crossing, ...]:
        """Return the tensors that could cross before a task on the GPU that does not need it."""
        return tuple(
            (tensor.flow, self._cross[tensor.flow][tensor.on_dla])
            for tensor in node.tensors
            if not tensor.crossed
        )

    def _run(self, node: _Node, task: int, *, on_dla: bool) -> tuple[_Node, tuple[Crossing, ...]]:
        """Return the node after a task, and what crosses first."""
        done = node.done | 1 << task
        tensors, crossings = [], []
        for tensor in node.tensors:
            reads = self._readers[tensor.flow] >> task & 1
            crosses = bool(reads) and tensor.on_dla != on_dla and not tensor.crossed
            if crosses:
                crossings.append((tensor.flow, self._cross[tensor.flow][tensor.on_dla]))
            tensors.append(tensor._replace(crossed=tensor.crossed or crosses))
        tensors += [_Tensor(flow, on_dla, crossed=False) for flow in self._makes[task]]
        needed = tuple(sorted(t for t in tensors if self._needed(t, done)))
        return _Node(done, needed, on_dla), tuple(crossings)

    def _needed(self, tensor: _Tensor, done: int) -> bool:
        leaves = self._output[tensor.flow] and tensor.on_dla and not tensor.crossed
        return bool(self._readers[tensor.flow] & ~done) or leaves


def _total(crossings: tuple[Crossing, ...]) -> float:
    return sum(time for _, time in crossings)
