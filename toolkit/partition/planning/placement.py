"""Places the nodes of networks that share a board, with reasons and comparisons.

The rules say what may run on the DLA, the costs what it takes, the solver what is best. What the
solver leaves on the GPU although the DLA would take it gets its reason by trial: the island is
moved and the plan assessed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from device.engine.manifest import Processor
from device.profile import Profile
from toolkit.dla.rules.rule import Verdict
from toolkit.errors import PlanError
from toolkit.graph.node_view import NodeView
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.batch import Batching
from toolkit.partition.planning.figures import Figures, figures, of_frames
from toolkit.partition.planning.formulate import Formulated, formulate, problem_of
from toolkit.partition.planning.margin import Kept, default_min_gain, keep_what_pays
from toolkit.partition.planning.objectives import Goal
from toolkit.partition.solver.assess import overloads, utilisation, value_of, violations
from toolkit.partition.solver.baselines import costs_of, dla_with_fallback, gpu_only, greedy
from toolkit.partition.solver.problem import Limits, Placement, Problem, Solution
from toolkit.partition.solver.segmentation import components, graph_of
from toolkit.partition.solver.solve import solve

ALLOWED = "no rule of the DLA refuses it, and the plan is best with it there"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network to place: nodes in running order, their costs, verdicts against them, outputs.

    `refused`: what the DLA says of its nodes; `no_kernel`: what the GPU backend says. `opt_views`
    and `opt_costs`: the nodes at the sizes that kernels are made for.
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
    batching: Batching = field(default_factory=Batching)


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
    kept: Kept


def place(
    candidates: Sequence[Candidate],
    profile: Profile,
    goal: Goal,
    limits: Limits,
    seconds: float,
    *,
    min_gain: float | None = None,
) -> Placed:
    """Place networks that share a board; `seconds` bound the search, `min_gain`: see `margin.py`.

    Raises PlanError: the rates do not fit, or no placement was found that keeps the limits.
    """
    processors = processors_of(profile)
    alternate = profile.dla_cores > 1 and (goal.frames_in_flight or len(candidates) > 1)
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
        [formulation.network for formulation in formulations.values()],
        candidates[0].costs,
        processors,
        limits,
        alternate_dlas=alternate,
    )
    found = solve(problem, goal.aim, seconds) if len(processors) > 1 else _only(problem, goal)
    margin = default_min_gain(candidates[0].costs, goal) if min_gain is None else min_gain
    kept = keep_what_pays(problem, found, goal, margin)
    solution = kept.solution
    if late := overloads(problem, costs_of(problem, solution.placement)):
        raise PlanError(_too_much(problem, late, goal))
    return Placed(
        problem=problem,
        formulated=formulations,
        solution=solution,
        stayed={
            candidate.name: _stayed(candidate, formulations[candidate.name], problem, kept, goal)
            for candidate in candidates
        },
        figures=_figures(problem, solution, goal, candidates),
        kept=kept,
    )


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
    own = goal.aim in ("utilisation", "gpu_time")  # the load of the one processor there is
    value = busy if own else value_of(problem, goal.aim, costs)
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
    kept: Kept,
    goal: Goal,
) -> dict[str, str]:
    """Return, for each GPU island that the DLA accepts, the effect of moving it to the DLA."""
    if len(problem.processors) == 1:
        return {}
    solution = kept.solution
    placed = solution.placement[candidate.name]
    network = formulated.network
    # Only for telling islands apart: "cpu" marks what could move.
    markers: list[Processor] = [
        "cpu" if placed[t.name] == "gpu" and "dla0" in t.time_us else placed[t.name]
        for t in network.tasks
    ]
    reasons: dict[str, str] = {}
    for piece in components(graph_of(network), markers, "cpu"):
        tasks = [network.tasks[index] for index in piece]
        nodes = [view.name for task in tasks for view in formulated.nodes[task.name]]
        moved: dict[str, Processor] = {**placed, **{task.name: "dla0" for task in tasks}}
        trial: Placement = {**solution.placement, candidate.name: moved}
        reason = _compared(problem, kept, trial, goal, len(nodes))
        reasons |= dict.fromkeys(nodes, reason)
    return reasons


def _compared(
    problem: Problem,
    kept: Kept,
    trial: Placement,
    goal: Goal,
    count: int,
) -> str:
    trial_costs = costs_of(problem, trial)
    island = (
        f"the DLA takes it, but with its island of {count} node{'s' if count > 1 else ''} there"
    )
    if broken := violations(problem, trial, trial_costs):
        return f"{island} the plan breaks a limit ({broken[0]})"
    value = value_of(problem, goal.aim, trial_costs)
    text, unit = goal.quantity(rated=all(net.rate_hz is not None for net in problem.networks))
    here, there = _sizes(kept.solution.value, value)
    if here != there:
        error = ", within the model's error" if value < kept.solution.value else ""
        return f"{island} the {text} would be {there} instead of {here} {unit}{error}"
    return f"{island} the {text} would stay {here} {unit}"


def _sizes(current: float, alternative: float) -> tuple[str, str]:
    """Format two values with the fewest digits, 4 to 7, that tell them apart."""
    for figures_ in range(4, 8):
        texts = f"{current:.{figures_}g}", f"{alternative:.{figures_}g}"
        if texts[0] != texts[1]:
            break
    return texts


def _figures(
    problem: Problem, solution: Solution, goal: Goal, candidates: Sequence[Candidate]
) -> dict[str, tuple[Figures, ...]]:
    """Return figures of the plan and of the baselines: GPU only, DLA with fallback, greedy."""
    baselines: tuple[tuple[str, Placement], ...] = ()
    if len(problem.processors) > 1:
        baselines = (
            ("GPU only", gpu_only(problem)),
            ("DLA with fallback", dla_with_fallback(problem)),
            ("greedy", greedy(problem, goal.aim)),
        )
    rows: dict[str, list[Figures]] = {network.name: [] for network in problem.networks}
    for name, placement in (("this plan", solution.placement), *baselines):
        broken = tuple(violations(problem, placement, costs_of(problem, placement)))
        for network, candidate in zip(problem.networks, candidates, strict=True):
            row = figures(name, problem, network, placement, candidate.costs, broken=broken)
            rows[network.name].append(of_frames(row, candidate.batching.size))
    return {name: tuple(compared) for name, compared in rows.items()}
