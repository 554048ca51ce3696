"""The frames of a placement over time: at the rates, or as fast as they go."""

from collections.abc import Sequence

from toolkit.partition.planning.placement import Placed
from toolkit.partition.planning.rates import FullRate, full_rate
from toolkit.partition.solver.assess import assess, share_of
from toolkit.partition.solver.problem import Interval, Network
from toolkit.partition.solver.simulate import NetworkReport, Report, Traffic, simulate

FRAMES = 200  # simulated of the slowest model; enough for a 99th percentile
WARMUP = 10  # frames before statistics start


def traffic(placed: Placed) -> Report:
    """Return how often frames of each model end, and how long they take.

    One model without a rate has its full rate (`rates.py`). Models that share the board are
    simulated, with queues and contention for the memory: at their rates or, without one, with as
    many frames in flight as each has alone.
    """
    networks = placed.problem.networks
    rates = {n.name: full_rate(placed.problem, n, placed.solution.placement) for n in networks}
    if len(networks) == 1 and not placed.problem.rated:
        return _at_full_rate(placed, networks[0], rates[networks[0].name])
    slowest_us = max(
        1e6 / network.rate_hz if network.rate_hz else _latency_us(placed, network.name)
        for network in networks
    )
    streams = [_stream(placed, n, n.rate_hz, rates[n.name].in_flight) for n in networks]
    return _simulated(placed, streams, FRAMES * slowest_us, warmup_us=WARMUP * slowest_us)


def frames_at_once(placed: Placed, count: int) -> tuple[Interval, ...]:
    """Return the intervals of `count` frames of each model that arrive together.

    For a makespan they are in the order of the plan; otherwise first come, first served.
    """
    if placed.solution.schedule and count == 1:
        return placed.solution.schedule
    networks = [n for n in placed.problem.networks if n.name in placed.figures]
    longest_us = sum(_latency_us(placed, network.name) for network in networks)
    streams = [_stream(placed, network, None, count) for network in networks]
    report = _simulated(placed, streams, (count + 2) * longest_us, warmup_us=0.0)
    return tuple(interval for interval in report.intervals if interval.frame < count)


def _at_full_rate(placed: Placed, network: Network, full: FullRate) -> Report:
    problem = placed.problem
    cost = assess(problem, network, placed.solution.placement[network.name])
    rate = 0.0 if cost.latency_us <= 0 else full.frames_per_second
    latencies_us = (full.latency_us,) * 4
    shares = {
        processor: load_us * share_of(problem, processor) * rate * 1e-6
        for processor, load_us in cost.load_us.items()
    }
    if problem.alternate_dlas:
        shares["dla1"] = shares["dla0"]
    return Report(
        (NetworkReport(network.name, full.in_flight, full.frames_per_second, *latencies_us),),
        shares,
        cost.energy_mj * rate,
        (),
    )


def _stream(placed: Placed, network: Network, rate_hz: float | None, count: int) -> Traffic:
    """Return the traffic of a model; one that takes no time would never end, and comes seldom."""
    endless = rate_hz is None and _latency_us(placed, network.name) <= 0
    return Traffic(network.name, 1.0 if endless else rate_hz, in_flight=count)


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
