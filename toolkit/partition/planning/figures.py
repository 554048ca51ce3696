"""Times, energy and rates of a placement of one network, for reports."""

from dataclasses import dataclass

from toolkit.partition.solver.assess import Cost, share_of
from toolkit.partition.solver.problem import Problem


@dataclass(frozen=True, slots=True)
class Figures:
    """One placement: the times of one frame, and frames per second with frames in flight.

    `busiest_us` is the load of the busiest processor; `gpu_us` how long the GPU is busy, crossings
    included; `energy_mj` what running adds to the idle board.
    """

    name: str
    latency_us: float
    busiest_us: float
    gpu_us: float
    energy_mj: float
    segments: int
    crossings: int
    broken: tuple[str, ...] = ()

    @property
    def frames_per_second(self) -> float:
        """The rate at which the busiest processor is never idle."""
        return 1e6 / self.busiest_us if self.busiest_us > 0 else float("inf")


def figures(name: str, problem: Problem, cost: Cost, broken: tuple[str, ...] = ()) -> Figures:
    """Return the figures of an assessed placement; `broken`: the limits that it does not keep."""
    return Figures(
        name=name,
        latency_us=cost.latency_us,
        busiest_us=max(load * share_of(problem, p) for p, load in cost.load_us.items()),
        gpu_us=cost.load_us.get("gpu", 0.0),
        energy_mj=cost.energy_mj,
        segments=len(cost.segments),
        crossings=len(cost.crossings),
        broken=broken,
    )
