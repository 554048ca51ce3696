"""Times, energy and rates of a placement of one network, for reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.partition.costs.errors import Interval, Spread, largest, total
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.rates import busiest_us, frames_per_second
from toolkit.partition.solver.assess import Cost, assess, share_of
from toolkit.partition.solver.problem import Network, Placement, Problem

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """One placement: the times of one frame, and frames per second with frames in flight.

    `busiest_us` is the load of the busiest processor; `gpu_us` how long the GPU is busy, crossings
    included; `frames_per_second` is simulated, with queues and contention for the memory.
    `energy_mj` is that of a frame, of which the idle board takes `idle_mj`: at a rate 0, because it
    takes that anyhow. `intervals`: where 80 % of boards and models like these are, by field.
    """

    name: str
    latency_us: float
    busiest_us: float
    gpu_us: float
    energy_mj: float
    idle_mj: float
    frames_per_second: float
    segments: int
    crossings: int
    broken: tuple[str, ...] = ()
    intervals: Mapping[str, Bounds] = field(default_factory=dict)


def figures(
    name: str,
    problem: Problem,
    network: Network,
    placement: Placement,
    costs: CostModel,
    *,
    together: bool,
    broken: tuple[str, ...] = (),
) -> Figures:
    """Return the figures of a placement; `broken`: the limits that it does not keep.

    `together`: frames are in flight together, so that they share the idle board's energy.
    """
    cost = assess(problem, network, placement[network.name])
    rate = frames_per_second(problem, network, placement)
    idle_mj, energy_mj = 0.0, cost.energy_mj
    if network.rate_hz is None:
        alone_mj = costs.idle_mj(cost.latency_us)
        idle_mj = costs.idle_mj(1e6 / rate) if together else alone_mj
        energy_mj += idle_mj - alone_mj
    return Figures(
        name=name,
        latency_us=cost.latency_us,
        busiest_us=busiest_us(problem, cost),
        gpu_us=cost.load_us.get("gpu", 0.0),
        energy_mj=energy_mj,
        idle_mj=idle_mj,
        frames_per_second=rate,
        segments=len(cost.segments),
        crossings=len(cost.crossings),
        broken=broken,
        intervals=_intervals(problem, cost, costs, rate, energy_mj),
    )


def _intervals(
    problem: Problem, cost: Cost, costs: CostModel, rate: float, energy_mj: float
) -> dict[str, Bounds]:
    """Return the intervals by field; none on a CPU, whose times are guesses."""
    if "gpu" not in problem.processors or cost.latency_us <= 0:
        return {}
    gpu, dla = costs.spread("gpu"), costs.spread("dla")
    spreads = {p: gpu if p == "gpu" else dla for p in problem.processors}
    parts = [(load, spreads[p]) for p, load in cost.load_us.items()]
    busy = largest(
        [total([(load * share_of(problem, p), spreads[p])]) for p, load in cost.load_us.items()]
    )
    latency = total(parts)
    energy = Interval(
        energy_mj,
        energy_mj * latency.low / latency.value,
        energy_mj * latency.high / latency.value,
    ).times(costs.spread("power"))
    times = busy.inverse
    return {
        "latency_us": (latency.low, latency.high),
        "frames_per_second": (rate * times.low / times.value, rate * times.high / times.value),
        "gpu_us": _bounds(cost.load_us["gpu"], gpu),
        "energy_mj": (energy.low, energy.high),
    }


def _bounds(value: float, spread: Spread) -> Bounds:
    return value * spread.low, value * spread.high
