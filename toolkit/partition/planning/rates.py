"""The rate that a placement sustains: frames in flight, queues, contention for the memory."""

from collections.abc import Mapping

from device.engine.manifest import Processor
from toolkit.partition.solver.assess import Cost, assess, share_of
from toolkit.partition.solver.problem import Network, Placement, Problem
from toolkit.partition.solver.simulate import Traffic, simulate

FRAMES = 200  # simulated of the slowest model; enough for a 99th percentile
WARMUP = 10  # frames before statistics start


def in_flight(problem: Problem, placed: Mapping[str, Processor]) -> int:
    """Return how many frames of a model without a rate are under way: one on each processor that
    it uses and, where there are several, one that waits.
    """
    used = set(placed.values())
    cores = len(used) + (problem.alternate_dlas and "dla0" in used)
    return cores + 1 if cores > 1 else 1


def busiest_us(problem: Problem, cost: Cost) -> float:
    """Return the load of a frame on the busiest processor."""
    return max(load * share_of(problem, p) for p, load in cost.load_us.items())


def frames_per_second(problem: Problem, network: Network, placement: Placement) -> float:
    """Return the rate of a network alone on the board, as fast as it goes."""
    placed = placement[network.name]
    cost = assess(problem, network, placed)
    if cost.latency_us <= 0:  # a model of free nodes takes no time
        return float("inf")
    count = in_flight(problem, placed)
    if count == 1:
        return 1e6 / cost.latency_us
    alone = Problem(
        networks=(network,),
        processors=problem.processors,
        segment_us=problem.segment_us,
        crossing_on=problem.crossing_on,
        contention=problem.contention,
        alternate_dlas=problem.alternate_dlas,
    )
    report = simulate(
        alone,
        {network.name: placed},
        (Traffic(network.name, in_flight=count),),
        duration_us=FRAMES * cost.latency_us,
        warmup_us=WARMUP * cost.latency_us,
    )
    return report.of(network.name).throughput_hz
