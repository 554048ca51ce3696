"""Places the nodes of networks that share a board, with reasons and comparisons.

The rules say what may run on the DLA, the costs what it takes, the solver what is best. What the
solver leaves on the GPU although the DLA would take it gets its reason by trial: the island is
moved and the plan assessed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from device.engine.manifest import Processor
from device.profile import Profile
from toolkit.dla.rules.rule import Verdict
from toolkit.errors import PlanError
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.figures import GPU_ONLY, Figures, figures, of_frames
from toolkit.partition.planning.formulate import Formulated, formulate, problem_of
from toolkit.partition.planning.margin import (
    FilteredSolution,
    default_min_gain,
    keep_what_pays,
    share_gained,
)
from toolkit.partition.planning.objectives import Goal
from toolkit.partition.planning.quantities import apart, unit_of
from toolkit.partition.solver.assess import overloads, utilisation, value_of, violations
from toolkit.partition.solver.baselines import costs_of, dla_with_fallback, gpu_only, greedy
from toolkit.partition.solver.milp import GAP
from toolkit.partition.solver.problem import Limits, Network, Placement, Problem, Solution
from toolkit.partition.solver.segmentation import components
from toolkit.partition.solver.solve import solve

FORCED = "on the DLA, as asked"
ALLOWED = "no rule of the DLA refuses it, and the plan is best with it there"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network to place: nodes in running order, their costs, verdicts against them, outputs.

    `refused`: what the DLA says of its nodes; `no_kernel`: what the GPU backend says. `opt_views`
    and `opt_costs`: the nodes at the sizes that kernels are made for. `forced`: nodes that must be
    on the DLA.
    """

    name: str
    views: tuple[NodeView, ...]
    costs: CostModel
    refused: Mapping[str, Verdict]
    no_kernel: Mapping[str, str]
    opt_views: tuple[NodeView, ...]
    opt_costs: CostModel
    outputs: tuple[str, ...]
    rate_hz: float | None = None
    forced: frozenset[str] = frozenset()
    batching: Batching = field(default_factory=Batching)


@dataclass(frozen=True, slots=True)
class Effort:
    """How far to search: `seconds` of search, to a relative `gap`, for values `below` one, until
    one is `enough`.

    `starts`: placements of the same networks, perhaps of other graphs, to improve. `min_gain`: the
    least gain of a move to the DLA, None: see `margin.py`. `trial`: its proof holds here, too,
    where its problem is the same.
    """

    seconds: float
    gap: float = GAP
    below: float | None = None
    enough: float | None = None
    starts: tuple[Placement, ...] = ()
    min_gain: float | None = None
    trial: "Trial | None" = None


@dataclass(frozen=True)
class Placed:
    """The placement problem, its solution, and the alternatives to it.

    `stayed`: network -> node -> why it is on the GPU although the DLA takes it.
    `figures`: network -> this plan, then the plans that need no solver.
    """

    problem: Problem
    formulated: Mapping[str, Formulated]
    solution: Solution
    stayed: Mapping[str, Mapping[str, str]]
    figures: Mapping[str, tuple[Figures, ...]]
    filtered: FilteredSolution


def place(
    candidates: Sequence[Candidate],
    profile: Profile,
    goal: Goal,
    limits: Limits,
    effort: Effort,
    *,
    loads: Sequence[Network] = (),
) -> Placed:
    """Place networks that share a board, give reasons and compare.

    `loads`: networks of other programs, which are placed and have no candidate. Raises PlanError:
    the rates do not fit, or no placement was found that keeps the limits.
    """
    formulations, free = _formulated(candidates, profile, goal, limits, loads)
    problem = _with_forced(free, formulations, candidates)
    filtered = _solved(problem, goal, candidates, effort)
    return Placed(
        problem=problem,
        formulated=formulations,
        solution=filtered.solution,
        stayed={
            candidate.name: _stayed(
                candidate, formulations[candidate.name], problem, filtered, goal
            )
            for candidate in candidates
        },
        figures=_figures(free, filtered.solution, goal, candidates),
        filtered=filtered,
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """A placement without reasons; `processors`: network -> node -> where it runs.

    `best`: the solver's solution of `problem`, of which `solution` keeps what pays.
    """

    problem: Problem
    best: Solution
    solution: Solution
    processors: Mapping[str, Mapping[str, Processor]]
    min_gain: float


def try_placement(
    candidates: Sequence[Candidate],
    profile: Profile,
    goal: Goal,
    limits: Limits,
    effort: Effort,
) -> Trial:
    """Return the placement that `place` finds, and no more. Raises PlanError as it does."""
    formulations, problem = _formulated(candidates, profile, goal, limits)
    problem = _with_forced(problem, formulations, candidates)
    filtered = _solved(problem, goal, candidates, effort)
    processors = {
        name: {
            view.name: filtered.solution.placement[name][task]
            for task, nodes in formulation.nodes.items()
            for view in nodes
        }
        for name, formulation in formulations.items()
    }
    return Trial(problem, filtered.best, filtered.solution, processors, filtered.min_gain)


def _formulated(
    candidates: Sequence[Candidate],
    profile: Profile,
    goal: Goal,
    limits: Limits,
    loads: Sequence[Network] = (),
) -> tuple[dict[str, Formulated], Problem]:
    processors = processors_of(profile)
    two_cores = profile.dla_cores > 1
    alternate = two_cores and (goal.frames_in_flight or len(candidates) > 1)
    if goal.aim == "makespan":  # one frame of each: a core is a place
        processors, alternate = (*processors, *(("dla1",) if two_cores else ())), False
    formulations = {
        candidate.name: formulate(
            candidate.name,
            candidate.views,
            candidate.refused,
            candidate.costs,
            processors,
            outputs=candidate.outputs,
            rate_hz=candidate.rate_hz,
        )
        for candidate in candidates
    }
    problem = problem_of(
        [*(formulation.network for formulation in formulations.values()), *loads],
        candidates[0].costs,
        processors,
        limits,
        alternate_dlas=alternate,
    )
    return formulations, problem


def _with_forced(
    problem: Problem, formulations: Mapping[str, Formulated], candidates: Sequence[Candidate]
) -> Problem:
    """Return the problem without the GPU for the kernels of forced nodes."""
    if not any(candidate.forced for candidate in candidates):
        return problem
    networks = []
    for network, candidate in zip(problem.networks, candidates, strict=False):
        nodes = formulations[network.name].nodes
        tasks = []
        for task in network.tasks:
            on_dla = {p: time for p, time in task.time_us.items() if p != problem.processors[0]}
            must = any(view.name in candidate.forced for view in nodes[task.name])
            tasks.append(replace(task, time_us=on_dla) if must and on_dla else task)
        networks.append(replace(network, tasks=tuple(tasks)))
    return replace(problem, networks=(*networks, *problem.networks[len(networks) :]))


def _solved(
    problem: Problem, goal: Goal, candidates: Sequence[Candidate], effort: Effort
) -> FilteredSolution:
    if len(problem.processors) == 1:
        solution = _only(problem, goal)
    else:
        starts = [_nearest(problem, placement) for placement in effort.starts]
        bound = 0.0
        if effort.trial is not None and _same(problem, goal, effort.trial):
            starts = [_of_trial(problem, effort.trial)]
            bound = effort.trial.best.bound
        solution = solve(
            problem,
            goal.aim,
            effort.seconds,
            starts=starts,
            gap=effort.gap,
            below=effort.below,
            enough=effort.enough,
            bound=bound,
        )
    model_error = default_min_gain(candidates[0].costs, goal)
    least = model_error if effort.min_gain is None else effort.min_gain
    if effort.below is not None and solution.value >= effort.below:  # it will not be used
        return FilteredSolution(solution, solution, least, model_error)
    filtered = keep_what_pays(problem, solution, goal, least, model_error)
    if late := overloads(problem, costs_of(problem, filtered.solution.placement)):
        raise PlanError(_too_much(problem, late, goal))
    return filtered


def _same(problem: Problem, goal: Goal, trial: Trial) -> bool:
    """Return True if a problem is that of a trial but for the name of its network."""
    networks = (
        replace(network, name=before.name)
        for network, before in zip(problem.networks, trial.problem.networks, strict=True)
    )
    renamed = replace(problem, networks=tuple(networks), contention=trial.problem.contention)
    return goal.aim == trial.best.objective and all(
        getattr(renamed, part.name) == getattr(trial.problem, part.name) for part in fields(Problem)
    )


def _of_trial(problem: Problem, trial: Trial) -> Placement:
    """Return the best placement of a trial whose problem is the same."""
    rows = zip(problem.networks, trial.problem.networks, strict=True)
    return {network.name: trial.best.placement[before.name] for network, before in rows}


def _nearest(problem: Problem, placement: Placement) -> Placement:
    """Return a placement of another problem as one of this: what it lacks is on the GPU."""
    nearest: dict[str, dict[str, Processor]] = {}
    for network in problem.networks:
        placed = placement.get(network.name, {})
        homes = {task.name: placed.get(task.name, "gpu") for task in network.tasks}
        nearest[network.name] = {
            task.name: homes[task.name]
            if homes[task.name] in task.time_us
            else next(p for p in problem.processors if p in task.time_us)
            for task in network.tasks
        }
    return nearest


def processors_of(profile: Profile) -> tuple[Processor, ...]:
    """Return the processors that a plan may use; the first takes every node.

    A second DLA core takes turns with the first, so that it is no place of its own.
    """
    if profile.gpu is None:
        return ("cpu",)
    return ("gpu",) if profile.dla_cores == 0 else ("gpu", "dla0")


def _too_much(problem: Problem, late: Sequence[str], goal: Goal) -> str:
    names = ", ".join(network.name for network in problem.networks)
    message = f"the rates of {names} do not fit: {late[0]}; lower the rates"
    return message if goal.aim == "utilisation" else f"{message}, or plan for throughput"


def _only(problem: Problem, goal: Goal) -> Solution:
    """Return the only placement on a single processor."""
    placement = gpu_only(problem)
    costs = costs_of(problem, placement)
    busy = utilisation(problem, costs)[problem.processors[0]]
    of_one_processor = goal.aim in (
        "utilisation",
        "gpu_time",
    )  # the load of the one processor there is
    value = busy if of_one_processor else value_of(problem, goal.aim, costs)
    if goal.aim == "makespan":
        value = sum(cost.latency_us for cost in costs.values())
    return Solution(
        objective=goal.aim,
        placement=placement,
        segments=tuple(segment for cost in costs.values() for segment in cost.segments),
        value=value,
        bound=value,
        proven=True,
        seconds=0.0,
    )


def _stayed(
    candidate: Candidate,
    formulated: Formulated,
    problem: Problem,
    filtered: FilteredSolution,
    goal: Goal,
) -> dict[str, str]:
    """Return, for each GPU island that the DLA accepts, the effect of moving it to the DLA."""
    if len(problem.processors) == 1:
        return {}
    solution = filtered.solution
    placed = solution.placement[candidate.name]
    network = formulated.network
    # Only for telling islands apart: "cpu" marks what could move.
    markers: list[Processor] = [
        "cpu" if placed[t.name] == "gpu" and "dla0" in t.time_us else placed[t.name]
        for t in network.tasks
    ]
    reasons: dict[str, str] = {}
    for piece in components(network.graph, markers, "cpu"):
        tasks = [network.tasks[index] for index in piece]
        nodes = [view.name for task in tasks for view in formulated.nodes[task.name]]
        moved: dict[str, Processor] = {**placed, **{task.name: "dla0" for task in tasks}}
        trial: Placement = {**solution.placement, candidate.name: moved}
        reason = _compared(problem, filtered, trial, goal, (len(nodes), candidate.batching.size))
        reasons |= dict.fromkeys(nodes, reason)
    return reasons


def _compared(
    problem: Problem,
    filtered: FilteredSolution,
    trial: Placement,
    goal: Goal,
    counts: tuple[int, int],
) -> str:
    """Return what the plan would be with an island there; `counts`: its nodes, and the batch."""
    count, batch = counts
    trial_costs = costs_of(problem, trial)
    island = (
        f"the DLA takes it, but with its island of {count} node{'s' if count > 1 else ''} there"
    )
    if broken := violations(problem, trial, trial_costs):
        return f"{island} the plan breaks a limit ({broken[0]})"
    if goal.aim == "makespan":
        return "the DLA takes it, but no order that was found ends earlier with it there"
    value = value_of(problem, goal.aim, trial_costs)
    rated = all(net.rate_hz is not None for net in problem.networks)
    text, unit = goal.quantity(rated=rated, batch=batch)
    here, there = apart(filtered.solution.value, value, unit)
    unit = unit_of(unit, filtered.solution.value, value)
    if here != there:
        better = value < filtered.solution.value
        gain = _gain_text(problem, filtered, trial, goal, value) if better else ""
        return f"{island} the {text} would be {there} instead of {here} {unit}{gain}"
    return f"{island} the {text} would stay {here} {unit}"


def _gain_text(
    problem: Problem, filtered: FilteredSolution, trial: Placement, goal: Goal, value: float
) -> str:
    """Say what a placement of a better value gains, and whether the model can tell."""
    gain = share_gained(problem, goal.aim, trial, filtered.solution.placement)
    if gain is None:
        return ""
    queues = gain < 1 - value / filtered.solution.value - 1e-9
    if gain <= 0:
        return "; with frames in flight it is no faster"
    within = ", within the model's error" if gain < filtered.model_error else ""
    return f", a gain of {gain:.1%}{' with frames in flight' if queues else ''}{within}"


def _figures(
    problem: Problem, solution: Solution, goal: Goal, candidates: Sequence[Candidate]
) -> dict[str, tuple[Figures, ...]]:
    """Return figures of the plan and of the baselines: GPU only, DLA with fallback, greedy."""
    baselines: tuple[tuple[str, Placement], ...] = ()
    if len(problem.processors) > 1:
        baselines = (
            (GPU_ONLY, gpu_only(problem)),
            ("DLA with fallback", dla_with_fallback(problem)),
            ("greedy", greedy(problem, goal.aim)),
        )
    rows: dict[str, list[Figures]] = {candidate.name: [] for candidate in candidates}
    for name, placement in (("this plan", solution.placement), *baselines):
        broken = tuple(violations(problem, placement, costs_of(problem, placement)))
        for network, candidate in zip(problem.networks, candidates, strict=False):
            row = figures(name, problem, network, placement, candidate.costs, broken=broken)
            rows[network.name].append(of_frames(row, candidate.batching.size))
    return {name: tuple(compared) for name, compared in rows.items()}
