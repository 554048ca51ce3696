"""Times, energy and rates of a placement of one network, for reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from toolkit.partition.costs.errors import Interval, Spread, largest, total
from toolkit.partition.costs.model import CostModel
from toolkit.partition.planning.rates import busiest_us, full_rate
from toolkit.partition.solver.assess import Cost, assess, idle_mj, share_of
from toolkit.partition.solver.problem import Network, Placement, Problem

Bounds = tuple[float, float]
GPU_ONLY = "GPU only"


@dataclass(frozen=True, slots=True)
class Figures:
    """One placement: the times of one frame, and frames per second with frames in flight.

    `busiest_us` is the load of the busiest processor; `gpu_us` how long the GPU is busy, crossings
    included; `frames_per_second` is the full rate, with contention for the memory (`rates.py`).
    `energy_mj` is that of a frame at full rate, of which the idle board takes `idle_mj` from one
    frame to the next; at a given rate that is 0, because the board takes it anyhow.
    `intervals`: where 80 % of boards and models like these are, by field.
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
    broken: tuple[str, ...] = (),
) -> Figures:
    """Return the figures of a placement; `broken`: the limits that it does not keep."""
    cost = assess(problem, network, placement[network.name])
    rate = full_rate(problem, network, placement).frames_per_second
    idle = idle_mj(problem, 1e6 / rate)
    energy_mj = cost.energy_mj + idle
    return Figures(
        name=name,
        latency_us=cost.latency_us,
        busiest_us=busiest_us(problem, cost),
        gpu_us=cost.load_us.get("gpu", 0.0),
        energy_mj=energy_mj,
        idle_mj=idle,
        frames_per_second=rate,
        segments=len(cost.segments),
        crossings=len(cost.crossings),
        broken=broken,
        intervals=_intervals(problem, cost, costs, rate, energy_mj),
    )


def of_frames(row: Figures, batch: int) -> Figures:
    """Return the figures of runs with rates and energies of one frame of their batch."""
    factors = {"frames_per_second": batch, "energy_mj": 1 / batch}
    return replace(
        row,
        energy_mj=row.energy_mj / batch,
        idle_mj=row.idle_mj / batch,
        frames_per_second=row.frames_per_second * batch,
        intervals={
            name: (low * factors.get(name, 1), high * factors.get(name, 1))
            for name, (low, high) in row.intervals.items()
        },
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
    times = busy.inverse
    return {
        "latency_us": (latency.low, latency.high),
        "frames_per_second": (rate * times.low / times.value, rate * times.high / times.value),
        "gpu_us": _bounds(cost.load_us["gpu"], gpu),
        "energy_mj": energy_bounds(energy_mj, latency, costs),
    }


def energy_bounds(energy_mj: float, time: Interval, costs: CostModel) -> Bounds:
    """Return the bounds of an energy: the errors of its time, and of the power."""
    low, high = (energy_mj * bound / time.value for bound in (time.low, time.high))
    energy = Interval(energy_mj, low, high).times(costs.spread("power"))
    return energy.low, energy.high


def _bounds(value: float, spread: Spread) -> Bounds:
    return value * spread.low, value * spread.high
