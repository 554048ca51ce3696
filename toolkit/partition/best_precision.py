"""INT8 of a GPU where it saves time, and with `--precision best` where it costs little accuracy.

A node stays in floating point

1. where INT8 saves no time: its kernel, with the conversions that its INT8 takes, saves less than
   MIN_GAIN of its time in FP16 (`toolkit.partition.solver.precisions`). `--precision int8` leaves
   this out. Nodes on a DLA stay INT8, which it is made for;
2. with "best", where the budget asks for it (`calibration.budget`); by default the noise of INT8
   may have 1 % of the power of the signal at every output.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec
import onnx_ir as ir

from calibration.budget import Budget, BudgetResult
from device.engine.manifest import Precision
from device.profile import Profile
from toolkit.graph.node_view import TensorView, views
from toolkit.partition.costs.measured import Measured, measured_in_both
from toolkit.partition.solver.precisions import (
    Island,
    KernelTimes,
    StoredTensor,
    choose_int8,
    islands_in_half,
)
from toolkit.quantize.gpu_operands import DATA_MOVEMENT, operands_on_gpu, tied_on_gpu
from toolkit.quantize.quantize import int8_nodes
from toolkit.quantize.ranges.measure import RangeOptions

if TYPE_CHECKING:
    from toolkit.partition.costs.model import Bound, CostModel

# Of a kernel's time in FP16; the cost model is fitted to whole networks and knows no smaller gain.
MIN_GAIN = 0.02
DEFAULT_BUDGET = Budget("sqnr", "least", 20.0)
_SOURCES = {
    (True, False): "measured",
    (False, True): "predicted",
    (True, True): "in part measured, in part predicted",
}
"""Where times come from: whether any are measured, and whether any are predicted."""


@dataclass(frozen=True, slots=True)
class GpuNodes:
    """The nodes of a graph that kernels of a GPU compute, and what may be INT8 there.

    `on_gpu`: by name; `keep_float`: those in floating point for other reasons; `ranges`: the
    tensors that have one, None: all. `times`: of nodes, measured on a board.
    """

    on_gpu: Collection[str]
    keep_float: frozenset[str] = frozenset()
    ranges: Collection[str] | None = None
    times: tuple[Measured, ...] = ()


def no_gain_nodes(
    model: ir.Model,
    nodes: GpuNodes,
    profile: Profile,
    power_mode: str | None,
    precision: Literal["INT8", "FP8"] = "INT8",
) -> dict[str, str]:
    """Return the nodes for which INT8 saves no time on the GPU, with the times.

    `precision`: what the reasons call it. FP8 has the rates and the bytes of INT8.

    Raises ProfileError: the board has no such power mode; ConfigError: times of another board.
    """
    if profile.gpu is None:
        return {}
    costs = gpu_costs(model, profile, power_mode, nodes.times)
    graph = _Graph(model, nodes, costs)
    kernels, tensors = graph.kernels(), tuple(graph.tensors())
    in_int8 = choose_int8(kernels, tensors, MIN_GAIN)
    return {
        node: _reason(
            precision, island, {costs.int8.node(name, "gpu").bound_by for name in island.kernels}
        )
        for island in islands_in_half(kernels, tensors, in_int8)
        for kernel in island.kernels
        for node in graph.candidates[kernel]
    }


def int8_on_gpu(model: ir.Model, nodes: GpuNodes) -> frozenset[str]:
    """Return the nodes on the GPU that read an operand in INT8, or hand INT8 on."""
    operands = operands_on_gpu(model, nodes.on_gpu, nodes.keep_float, nodes.ranges)
    tied = tied_on_gpu(model, nodes.on_gpu, nodes.keep_float)
    return frozenset(
        name
        for node, _ in int8_nodes(model, nodes.keep_float)
        if operands.get(name := str(node.name)) or (node.op_type == "Concat" and name in tied)
    )


def no_gain_of_float8(
    model: ir.Model, products: Collection[str], profile: Profile, power_mode: str | None
) -> dict[str, str]:
    """Return those of `products` for which FP8 saves no time on the GPU, with the times.

    Raises ProfileError: the board has no such power mode.
    """
    others = frozenset(str(node.name) for node, _ in int8_nodes(model)) - frozenset(products)
    nodes = GpuNodes([str(node.name) for node in model.graph], keep_float=others)
    return no_gain_nodes(model, nodes, profile, power_mode, "FP8")


def _reason(precision: str, island: Island, bounds: "set[Bound]") -> str:
    count = len(island.kernels)
    together = f" of {count} kernels together" if count > 1 else ""
    less = island.int8_us + island.conversions_us < island.half_us
    gain = f"less than {MIN_GAIN:.0%}".replace("%", " %") if less else "nothing"
    return (
        f"{precision}{together} saves {gain}: {island.int8_us:.1f} us and "
        f"{island.conversions_us:.1f} us to convert, FP16 {island.half_us:.1f} us "
        f"{_SOURCES['measured' in bounds, bounds != {'measured'}]}"
    )


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """What each node costs on a GPU in both precisions."""

    int8: "CostModel"
    half: "CostModel"


def gpu_costs(
    model: ir.Model, profile: Profile, power_mode: str | None, times: tuple[Measured, ...]
) -> GpuCosts:
    """Return the costs in both precisions, with times that are measured in both.

    Raises ProfileError: the board has no such power mode; ConfigError: times of another board.
    """
    from toolkit.partition.costs.model import CostModel

    rows, both = views(model.graph), _in_both(times, {str(node.name) for node in model.graph})

    def costs(precision: Precision) -> "CostModel":
        return CostModel(
            rows,
            profile,
            precision=precision,
            power_mode=power_mode,
            measured=both.get(precision),
        )

    return GpuCosts(costs("int8"), costs("fp16"))


def _in_both(times: tuple[Measured, ...], known: set[str]) -> dict[Precision, Measured]:
    """Return the times on the GPU of nodes that are measured in INT8 and in FP16, by precision.

    A measured time beside a predicted one would compare the board with the model's error.
    """
    by_precision = {row.precision: row for row in times}
    if not {"int8", "fp16"} <= by_precision.keys():
        return {}
    int8, half = by_precision["int8"], by_precision["fp16"]
    both = frozenset[str]().union(
        *(group for group in measured_in_both(int8, half) if group <= known)
    )
    return {
        row.precision: msgspec.structs.replace(
            row,
            times=tuple(t for t in row.times if t.processor == "gpu" and both.issuperset(t.nodes)),
        )
        for row in (int8, half)
    }


class _Graph:
    """Kernels that may be INT8, and the tensors between them."""

    def __init__(self, model: ir.Model, nodes: GpuNodes, costs: GpuCosts) -> None:
        self._model, self._costs = model, costs
        self._on_gpu = frozenset(nodes.on_gpu)
        self._kernel_of = {name: kernel[0] for kernel in costs.int8.kernels for name in kernel}
        self._operands = operands_on_gpu(model, self._on_gpu, nodes.keep_float, nodes.ranges)
        in_int8 = int8_on_gpu(model, nodes)
        self.candidates: dict[str, list[str]] = {}
        for node in model.graph:
            name = str(node.name)
            if name in in_int8:
                self.candidates.setdefault(self._kernel_of[name], []).append(name)
        self._concats = {name for name in in_int8 if not self._operands.get(name)}

    def kernels(self) -> tuple[KernelTimes, ...]:
        """Return the times of the kernels with a node that may be INT8, by their first node."""
        int8, half = (
            {kernel[0]: sum(costs.node(name, "gpu").time_us for name in kernel)
             for kernel in costs.kernels}
            for costs in (self._costs.int8, self._costs.half)
        )  # fmt: skip
        return tuple(KernelTimes(name, int8[name], half[name]) for name in self.candidates)

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield what kernels hand on to each other; what data movement makes is its source's."""
        known = {
            tensor.name: tensor
            for row in views(self._model.graph)
            for tensor in (*row.inputs, *row.outputs)
            if tensor is not None
        }
        results = [
            value
            for node in self._model.graph
            if not _moves(node)
            for value in node.outputs
            if str(node.name) in self._on_gpu
        ]
        for value in (*self._model.graph.inputs, *results):
            tensor = known.get(str(value.name))
            if tensor is not None and tensor.is_float:
                yield self._stored(value, tensor)

    def _stored(self, value: ir.Value, tensor: TensorView) -> StoredTensor:
        producer = value.producer()
        maker = "" if producer is None else self._kernel_of[str(producer.name)]
        readers, half_read = self._readers(value, maker)
        narrow, wide = (costs.pass_us(tensor) for costs in (self._costs.int8, self._costs.half))
        chosen = maker if maker in self.candidates else ""
        slow = chosen and self._costs.int8.node(chosen, "gpu").bound_by == "memory"
        return StoredTensor(
            chosen, readers, half_read, (narrow + wide) / 2, (wide - narrow) / 2 if slow else 0.0
        )

    def _readers(self, value: ir.Value, maker: str) -> tuple[frozenset[str], bool]:
        """Return the kernels that may read a value in INT8, and whether others read it, too."""
        readers, half_read = set[str](), value.is_graph_output()
        for use in value.uses():
            name = str(use.node.name)
            kernel = self._kernel_of.get(name, "")
            if name not in self._on_gpu or kernel == maker:
                continue
            if use.idx in self._operands.get(name, ()) or name in self._concats:
                if kernel in self.candidates:  # others, as the Mul of a gate, read either type
                    readers.add(kernel)
            elif _moves(use.node) and use.idx == 0:
                for moved in use.node.outputs:
                    more, in_half = self._readers(moved, maker)
                    readers |= more
                    half_read |= in_half
            else:
                half_read = True
        return frozenset(readers), half_read


def _moves(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in DATA_MOVEMENT


def best_options(options: RangeOptions, graph: ir.Model) -> RangeOptions:
    """Return the options with a budget for the nodes that are INT8, if there are any."""
    quantizes = bool(int8_nodes(graph, frozenset(options.keep_float)))
    return replace(options, budget=(options.budget or DEFAULT_BUDGET) if quantizes else None)


def kept_nodes(
    keep_float: tuple[str, ...], reasons: Mapping[str, str], budget: BudgetResult | None
) -> dict[str, str]:
    """Return the reason for each node that stays in floating point."""
    costs = {row.node: row.cost for row in budget.costs} if budget is not None else {}
    spent = budget.keep_float if budget is not None else frozenset()

    def reason(node: str) -> str:
        if node in spent:
            return f"the budget: INT8 of it alone costs {costs.get(node, float('nan')):.3g}"
        return reasons.get(node, "as asked")

    return {node: reason(node) for node in keep_float}
