"""The clocks of every DLA layer of a plan, and what bounds it.

They are those that the plan's times rest on (`toolkit.partition.costs.dla`): the cycle model's
sequence of the array, output stage and bytes, at the rates of the board with the fitted shares.
What a layer takes to start is a time of its own and not among them.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.dla.cycles.configurations import Precision
from toolkit.dla.cycles.estimate import estimate
from toolkit.dla.cycles.layers import LayerError
from toolkit.dla.cycles.result import Bound
from toolkit.dla.cycles.sources import Source, source_of
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.constants import load_costs
from toolkit.partition.costs.dla import configuration, layer_of
from toolkit.partition.costs.fusion import FusedKernel, fuse
from toolkit.partition.costs.model import CostModel, dla_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCycles:
    """Clocks of one layer for one frame: `nodes` are fused into it, `bound_by` limits it.

    `total` is the largest of array, output stage and memory.
    """

    nodes: tuple[str, ...]
    op: str
    segment: str
    array: float
    output_stage: float
    memory: float
    total: float
    bound_by: Bound
    macs: int
    bytes_read: int
    bytes_written: int
    mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCycles:
    """Clocks of all layers; `uncounted`: nodes outside the cycle model; `source`: of the rates."""

    layers: tuple[LayerCycles, ...]
    uncounted: tuple[str, ...]
    clock_mhz: float
    source: Source

    @property
    def total(self) -> float:
        """Clocks of all layers, one after another."""
        return sum(layer.total for layer in self.layers)


def cycles_of(
    segments: Sequence[PlannedSegment], nodes: Sequence[NodeView], costs: CostModel
) -> PlanCycles | None:
    """Return the clocks of the DLA segments of a plan; None without DLA segments."""
    board = costs.board
    on_dla = [segment for segment in segments if segment.processor.startswith("dla")]
    if not on_dla or board.dla is None:
        return None
    views = {view.name: view for view in nodes}
    layers: list[LayerCycles] = []
    uncounted: list[str] = []
    for segment in on_dla:
        members = [views[name] for name in segment.nodes]
        for index, kernel in enumerate(fuse(members)):
            layer = _layer(kernel, segment.name, costs, first=index == 0)
            if layer is not None:
                layers.append(layer)
            elif kernel.kind != "free":
                uncounted += [view.name for view in kernel.nodes]
    name = "xavier" if board.dla == "v1" else "orin"
    return PlanCycles(
        layers=tuple(layers),
        uncounted=tuple(uncounted),
        clock_mhz=board.dla_mhz,
        source=source_of(name, "atomic_c"),
    )


def _layer(
    kernel: FusedKernel, segment: str, costs: CostModel, *, first: bool
) -> LayerCycles | None:
    board = costs.board
    constants = load_costs()
    assert board.dla is not None  # the caller has DLA segments
    config, count = configuration(board.dla, round(constants.dla.arrays.value))
    parameters = dla_parameters(constants)
    precision: Precision = "int8" if costs.precision == "int8" else "fp16"
    v2 = board.dla == "v2"
    per_clock = board.bandwidth * parameters.bandwidth_share[1 if v2 else 0] / board.dla_mhz
    try:
        layer = None if kernel.kind == "free" else layer_of(kernel, precision, first=first)
        cycles = None if layer is None else estimate(layer, config, bytes_per_clock=per_clock)
    except LayerError:  # shapes that the model does not take
        return None
    if cycles is None:
        return None
    share = parameters.fp16_share if v2 and precision == "fp16" else 1.0
    arrays = count if kernel.kind == "matrix" else 1
    array = cycles.mac / arrays / (parameters.array_efficiency * share)
    moved = cycles.bytes_read + cycles.bytes_written
    memory, once = moved / per_clock, (moved - cycles.bytes_refetched) / per_clock
    compute = max(array, cycles.output_stage)
    bound: Bound = "MACs" if cycles.weights <= cycles.data else "weights streaming"
    if memory > compute:
        bound = "memory" if once > compute else "buffer"
    elif cycles.output_stage > array:
        bound = "output stage"
    return LayerCycles(
        nodes=tuple(view.name for view in kernel.nodes),
        op=kernel.head.op,
        segment=segment,
        array=array,
        output_stage=cycles.output_stage,
        memory=memory,
        total=max(compute, memory),
        bound_by=bound,
        macs=cycles.macs,
        bytes_read=cycles.bytes_read,
        bytes_written=cycles.bytes_written,
        mode=cycles.mode,
    )


def cycles_builtins(cycles: PlanCycles | None) -> dict[str, Any] | None:
    """Return the clocks as JSON values."""
    return None if cycles is None else {**asdict(cycles), "total": cycles.total}


def render_cycles(cycles: PlanCycles | None) -> str:
    """Return a table of all layers, with totals."""
    if cycles is None:
        return "cycles: no node is on the DLA"
    lines = [
        f"cycles of the DLA at {cycles.clock_mhz:g} MHz, a frame "
        f"({cycles.source.certainty}: {cycles.source.text})",
        f"{'array':>10} {'output':>10} {'memory':>10} {'total':>10}  bound by           layer",
    ]
    for layer in cycles.layers:
        counts = (layer.array, layer.output_stage, layer.memory, layer.total)
        figures = " ".join(f"{count:>10.0f}" for count in counts)
        more = f" and {len(layer.nodes) - 1} more" if len(layer.nodes) > 1 else ""
        lines.append(f"{figures}  {layer.bound_by:<17}  {layer.nodes[0]} ({layer.op}){more}")
    totals = [
        sum(layer.array for layer in cycles.layers),
        sum(layer.output_stage for layer in cycles.layers),
        sum(layer.memory for layer in cycles.layers),
        cycles.total,
    ]
    figures = " ".join(f"{count:>10.0f}" for count in totals)
    lines.append(f"{figures}  all {len(cycles.layers)} layers")
    if cycles.uncounted:
        lines.append(f"not in the cycle model: {', '.join(cycles.uncounted)}")
    return "\n".join(lines)
