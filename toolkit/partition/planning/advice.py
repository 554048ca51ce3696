"""Advice on a model: what the plan gains if the DLA takes the nodes that a rule refuses.

Each group of refused nodes is planned again as if the rule did not hold; the difference is the gain
that a rewrite or another parameter can bring at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from device.profile import Profile
from toolkit.dla.legalize.legalize import would_help
from toolkit.dla.legalize.rewrite import Declined
from toolkit.partition.planning.objectives import MAKESPAN, goal_named
from toolkit.partition.planning.placement import Candidate, Effort, try_placement
from toolkit.partition.planning.plan import Plan, Refusal, SharedPlan

MIN_GAIN = 0.005  # of the plan's value, where no larger one is asked for
GAP = 0.001  # of the value, between what is found and what is possible
MAX_GROUPS = 4  # groups tried over all models, those with the most GPU time first
SECONDS = 2.0  # of search for each, of several models half

# What no change of the model mends: no DLA, the plan's own choice, float for accuracy, precision.
_CHOICES = frozenset({"", "P2", "F1", "K1", "G1"})


@dataclass(frozen=True, slots=True)
class Advice:
    """One change: the rule, its nodes, the value of the changed plan and the share gained.

    `rewrites` names those that exist for these nodes, `how` says what would help: why a rewrite was
    not made, or what to change by hand.
    """

    rule: str
    nodes: tuple[str, ...]
    value: float
    gain: float
    rewrites: tuple[str, ...]
    how: str


def advise(
    shared: SharedPlan, plan: Plan, profile: Profile, declined: Sequence[Declined] = ()
) -> tuple[Advice, ...]:
    """Return the changes to one model that would help its plan, the best first.

    `declined`: the rewrites that were tried on the model but not applied. There is no advice for a
    makespan, whose search takes too long to repeat.
    """
    if plan.search.objective == MAKESPAN:
        return ()
    candidate = next(member for member in shared.candidates if member.name == plan.name)
    refused = [row for row in plan.refusals if row.rule not in _CHOICES]
    times = {row.node: row.predicted_us for row in plan.placements}
    refused.sort(key=lambda row: -sum(times[node] for node in row.nodes))
    advice = []
    for row in refused[: max(1, MAX_GROUPS // len(shared.plans))]:
        value = _without(row, candidate, shared, plan, profile)
        gain = 1 - value / plan.search.value if plan.search.value > 0 else 0.0
        if gain >= _least_gain(plan):
            advice.append(_advice(row, candidate, declined, value, gain))
    return tuple(sorted(advice, key=lambda advice: -advice.gain))


def _least_gain(plan: Plan) -> float:
    return max(MIN_GAIN, plan.search.min_gain)


def _advice(
    row: Refusal, candidate: Candidate, declined: Sequence[Declined], value: float, gain: float
) -> Advice:
    tried = [attempt for attempt in declined if attempt.node in row.nodes]
    ops = {view.name: view for view in candidate.views}
    names = [attempt.rewrite for attempt in tried]
    names += [name for node in row.nodes for name in would_help(ops[node])]
    how = row.hint or ("" if names else "no rewrite is known; another operator would do")
    if tried:
        why = f"rewrite {tried[0].rewrite} was not made: {tried[0].reason}"
        how = f"{why}; {how}" if how else why
    elif names:
        how = f"rewrite {names[0]}" + (f"; {how}" if how else "")
    return Advice(row.rule, row.nodes, value, gain, tuple(dict.fromkeys(names)), how)


def _without(
    row: Refusal, candidate: Candidate, shared: SharedPlan, plan: Plan, profile: Profile
) -> float:
    """Return the plan's value with the rule lifted from its nodes.

    Where that gains less than is asked for, it is any value up to that of the plan.
    """
    rest = {node: why for node, why in candidate.refused.items() if node not in row.nodes}
    candidates = tuple(
        replace(member, refused=rest) if member.name == plan.name else member
        for member in shared.candidates
    )
    effort = Effort(
        SECONDS if len(shared.plans) == 1 else SECONDS / 2,
        gap=GAP,
        below=(1 - _least_gain(plan)) * plan.search.value,
        starts=(shared.placed.solution.placement,),
        min_gain=plan.search.min_gain,
    )
    goal = goal_named(plan.search.objective)
    trial = try_placement(candidates, profile, goal, shared.placed.problem.limits, effort)
    return min(trial.solution.value, plan.search.value)
