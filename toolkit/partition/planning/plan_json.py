"""A plan as JSON values, with all the content of the text report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from toolkit.partition.planning.advice import Advice
from toolkit.partition.planning.cycles import cycles_builtins, cycles_of
from toolkit.partition.planning.plan import Plan, SharedPlan
from toolkit.partition.planning.trtexec import trtexec_lines
from toolkit.partition.planning.verdict import verdict
from toolkit.partition.solver.assess import utilisation
from toolkit.partition.solver.baselines import costs_of


def shared_builtins(shared: SharedPlan, advice: Mapping[str, Sequence[Advice]]) -> dict[str, Any]:
    """Return the plans of all models and how busy the processors are.

    `utilisation`: share of time at the rates, or microseconds per frame without any;
    `simulated_utilisation`: share of time, with queues and contention for the memory; `schedule`:
    when segments run for the shortest makespan, else empty.
    """
    problem = shared.placed.problem
    busy = utilisation(problem, costs_of(problem, shared.placed.solution.placement))
    return {
        "plans": [
            {
                **plan_builtins(plan, advice.get(plan.name, ())),
                "dla_cycles": cycles_builtins(
                    cycles_of(plan.segments, candidate.views, candidate.costs)
                ),
            }
            for plan, candidate in zip(shared.plans, shared.candidates, strict=True)
        ],
        "utilisation": busy,
        "schedule": [interval._asdict() for interval in shared.placed.solution.schedule],
        "simulated_utilisation": dict(shared.simulated.utilisation),
        "services": msgspec.to_builtins(shared.services),
        "memory_shares": None if shared.memory is None else asdict(shared.memory),
    }


def plan_builtins(plan: Plan, advice: Sequence[Advice] = ()) -> dict[str, Any]:
    """Return one plan."""
    return {
        "model": plan.name,
        "profile": plan.profile,
        "precision": plan.arithmetic,
        "tensorrt": plan.tensorrt,
        "power_mode": plan.power_mode,
        "rate_hz": plan.rate_hz,
        "verdict": verdict(plan),
        "search": asdict(plan.search),
        "segments": [
            {**asdict(cost), "processor": segment.processor, "place": segment.place}
            for segment, cost in zip(plan.segments, plan.costs, strict=True)
        ],
        "crossings": msgspec.to_builtins(plan.crossings),
        "nodes": msgspec.to_builtins(plan.placements),
        "compared": [asdict(row) for row in plan.figures],
        "idle_w": msgspec.to_builtins(plan.idle),
        "batch": {"size": plan.batching.size, "tried": [asdict(r) for r in plan.batching.tried]},
        "simulated": {**asdict(plan.simulated), "in_flight": plan.in_flight},
        "memory": None if plan.memory is None else asdict(plan.memory),
        "trtexec": trtexec_lines(plan),
        "refusals": [asdict(row) for row in plan.refusals],
        "portable": [{"node": node, "reason": why} for node, why in plan.portable.items()],
        "advice": [asdict(row) for row in advice],
    }
