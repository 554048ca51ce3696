"""A plan under traffic: its frames simulated, with queues and contention for the memory."""

from toolkit.planning.plan import SharedPlan
from toolkit.scheduling.problem import Interval
from toolkit.scheduling.simulate import Report, Traffic, simulate

IN_FLIGHT = 3  # frames of a model without a rate: one on each processor
FRAMES = 200  # simulated of the slowest model; enough for a 99th percentile


def traffic(shared: SharedPlan) -> Report:
    """Simulate the models at their rates, or as fast as they go with some frames in flight."""
    slowest_us = max(_period_us(shared, index) for index in range(len(shared.plans)))
    return _simulated(shared, FRAMES * slowest_us, warmup_us=10 * slowest_us)


def first_frames(shared: SharedPlan, count: int) -> tuple[Interval, ...]:
    """Return what the first frames of every model occupy, and when."""
    longest_us = sum(plan.total_us for plan in shared.plans)
    report = _simulated(shared, (count + 2) * longest_us, warmup_us=0.0)
    return tuple(interval for interval in report.intervals if interval.frame < count)


def _simulated(shared: SharedPlan, duration_us: float, *, warmup_us: float) -> Report:
    streams = [Traffic(p.name, p.rate_hz, in_flight=IN_FLIGHT) for p in shared.plans]
    return simulate(
        shared.placed.problem,
        shared.placed.solution.placement,
        streams,
        duration_us=duration_us,
        warmup_us=warmup_us,
    )


def _period_us(shared: SharedPlan, index: int) -> float:
    plan = shared.plans[index]
    return 1e6 / plan.rate_hz if plan.rate_hz else plan.total_us
