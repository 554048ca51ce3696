"""The full rate of a placement: frames in flight, the busiest processor, contention for the memory.

With `in_flight` frames under way a frame ends each 1/X us, where X is the largest rate with

    X <= 1 / busiest(X)           the busiest processor works without a pause
    X <= in_flight / latency(X)   Little's law

Both times grow with X, as the others' traffic at that rate slows a processor down. No term falls
when a clock, a number of cores or the bandwidth falls, so that a faster board is never predicted
slower. A simulated queue has no such property: an order of first come, first served may get worse
when one step gets faster (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
"""

from dataclasses import dataclass

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import Cost, assess, share_of
from toolkit.partition.solver.problem import Network, Placement, Problem
from toolkit.partition.solver.simulate import Leg, legs_of

WAITING = 2  # frames beside those that run; with 1 a processor waits for crossings of another frame
BISECTIONS = 50


@dataclass(frozen=True, slots=True)
class FullRate:
    """Frames that come as fast as they go: how many are under way, and the latency of each."""

    frames_per_second: float
    latency_us: float
    in_flight: int


def busiest_us(problem: Problem, cost: Cost) -> float:
    """Return the load of a frame on the busiest processor."""
    return max(load * share_of(problem, p) for p, load in cost.load_us.items())


def full_rate(problem: Problem, network: Network, placement: Placement) -> FullRate:
    """Return the rate of a network alone on the board, as fast as it goes."""
    placed = placement[network.name]
    cost = assess(problem, network, placed)
    if cost.latency_us <= 0:  # a model of free nodes takes no time
        return FullRate(float("inf"), 0.0, 1)
    used = set(placed.values())
    cores = len(used) + (problem.alternate_dlas and "dla0" in used)
    if cores == 1:
        return FullRate(1e6 / cost.latency_us, cost.latency_us, 1)
    count = cores + WAITING
    legs = legs_of(problem, network, cost)
    low, high = 1 / cost.latency_us, 1 / busiest_us(problem, cost)  # frames per us
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        low, high = (rate, high) if _sustains(problem, legs, rate, count) else (low, rate)
    return FullRate(low * 1e6, max(cost.latency_us, count / low), count)


def _sustains(problem: Problem, legs: tuple[Leg, ...], rate: float, count: int) -> bool:
    """Return True if processors and `count` frames in flight allow a rate in frames per us."""
    moved: dict[Processor | None, float] = {}  # GB/s times us
    for leg in legs:
        moved[leg.processor] = moved.get(leg.processor, 0.0) + leg.memory_gbps * leg.time_us
    loads: dict[Processor | None, float] = {}
    for leg in legs:
        time_us = leg.time_us
        if problem.contention is not None and leg.processor is not None:
            moved_share = moved[leg.processor] * share_of(problem, leg.processor)
            others_gbps = (sum(moved.values()) - moved_share) * rate
            time_us /= problem.contention.speed(leg.processor, leg.memory_gbps, others_gbps)
        loads[leg.processor] = loads.get(leg.processor, 0.0) + time_us
    busiest = max(load * share_of(problem, p) for p, load in loads.items() if p is not None)
    return rate * busiest <= 1 and rate * sum(loads.values()) <= count
