"""Where 80 % of boards and models are, and what energies hold, as text."""

from toolkit.partition.costs.constants import Constant
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
    return [*lines, _energy_line(plan.idle, rated=plan.rate_hz is not None)]


def _energy_line(idle: Constant | None, *, rated: bool) -> str:
    """Say whether energies hold what the idle board takes, how much, and how well that is known."""
    if idle is None:
        return "mJ: beyond the idle board, whose power is not known"
    power = f"{idle.value:.3g} W, {idle.confidence} confidence"
    if rated:
        return f"mJ: beyond the idle board, which takes {power}"
    return (
        f"mJ of a frame: the whole board at the plug at full rate, of which idle {power}; "
        "of a segment: beyond the idle board"
    )
