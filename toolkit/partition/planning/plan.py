"""The plan of one or several models on a profile: placements, segments, costs and reasons."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir
from msgspec import structs

from device.engine.manifest import Crossing, NodePlacement, Precision, Processor
from device.profile import Profile
from toolkit.dla.legalize.rewrite import Applied, Cut
from toolkit.errors import PlanError
from toolkit.graph.node_view import NodeView, views
from toolkit.graph.segment import PlannedSegment
from toolkit.partition.costs.bytes import tensor_bytes
from toolkit.partition.costs.constants import Constant
from toolkit.partition.costs.measured import Measured
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.figures import Figures
from toolkit.partition.planning.forced import (
    check_forced,
    forced_to_dla,
    forced_to_gpu,
)
from toolkit.partition.planning.loadables import DlaMemory, limits_of, memory_of
from toolkit.partition.planning.margin import errors_of
from toolkit.partition.planning.objectives import Goal, goal_named
from toolkit.partition.planning.options import PlanOptions
from toolkit.partition.planning.placement import (
    ALLOWED,
    FORCED,
    Candidate,
    Effort,
    Placed,
    Trial,
    place,
    try_placement,
)
from toolkit.partition.planning.portable import KernelSupport, cut_segments, portable_nodes
from toolkit.partition.planning.rates import full_rate
from toolkit.partition.planning.refusals import refusals
from toolkit.partition.planning.segment_costs import SegmentCost, kernel_costs, segment_costs
from toolkit.partition.planning.segments import find_crossings
from toolkit.partition.planning.services import (
    MemoryShares,
    Service,
    networks_of,
    share_memory,
)
from toolkit.partition.planning.traffic import traffic
from toolkit.partition.solver.simulate import NetworkReport, Report

__all__ = ["PlanOptions"]

UNREADABLE = 5e-4  # of a figure with three digits


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
    """How the placement was found: its value in the goal's terms, and the proof.

    `gap`: what a better placement could gain of the figure that the plan prints, at most; it is
    `proven` best where that is nothing that could be read off. `placement_proven`: no placement is
    better where nobody waits for the memory.
    `min_gain`: the least share that a move to the DLA must gain; `model_error`: what it is unless
    the user asks for another; `foregone`: the share that moves would gain which gain less.
    `time_error`, `energy_error`: the shares below which the model cannot tell figures apart.
    """

    objective: str
    value: float
    proven: bool
    placement_proven: bool
    gap: float
    seconds: float
    min_gain: float
    model_error: float
    foregone: float
    time_error: float
    energy_error: float


@dataclass(frozen=True, slots=True)
class Model:
    """A graph to plan: it has gone through the passes.

    `has_scale` says whether the calibration table holds a tensor; `keep_float` names nodes that
    stay in floating point; `beyond_half`: nodes with values that FP16 does not hold, and which;
    `rate_hz`: how often a frame comes, None: as fast as it goes; `measured`: times from a board,
    which go before predicted ones; `cuts`: where heads leave the DLA; `kernels`: which nodes run
    portable, by default none; `rewrites`: those made of the graph; `batching`: the frames of one
    run.
    """

    name: str
    graph: ir.Graph
    has_scale: Callable[[str], bool] = field(default=lambda name: True)
    keep_float: frozenset[str] = frozenset()
    beyond_half: Mapping[str, str] = field(default_factory=dict)
    rate_hz: float | None = None
    measured: Measured | None = None
    cuts: tuple[Cut, ...] = ()
    kernels: KernelSupport = field(default_factory=KernelSupport)
    rewrites: tuple[Applied, ...] = ()
    batching: Batching = field(default_factory=Batching)


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of one model with reasons, its segments, and their predicted costs.

    `placements` are in running order. `figures`: this plan first, then all on the GPU, all that may
    on the DLA, and a greedy choice. `simulated`: frames at the rate, or as fast as they go with
    `in_flight` of them under way, with contention for the memory. Times are of a run of
    `batching.size` frames, rates and the energies of `figures` of a frame. `idle`: the power of the
    idle board. `bfloat16`: see `PlanOptions`.
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
    idle: Constant | None = None
    batching: Batching = field(default_factory=Batching)
    bfloat16: bool = False

    @property
    def arithmetic(self) -> str:
        """What kernels compute in: BF16, which has the costs of FP16, or the precision."""
        return "bf16" if self.bfloat16 else self.precision

    @property
    def portable(self) -> Mapping[str, str]:
        """The nodes of GPU segments without kernels, in running order, and why each has none."""
        return portable_nodes(self.segments)

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
    """The plans of models that share a board, and the placement problem behind them.

    `services`: programs of other runtimes that share it, too; `memory`: how all share its memory.
    """

    plans: tuple[Plan, ...]
    candidates: tuple[Candidate, ...]
    placed: Placed
    simulated: Report
    services: tuple[Service, ...] = ()
    memory: MemoryShares | None = None


def make_plan(model: Model, profile: Profile, options: PlanOptions | None = None) -> Plan:
    """Return the plan of one model; see `plan_together`."""
    return plan_together((model,), profile, options).plans[0]


def try_candidate(
    candidate: Candidate, profile: Profile, options: PlanOptions, effort: Effort
) -> Trial:
    """Return the placement of one model without the rest of a plan; see `plan_together`.

    Names of forced nodes that the graph lacks or the DLA refuses are passed over.
    """
    limits = limits_of(profile, options.tensorrt, options.precision, options.max_crossings)
    return try_placement((candidate,), profile, goal_named(options.objective), limits, effort)


def plan_together(
    models: Sequence[Model],
    profile: Profile,
    options: PlanOptions | None = None,
    trials: Mapping[str, Trial | None] | None = None,
    services: Sequence[Service] = (),
) -> SharedPlan:
    """Return the plans of models that share a board; `trials` of them: placements to improve.

    `services`: programs that take their part of its memory and of the GPU. A dynamic batch keeps
    its nodes off the DLA (rule G5) and counts as 1 in times and sizes. Raises PlanError: a model
    has no nodes or nodes without distinct names, an option is unknown, the memory does not suffice,
    or nothing keeps the limits and rates.
    """
    options = options or PlanOptions()
    goal = goal_named(options.objective)
    candidates = tuple(candidate_of(model, profile, options) for model in models)
    for model, candidate in zip(models, candidates, strict=True):
        names = (view.name for view in candidate.views)
        check_forced(options.forced.after(model.rewrites), names, candidate.refused)
    memory = share_memory(services, candidates, profile)
    loads = networks_of(services, profile)
    limits = limits_of(profile, options.tensorrt, options.precision, options.max_crossings)
    known = {name: trial for name, trial in (trials or {}).items() if trial is not None}
    start = {name: home for name, t in known.items() for home in t.solution.placement.values()}
    effort = Effort(
        options.seconds,
        starts=() if trials is None else (start,),
        min_gain=options.min_gain,
        trial=known.get(models[0].name) if len(models) == 1 and not loads else None,
    )
    placed = place(candidates, profile, goal, limits, effort, loads=loads)
    simulated = traffic(placed)
    return SharedPlan(
        plans=tuple(
            _plan(candidate, placed, simulated, profile=profile, options=options)
            for candidate in candidates
        ),
        candidates=candidates,
        placed=placed,
        simulated=simulated,
        services=tuple(services),
        memory=memory,
    )


def cut_again(
    shared: SharedPlan, profile: Profile, options: PlanOptions, no_kernel: Mapping[str, str]
) -> SharedPlan:
    """Return the plan of one model with more nodes that have no kernel: `no_kernel`, and why.

    All nodes keep their processor; segments of the GPU are cut where all those nodes are.
    """
    (candidate,) = shared.candidates
    candidate = replace(candidate, no_kernel={**candidate.no_kernel, **no_kernel})
    plan = _plan(candidate, shared.placed, shared.simulated, profile=profile, options=options)
    return replace(shared, plans=(plan,), candidates=(candidate,))


def run_portable(plan: Plan, no_kernel: Mapping[str, str]) -> Plan:
    """Return a plan whose GPU segments run portable as a whole where they hold such a node.

    `no_kernel`: nodes without a kernel, and why.
    """
    segments = tuple(
        replace(segment, no_kernel={n: no_kernel[n] for n in segment.nodes if n in no_kernel})
        if segment.place == "gpu"
        else segment
        for segment in plan.segments
    )
    reasons = {n: why for n, why in portable_nodes(segments).items() if n not in plan.portable}
    return replace(
        plan,
        segments=segments,
        placements=tuple(
            structs.replace(row, reason=_portable(row.reason, reasons[row.node]))
            if row.node in reasons
            else row
            for row in plan.placements
        ),
    )


def _portable(reason: str, no_kernel: str) -> str:
    return f"{reason}; runs portable: {no_kernel}"


def candidate_of(model: Model, profile: Profile, options: PlanOptions) -> Candidate:
    """Return a model with the views, costs and refusals of its nodes."""
    nodes = _named_views(model)
    costs = CostModel(
        nodes,
        profile,
        precision=options.precision,
        power_mode=options.power_mode,
        measured=model.measured,
    )
    opt_nodes, opt_costs = nodes, costs
    if model.kernels.opt_shapes:
        opt_nodes = views(model.graph, model.kernels.opt_shapes)
        opt_costs = CostModel(
            opt_nodes, profile, precision=options.precision, power_mode=options.power_mode
        )
    names = [view.name for view in nodes]
    forced = options.forced.after(model.rewrites).known(names)
    refused = refusals(
        nodes,
        profile,
        options.precision,
        options.tensorrt,
        has_scale=model.has_scale,
        keep_float=model.keep_float,
        beyond_half=model.beyond_half,
        cuts=model.cuts,
        chosen=forced_to_gpu(forced, names),
    )
    return Candidate(
        name=model.name,
        views=nodes,
        costs=costs,
        refused=refused,
        no_kernel=model.kernels.no_kernel,
        opt_views=opt_nodes,
        opt_costs=opt_costs,
        outputs=tuple(str(value.name) for value in model.graph.outputs),
        rate_hz=model.rate_hz,
        forced=forced_to_dla(forced, names, refused),
        batching=model.batching,
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
    times, energies = kernel_costs(candidate, placed)
    crossings = find_crossings(segments, candidate.views, sizes.__getitem__)
    gap = _printed_gap(candidate, placed, goal_named(options.objective))
    return Plan(
        name=candidate.name,
        profile=profile.name,
        precision=options.precision,
        tensorrt=options.tensorrt,
        power_mode=options.power_mode,
        rate_hz=candidate.rate_hz,
        placements=_placements(candidate, placed, segments, times),
        segments=segments,
        costs=segment_costs(
            segments,
            candidate.views,
            crossings,
            (times, energies),
            segment_us=placed.problem.segment_us,
            costs=candidate.costs,
        ),
        crossings=crossings,
        refusals=_refusals(rows, candidate, placed),
        figures=placed.figures[candidate.name],
        search=Search(
            options.objective,
            solution.value,
            solution.proven and gap < UNREADABLE,
            solution.proven,
            gap,
            solution.seconds,
            placed.filtered.min_gain,
            placed.filtered.model_error,
            placed.filtered.foregone,
            *errors_of(candidate.costs),
        ),
        memory=memory_of(
            profile, placed.problem.limits, formulated.network, segments, formulated.nodes
        ),
        simulated=_of_frames(simulated.of(candidate.name), candidate.batching.size),
        in_flight=full_rate(placed.problem, formulated.network, solution.placement).in_flight,
        idle=candidate.costs.idle,
        batching=candidate.batching,
        bfloat16=options.bfloat16,
    )


def _printed_gap(candidate: Candidate, placed: Placed, goal: Goal) -> float:
    """Return the share between the printed figure of the objective and the bound of its value.

    The figures hold the contention for the memory, which the solver leaves out.
    """
    solution, row = placed.solution, placed.figures[candidate.name][0]
    printed = solution.value
    if len(placed.problem.networks) == 1 and not placed.problem.rated:
        if goal.aim == "energy":
            printed = row.energy_mj * candidate.batching.size
        elif goal.aim == "utilisation":
            printed = candidate.batching.size * 1e6 / row.frames_per_second
    return max(solution.gap, 1 - solution.bound / printed) if printed > 0 else 0.0


def _of_frames(report: NetworkReport, batch: int) -> NetworkReport:
    """Return a report of runs with the rate of frames."""
    return replace(report, throughput_hz=report.throughput_hz * batch)


def _segments(
    candidate: Candidate, placed: Placed
) -> tuple[tuple[PlannedSegment, ...], dict[str, PlannedSegment]]:
    """Name the segments of the solution, fill in their nodes, and cut them where kernels miss.

    Also returns the segment of each node.
    """
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
    pieces = cut_segments(segments, candidate.opt_views, candidate.no_kernel, candidate.opt_costs)
    return pieces, {node: piece for piece in pieces for node in piece.nodes}


def _placements(
    candidate: Candidate,
    placed: Placed,
    segments: Iterable[PlannedSegment],
    times: Mapping[str, float],
) -> tuple[NodePlacement, ...]:
    ops = {view.name: view.op for view in candidate.views}
    rows = []
    for segment in segments:
        without_kernel = portable_nodes([segment])
        for name in segment.nodes:
            rule, reason, _ = _why(name, segment.processor, candidate, placed)
            if name in without_kernel:
                reason = _portable(reason, without_kernel[name])
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
        return "", FORCED if node in candidate.forced else ALLOWED, ""
    verdict = candidate.refused.get(node)
    if verdict is not None:
        return verdict.rule, verdict.reason, verdict.hint
    return "P2", placed.stayed[candidate.name][node], ""


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
