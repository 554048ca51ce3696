"""Size and predicted cost of the segments of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Crossing, Processor
from toolkit.graph.node_view import NodeView
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.planning.placement import Candidate, Placed


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """Size and cost of a segment; `macs` leaves out nodes of unknown shape.

    `crossings` counts the tensors that pass to or from another processor, `crossing_bytes` what
    they hold, where that is known. `bodies`: nodes (If, Loop, Scan) whose time and energy leave
    out what they run inside.
    """

    segment: str
    nodes: int
    macs: int
    predicted_us: float
    energy_mj: float
    crossings: int
    crossing_bytes: int
    bodies: tuple[str, ...] = ()


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
    costs: tuple[Mapping[str, float], Mapping[str, float]],
    segment_us: Mapping[Processor, float],
) -> tuple[SegmentCost, ...]:
    """Return a row for each segment; `costs`: times and energies as `kernel_costs` returns them."""
    times, energies = costs
    macs = {view.name: view.macs or 0 for view in nodes}
    with_body = {view.name for view in nodes if view.has_subgraph}
    rows = []
    for segment in segments:
        start_us = segment_us.get(segment.processor, 0.0)
        passed = [c for c in crossings if segment.name in (c.source, *c.targets)]
        rows.append(
            SegmentCost(
                segment=segment.name,
                nodes=len(segment.nodes),
                macs=sum(macs[name] for name in segment.nodes),
                predicted_us=start_us + sum(times.get(name, 0.0) for name in segment.nodes),
                energy_mj=sum(energies.get(name, 0.0) for name in segment.nodes),
                crossings=len(passed),
                crossing_bytes=sum(crossing.bytes or 0 for crossing in passed),
                bodies=tuple(name for name in segment.nodes if name in with_body),
            )
        )
    return tuple(rows)
