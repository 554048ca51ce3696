"""The plan of one or several models on a profile: placements, segments, costs and reasons."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from device.engine.manifest import Crossing, NodePlacement, Precision, Processor
from device.profile import Profile
from toolkit.dla.legalize.rewrite import Cut
from toolkit.errors import PlanError
from toolkit.graph.node_view import NodeView, views
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.measured import Measured
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.loadables import DlaMemory, limits_of, memory_of
from toolkit.partition.planning.objectives import DEFAULT, goal_named
from toolkit.partition.planning.placement import ALLOWED, Candidate, Placed, place
from toolkit.partition.planning.refusals import refusals
from toolkit.partition.planning.segments import find_crossings
from toolkit.partition.planning.traffic import in_flight, traffic
from toolkit.partition.solver.simulate import NetworkReport, Report

SECONDS = 10.0


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nodes that one rule keeps off the DLA; `reason` is that of the first of them."""

    rule: str
    reason: str
    same_reason: bool
    hint: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """How the placement was found: its value in the goal's terms, and the proof."""

    objective: str
    value: float
    proven: bool
    gap: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan beside the model and the profile.

    `objective`: a row of `toolkit.partition.planning.objectives.GOALS`. `power_mode` None: the
    highest clocks. `max_crossings`: tensors that may pass between processors. `seconds` bound the
    search.
    """

    precision: Precision = "int8"
    tensorrt: str | None = None
    objective: str = DEFAULT
    power_mode: str | None = None
    max_crossings: int | None = None
    seconds: float = SECONDS


@dataclass(frozen=True, slots=True)
class Model:
    """A graph to plan: it has gone through the passes.

    `has_scale` says whether the calibration table holds a tensor; `keep_float` names nodes that
    stay in floating point; `rate_hz`: how often a frame comes, None: as fast as it goes;
    `measured`: times from a board, which go before predicted ones; `cuts`: where heads leave the
    DLA.
    """

    name: str
    graph: ir.Graph
    has_scale: Callable[[str], bool] = field(default=lambda name: True)
    keep_float: frozenset[str] = frozenset()
    rate_hz: float | None = None
    measured: Measured | None = None
    cuts: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of one model with reasons, its segments, and their predicted costs.

    `placements` are in running order. `figures`: this plan first, then all on the GPU, all that may
    on the DLA, and a greedy choice. `simulated`: frames at the rate, or `in_flight` of them under
    way together, with contention for the memory.
    """

    name: str
    profile: str
    precision: Precision
    tensorrt: str | None
    power_mode: str | None
    rate_hz: float | None
    placements: tuple[NodePlacement, ...]
    segments: tuple[PlannedSegment, ...]
    costs: tuple[SegmentCost, ...]
    crossings: tuple[Crossing, ...]
    refusals: tuple[Refusal, ...]
    figures: tuple[Figures, ...]
    search: Search
    memory: DlaMemory | None
    simulated: NetworkReport
    in_flight: int

    @property
    def busy_us(self) -> tuple[tuple[Processor, float], ...]:
        """How long the segments of a frame keep each processor busy, crossings left out."""
        totals: dict[Processor, float] = {}
        for segment, cost in zip(self.segments, self.costs, strict=True):
            totals[segment.processor] = totals.get(segment.processor, 0.0) + cost.predicted_us
        return tuple(sorted(totals.items()))

    @property
    def crossings_us(self) -> float:
        """The predicted time of a frame's crossings in microseconds."""
        return max(0.0, self.total_us - sum(time for _, time in self.busy_us))

    @property
    def total_us(self) -> float:
        """The predicted time of one frame alone in microseconds."""
        return self.figures[0].latency_us


@dataclass(frozen=True)
class SharedPlan:
    """The plans of models that share a board, and the placement problem behind them."""

    plans: tuple[Plan, ...]
    candidates: tuple[Candidate, ...]
    placed: Placed
    simulated: Report


def make_plan(model: Model, profile: Profile, options: PlanOptions | None = None) -> Plan:
    """Return the plan of one model; see `plan_together`."""
    return plan_together((model,), profile, options).plans[0]


def plan_together(
    models: Sequence[Model], profile: Profile, options: PlanOptions | None = None
) -> SharedPlan:
    """Return the plans of models that share a board.

    A dynamic batch keeps its nodes off the DLA (rule G5) and counts as 1 in times and sizes.
    Raises PlanError: a model has no nodes or nodes without distinct names, an option is unknown,
    or nothing keeps the limits and rates.
    """
    options = options or PlanOptions()
    goal = goal_named(options.objective)
    candidates = tuple(_candidate(model, profile, options) for model in models)
    limits = limits_of(profile, options.tensorrt, options.precision, options.max_crossings)
    placed = place(candidates, profile, goal, limits, options.seconds)
    simulated = traffic(placed)
    return SharedPlan(
        plans=tuple(
            _plan(candidate, placed, simulated, profile=profile, options=options)
            for candidate in candidates
        ),
        candidates=candidates,
        placed=placed,
        simulated=simulated,
    )


def _candidate(model: Model, profile: Profile, options: PlanOptions) -> Candidate:
    nodes = _named_views(model)
    return Candidate(
        name=model.name,
        views=nodes,
        costs=CostModel(
            nodes,
            profile,
            precision=options.precision,
            power_mode=options.power_mode,
            measured=model.measured,
        ),
        refused=refusals(
            nodes,
            profile,
            options.precision,
            options.tensorrt,
            has_scale=model.has_scale,
            keep_float=model.keep_float,
            cuts=model.cuts,
        ),
        outputs=tuple(str(value.name) for value in model.graph.outputs),
        rate_hz=model.rate_hz,
    )


def _named_views(model: Model) -> tuple[NodeView, ...]:
    nodes = views(model.graph)
    names = [view.name for view in nodes]
    if not nodes or "" in names or len(set(names)) < len(names):
        raise PlanError(
            f"The graph of {model.name} needs at least one node and a distinct name for every "
            "node; import the model with import_model first."
        )
    return nodes


def _plan(
    candidate: Candidate,
    placed: Placed,
    simulated: Report,
    *,
    profile: Profile,
    options: PlanOptions,
) -> Plan:
    segments, rows = _segments(candidate, placed)
    formulated = placed.formulated[candidate.name]
    sizes = {t.name: tensor_bytes(t, options.precision) for v in candidate.views for t in v.outputs}
    solution = placed.solution
    times, energies = _kernel_costs(candidate, placed)
    crossings = find_crossings(segments, candidate.views, sizes.__getitem__)
    return Plan(
        name=candidate.name,
        profile=profile.name,
        precision=options.precision,
        tensorrt=options.tensorrt,
        power_mode=options.power_mode,
        rate_hz=candidate.rate_hz,
        placements=_placements(candidate, placed, segments, times),
        segments=segments,
        costs=_segment_costs(
            segments, candidate.views, crossings, (times, energies), placed.problem.segment_us
        ),
        crossings=crossings,
        refusals=_refusals(rows, candidate, placed),
        figures=placed.figures[candidate.name],
        search=Search(
            options.objective, solution.value, solution.proven, solution.gap, solution.seconds
        ),
        memory=memory_of(
            profile, placed.problem.limits, formulated.network, segments, formulated.nodes
        ),
        simulated=simulated.of(candidate.name),
        in_flight=in_flight(placed, candidate.name),
    )


def _segments(
    candidate: Candidate, placed: Placed
) -> tuple[tuple[PlannedSegment, ...], dict[str, PlannedSegment]]:
    """Name the segments of the solution and fill in their nodes; also the segment of each node."""
    nodes = placed.formulated[candidate.name].nodes
    counts: dict[Processor, int] = {}
    segments = []
    for solved in placed.solution.segments:
        if solved.network != candidate.name:
            continue
        number = counts.get(solved.processor, 0)
        counts[solved.processor] = number + 1
        members = tuple(view.name for task in solved.tasks for view in nodes[task])
        segments.append(PlannedSegment(f"{solved.processor}.{number}", solved.processor, members))
    return tuple(segments), {node: s for s in segments for node in s.nodes}


def _kernel_costs(
    candidate: Candidate, placed: Placed
) -> tuple[dict[str, float], dict[str, float]]:
    """Return time and energy by node; the first node of a kernel carries the whole cost."""
    processor_of = placed.solution.placement[candidate.name]
    times, energies = {}, {}
    for task in placed.formulated[candidate.name].network.tasks:
        times[task.name] = task.time_us[processor_of[task.name]]
        energies[task.name] = task.energy_mj.get(processor_of[task.name], 0.0)
    return times, energies


def _placements(
    candidate: Candidate,
    placed: Placed,
    segments: Iterable[PlannedSegment],
    times: Mapping[str, float],
) -> tuple[NodePlacement, ...]:
    ops = {view.name: view.op for view in candidate.views}
    rows = []
    for segment in segments:
        for name in segment.nodes:
            rule, reason, _ = _why(name, segment.processor, candidate, placed)
            rows.append(
                NodePlacement(
                    node=name,
                    op=ops[name],
                    processor=segment.processor,
                    segment=segment.name,
                    rule=rule,
                    reason=reason,
                    predicted_us=round(times.get(name, 0.0), 3),
                )
            )
    return tuple(rows)


def _why(
    node: str, processor: Processor, candidate: Candidate, placed: Placed
) -> tuple[str, str, str]:
    """Return rule, reason and hint for the processor of a node."""
    if processor.startswith("dla"):
        return "", ALLOWED, ""
    verdict = candidate.refused.get(node)
    if verdict is not None:
        return verdict.rule, verdict.reason, verdict.hint
    return "P2", placed.stayed[candidate.name][node], ""


def _segment_costs(
    segments: Sequence[PlannedSegment],
    nodes: Sequence[NodeView],
    crossings: Sequence[Crossing],
    costs: tuple[Mapping[str, float], Mapping[str, float]],
    segment_us: Mapping[Processor, float],
) -> tuple[SegmentCost, ...]:
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


def _refusals(
    segment_of: Mapping[str, PlannedSegment], candidate: Candidate, placed: Placed
) -> tuple[Refusal, ...]:
    """Group the nodes that are not on the DLA by rule and hint (and operator, where it decides)."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for view in candidate.views:
        processor = segment_of[view.name].processor
        if not processor.startswith("dla"):
            rule, reason, hint = _why(view.name, processor, candidate, placed)
            op = view.op if rule.startswith("op.") else ""
            groups.setdefault((rule, hint, op), []).append((view.name, reason))
    return tuple(
        Refusal(
            rule=rule,
            reason=members[0][1],
            same_reason=len({reason for _, reason in members}) == 1,
            hint=hint,
            nodes=tuple(name for name, _ in members),
        )
        for (rule, hint, _), members in groups.items()
    )
