"""Where 80 % of boards and models are, and what energies hold, as text."""

from toolkit.partition.costs.constants import Constant
from toolkit.partition.planning.objectives import goal_named
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.quantities import between

_SHOWN = (
    ("latency_us", "us", ""),
    ("frames_per_second", "frames/s", ""),
    ("gpu_us", "us", " of the GPU"),
    ("energy_mj", "mJ", ""),
)


def figures_lines(plan: Plan) -> list[str]:
    """Return the intervals of the plan's figures, and what its energies hold."""
    intervals = plan.figures[0].intervals
    shown = ", ".join(
        between(intervals[name], unit) + what for name, unit, what in _SHOWN if name in intervals
    )
    lines = [f"this plan, 80 % of cases: {shown}"] if shown else []
    in_flight = goal_named(plan.search.objective).frames_in_flight
    rated = plan.rate_hz is not None
    return [*lines, _energy_line(plan.idle, rated=rated, frames_in_flight=in_flight)]


def _energy_line(idle: Constant | None, *, rated: bool, frames_in_flight: bool) -> str:
    """Say whether energies hold what the idle board takes, how much, and how well that is known."""
    if idle is None:
        return "mJ: beyond the idle board, whose power is not known"
    power = f"{idle.value:.3g} W, {idle.confidence} confidence"
    if rated:
        return f"mJ: beyond the idle board, which takes {power}"
    if frames_in_flight:
        return (
            f"mJ of a frame: the whole board at the plug, of which idle {power}, shared by the "
            "frames in flight; of a segment: beyond the idle board"
        )
    return f"mJ: the whole board at the plug, of which idle {power}"
