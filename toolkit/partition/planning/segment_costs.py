"""Size and predicted cost of the segments of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from device.engine.manifest import Crossing, Processor
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.errors import total
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.figures import Bounds, energy_bounds
from toolkit.partition.planning.placement import Candidate, Placed


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Size and cost of a segment; `macs` leaves out nodes of unknown shape.

    `crossings` counts the tensors that pass to or from another processor, `crossing_bytes` what
    they hold, where that is known. `bodies`: nodes (If, Loop, Scan) whose time and energy leave
    out what they run inside. `intervals`: where 80 % of boards and models like these are, by field;
    none on a CPU.
    """

    segment: str
    nodes: int
    macs: int
    predicted_us: float
    energy_mj: float
    crossings: int
    crossing_bytes: int
    bodies: tuple[str, ...] = ()
    intervals: Mapping[str, Bounds] = field(default_factory=dict)


def kernel_costs(candidate: Candidate, placed: Placed) -> tuple[dict[str, float], dict[str, float]]:
    """Return time and energy by node; the first node of a kernel carries the whole cost."""
    processor_of = placed.solution.placement[candidate.name]
    times, energies = {}, {}
    for task in placed.formulated[candidate.name].network.tasks:
        times[task.name] = task.time_us[processor_of[task.name]]
        energies[task.name] = task.energy_mj.get(processor_of[task.name], 0.0)
    return times, energies


def segment_costs(
    segments: Sequence[PlannedSegment],
    nodes: Sequence[NodeView],
    crossings: Sequence[Crossing],
    kernels: tuple[Mapping[str, float], Mapping[str, float]],
    *,
    segment_us: Mapping[Processor, float],
    costs: CostModel,
) -> tuple[SegmentCost, ...]:
    """Return a row for each segment; `kernels`: times and energies by `kernel_costs`."""
    times, energies = kernels
    macs = {view.name: view.macs or 0 for view in nodes}
    with_body = {view.name for view in nodes if view.has_subgraph}
    rows = []
    for segment in segments:
        start_us = segment_us.get(segment.processor, 0.0)
        passed = [c for c in crossings if segment.name in (c.source, *c.targets)]
        time_us = start_us + sum(times.get(name, 0.0) for name in segment.nodes)
        energy_mj = sum(energies.get(name, 0.0) for name in segment.nodes)
        rows.append(
            SegmentCost(
                segment=segment.name,
                nodes=len(segment.nodes),
                macs=sum(macs[name] for name in segment.nodes),
                predicted_us=time_us,
                energy_mj=energy_mj,
                crossings=len(passed),
                crossing_bytes=sum(crossing.bytes or 0 for crossing in passed),
                bodies=tuple(name for name in segment.nodes if name in with_body),
                intervals=_intervals(segment.processor, time_us, energy_mj, costs),
            )
        )
    return tuple(rows)


def _intervals(
    processor: Processor, time_us: float, energy_mj: float, costs: CostModel
) -> dict[str, Bounds]:
    if processor == "cpu" or time_us <= 0:
        return {}
    time = total([(time_us, costs.spread("gpu" if processor == "gpu" else "dla"))])
    return {
        "predicted_us": (time.low, time.high),
        "energy_mj": energy_bounds(energy_mj, time, costs),
    }
