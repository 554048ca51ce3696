"""Slowdown of processors by shared memory, published by others: for tests of the simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from device.engine.manifest import Processor


@dataclass(frozen=True, slots=True)
class Region:
    """Up to `below_gbps`, the loss of speed in percent: (demand + offset) * percent_per_gbps."""

    below_gbps: float
    offset_gbps: float
    percent_per_gbps: float


@dataclass(frozen=True, slots=True)
class OwnDemand:
    """Speed as a piecewise linear function of the own demand, if anything else runs."""

    regions: Mapping[Processor, Sequence[Region]]

    def speed(self, processor: Processor, own_gbps: float, other_gbps: float) -> float:
        """Return the share of its speed that a processor keeps."""
        if other_gbps <= 0 or processor not in self.regions:
            return 1.0
        rows = self.regions[processor]
        row = next((row for row in rows if own_gbps < row.below_gbps), rows[-1])
        lost = (own_gbps + row.offset_gbps) * row.percent_per_gbps / 100
        return min(1.0, max(_MIN_SPEED, 1 - lost))


@dataclass(frozen=True, slots=True)
class SharedBandwidth:
    """Speed by fair shares: if demands exceed the bandwidth, all lose the same share."""

    gbps: float

    def speed(self, processor: Processor, own_gbps: float, other_gbps: float) -> float:
        """Return the share of its speed that a processor keeps."""
        demand = own_gbps + other_gbps
        return 1.0 if own_gbps <= 0 or demand <= self.gbps else self.gbps / demand


_MIN_SPEED = 0.05  # keeps time finite where a line is extrapolated

_XAVIER_DLA = (Region(27.9, 0.0, 1.0), Region(float("inf"), 49.0, 0.35))
# Lines fitted by PCCS (MICRO 2021) on Jetson AGX Xavier, as HaX-CoNN's artifact holds them
# (github.com/ismetdagli/HaX-CoNN at 87f5f25, src/z3_solver_multi_dnn.py).
XAVIER = OwnDemand(
    {
        "gpu": (
            Region(38.1, 0.0, 4.9 / 127.5),
            Region(96.2, 0.0, 1.0),
            Region(float("inf"), -41.9, 1.11),
        ),
        "dla0": _XAVIER_DLA,
        "dla1": _XAVIER_DLA,
    }
)
