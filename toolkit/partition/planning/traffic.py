"""Simulates the frames of a placement, with queues and contention for the memory."""

from collections.abc import Sequence

from toolkit.partition.planning.placement import Placed
from toolkit.partition.planning.rates import FRAMES, WARMUP, in_flight
from toolkit.partition.solver.problem import Interval
from toolkit.partition.solver.simulate import Report, Traffic, simulate


def traffic(placed: Placed) -> Report:
    """Simulate the models at their rates; without a rate, at full speed with frames in flight."""
    slowest_us = max(
        1e6 / network.rate_hz if network.rate_hz else _latency_us(placed, network.name)
        for network in placed.problem.networks
    )
    streams = [
        _stream(
            placed,
            network.name,
            network.rate_hz,
            in_flight(placed.problem, placed.solution.placement[network.name]),
        )
        for network in placed.problem.networks
    ]
    return _simulated(placed, streams, FRAMES * slowest_us, warmup_us=WARMUP * slowest_us)


def frames_at_once(placed: Placed, count: int) -> tuple[Interval, ...]:
    """Return the intervals of `count` frames of each model that arrive together.

    For a makespan they are in the order of the plan; otherwise first come, first served.
    """
    if placed.solution.schedule and count == 1:
        return placed.solution.schedule
    longest_us = sum(_latency_us(placed, network.name) for network in placed.problem.networks)
    streams = [_stream(placed, network.name, None, count) for network in placed.problem.networks]
    report = _simulated(placed, streams, (count + 2) * longest_us, warmup_us=0.0)
    return tuple(interval for interval in report.intervals if interval.frame < count)


def _stream(placed: Placed, name: str, rate_hz: float | None, count: int) -> Traffic:
    """Return the traffic of a model; one that takes no time would never end, and comes seldom."""
    endless = rate_hz is None and _latency_us(placed, name) <= 0
    return Traffic(name, 1.0 if endless else rate_hz, in_flight=count)


def _simulated(
    placed: Placed, streams: Sequence[Traffic], duration_us: float, *, warmup_us: float
) -> Report:
    return simulate(
        placed.problem,
        placed.solution.placement,
        streams,
        duration_us=max(duration_us, 1.0),  # a model of free nodes takes no time
        warmup_us=warmup_us,
    )


def _latency_us(placed: Placed, name: str) -> float:
    return placed.figures[name][0].latency_us
