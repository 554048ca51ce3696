"""What to change in a model: what the plan would gain if the DLA took what a rule refuses.

Each group of refused nodes is planned again as if the rule did not hold; the difference is the gain
that a rewrite or another parameter can bring at most.
"""

from dataclasses import dataclass, replace

from device.profile import Profile
from toolkit.planning.objectives import goal_named
from toolkit.planning.placement import Candidate, place
from toolkit.planning.plan import Plan, Refusal, SharedPlan

LEAST_GAIN = 0.005  # of the plan's value
MOST = 4  # groups tried, those with the most GPU time first
SECONDS = 2.0  # of search for each


@dataclass(frozen=True, slots=True)
class Advice:
    """One change: the rule and its nodes, the value that the plan would have, the share gained.

    `how` names the rewrite or parameter that would help.
    """

    rule: str
    nodes: tuple[str, ...]
    value: float
    gain: float
    how: str


def advise(shared: SharedPlan, plan: Plan, profile: Profile) -> tuple[Advice, ...]:
    """Return the changes to one model that would help its plan, the best first."""
    candidate = next(one for one in shared.candidates if one.name == plan.name)
    refused = [row for row in plan.refusals if row.rule not in ("", "P2", "K1")]
    times = {row.node: row.predicted_us for row in plan.placements}
    refused.sort(key=lambda row: -sum(times[node] for node in row.nodes))
    found = []
    for row in refused[:MOST]:
        value = _without(row, candidate, shared, plan, profile)
        gain = 1 - value / plan.search.value if plan.search.value > 0 else 0.0
        if gain >= LEAST_GAIN:
            how = row.hint or "no rewrite is known; another operator would do"
            found.append(Advice(row.rule, row.nodes, value, gain, how))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _without(
    row: Refusal, candidate: Candidate, shared: SharedPlan, plan: Plan, profile: Profile
) -> float:
    """Return the value of the plan if the rule did not hold for its nodes."""
    rest = {node: why for node, why in candidate.refused.items() if node not in row.nodes}
    others = tuple(
        replace(one, refused=rest) if one.name == plan.name else one for one in shared.candidates
    )
    placed = place(
        others,
        profile,
        goal_named(plan.search.objective),
        shared.placed.problem.limits,
        SECONDS,
    )
    return min(placed.solution.value, plan.search.value)
