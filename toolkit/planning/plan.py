"""The plan of a model on a profile: placements, segments, crossings and predicted times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from device.manifest import Crossing, NodePlacement, Precision, Processor
from device.profile import Profile
from toolkit.errors import PlanError
from toolkit.planning.costs import crossing_us, predicted_us, tensor_bytes
from toolkit.planning.node_view import NodeView, views
from toolkit.planning.placement import Placement, place, steps_of
from toolkit.planning.segments import PlannedSegment, cut, find_crossings


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """What a segment holds and takes; `macs` leaves out nodes of unknown shape."""

    segment: str
    nodes: int
    macs: int
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nodes that one rule keeps off the DLA; `reason` is that of the first of them."""

    rule: str
    reason: str
    same_reason: bool
    hint: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every node runs and why, how the graph is cut, and what it is predicted to take.

    `placements` are in running order. `latency_us` has one row per processor that is used; the
    total adds the crossings, segments running one after the other. `gpu_only_us` is the same graph
    without the DLA, None on a profile without a GPU.
    """

    profile: str
    precision: Precision
    tensorrt: str | None
    placements: tuple[NodePlacement, ...]
    segments: tuple[PlannedSegment, ...]
    costs: tuple[SegmentCost, ...]
    crossings: tuple[Crossing, ...]
    refusals: tuple[Refusal, ...]
    latency_us: tuple[tuple[Processor, float], ...]
    crossings_us: float
    gpu_only_us: float | None

    @property
    def total_us(self) -> float:
        """The predicted time of one inference in microseconds."""
        return sum(time for _, time in self.latency_us) + self.crossings_us


def make_plan(
    model: ir.Model,
    profile: Profile,
    *,
    precision: Precision,
    tensorrt: str | None = None,
    has_scale: Callable[[str], bool],
    keep_float: frozenset[str] = frozenset(),
) -> Plan:
    """Return the plan of a model that has gone through the passes.

    `tensorrt` None takes the version of the last JetPack for the profile's DLA. `has_scale` says
    whether the calibration table holds a tensor; `keep_float` names nodes that stay in floating
    point. A dynamic batch keeps its nodes off the DLA (rule
    G5) and counts as 1 in times and sizes.

    Raises PlanError: the model has no nodes, or nodes without distinct names.
    """
    nodes = _named_views(model.graph)
    placed = place(nodes, profile, precision, tensorrt, has_scale, keep_float=keep_float)
    steps = steps_of(nodes, [placement.processor for placement in placed])
    segments = cut(steps)
    sizes = {t.name: tensor_bytes(t, precision) for view in nodes for t in view.outputs}
    crossings = find_crossings(segments, steps, sizes.__getitem__)
    costs = _costs(segments, nodes, placed)
    return Plan(
        profile=profile.name,
        precision=precision,
        tensorrt=tensorrt,
        placements=_rows(segments, placed),
        segments=segments,
        costs=costs,
        crossings=crossings,
        refusals=_refusals(placed),
        latency_us=_latency(segments, costs),
        crossings_us=_crossings_us(crossings, profile),
        gpu_only_us=_gpu_only_us(nodes, profile, precision),
    )


def _named_views(graph: ir.Graph) -> tuple[NodeView, ...]:
    nodes = views(graph)
    names = [view.name for view in nodes]
    if not nodes or "" in names or len(set(names)) < len(names):
        raise PlanError(
            "The graph needs at least one node and a distinct name for every node; "
            "import the model with import_model first."
        )
    return nodes


def _gpu_only_us(nodes: Sequence[NodeView], profile: Profile, precision: Precision) -> float | None:
    if profile.gpu is None:
        return None
    return sum(predicted_us(view, "gpu", profile, precision) for view in nodes)


def _rows(
    segments: Sequence[PlannedSegment], placed: Sequence[Placement]
) -> tuple[NodePlacement, ...]:
    by_name = {placement.node: placement for placement in placed}
    return tuple(
        NodePlacement(
            node=name,
            op=by_name[name].op,
            processor=segment.processor,
            segment=segment.name,
            rule=by_name[name].rule,
            reason=by_name[name].reason,
            predicted_us=round(by_name[name].predicted_us, 3),
        )
        for segment in segments
        for name in segment.nodes
    )


def _costs(
    segments: Sequence[PlannedSegment], nodes: Sequence[NodeView], placed: Sequence[Placement]
) -> tuple[SegmentCost, ...]:
    macs = {view.name: view.macs or 0 for view in nodes}
    times = {placement.node: placement.predicted_us for placement in placed}
    return tuple(
        SegmentCost(
            segment=segment.name,
            nodes=len(segment.nodes),
            macs=sum(macs[name] for name in segment.nodes),
            predicted_us=sum(times[name] for name in segment.nodes),
        )
        for segment in segments
    )


def _latency(
    segments: Sequence[PlannedSegment], costs: Sequence[SegmentCost]
) -> tuple[tuple[Processor, float], ...]:
    totals: dict[Processor, float] = {}
    for segment, cost in zip(segments, costs, strict=True):
        totals[segment.processor] = totals.get(segment.processor, 0.0) + cost.predicted_us
    return tuple(sorted(totals.items()))


def _crossings_us(crossings: Sequence[Crossing], profile: Profile) -> float:
    """Sum the crossings; tensors that pass between the same two segments pass together."""
    passing: dict[tuple[str, str], int] = {}
    for crossing in crossings:
        for target in crossing.targets:
            pair = (crossing.source, target)
            passing[pair] = passing.get(pair, 0) + (crossing.bytes or 0)
    return sum(crossing_us(size, profile) for size in passing.values())


def _refusals(placed: Sequence[Placement]) -> tuple[Refusal, ...]:
    """Group the nodes that are not on the DLA by rule and hint (and operator, where it decides)."""
    groups: dict[tuple[str, str, str], list[Placement]] = {}
    for placement in placed:
        if not placement.processor.startswith("dla"):
            op = placement.op if placement.rule.startswith("op.") else ""
            groups.setdefault((placement.rule, placement.hint, op), []).append(placement)
    return tuple(
        Refusal(
            rule=rule,
            reason=members[0].reason,
            same_reason=len({member.reason for member in members}) == 1,
            hint=hint,
            nodes=tuple(member.node for member in members),
        )
        for (rule, hint, _), members in groups.items()
    )
