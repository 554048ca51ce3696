"""How far off predictions are: intervals that hold 80 % of rows like the figure.

The bounds are percentiles of published over predicted, of rows that were predicted without their
model (devices of the fit), or that no fit has seen (other devices). Rows are alike by processor,
precision and class of network. Groups of few rows take a wider group.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from device.engine.manifest import Precision
from toolkit.partition.costs.fusion import FusedKernel

Part = Literal["gpu", "dla", "power"]
NetworkClass = Literal["attention", "grouped", "plain"]
FEWEST = 20  # rows of a group
# The share of rows beyond each bound. It is below a tenth because rows of one model are alike: of
# models that are left out of the bounds, too, 76 % of rows are within (tests/test_cost_errors.py).
TAIL = 0.08


class ErrorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of one group; None matches all. `low` and `high`: published over predicted."""

    part: Part
    precision: Precision | None = None
    network: NetworkClass | None = None
    fitted: bool | None = None  # whether the rows' device was in the fit
    rows: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Factors on a prediction between which 80 % of such rows are."""

    low: float
    high: float

    @property
    def centre(self) -> float:
        """The middle, relative to the prediction."""
        return (self.low + self.high) / 2

    @property
    def half(self) -> float:
        """Half the width, relative to the prediction."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 80 % interval, in the figure's unit."""

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> "Interval":
        """A rate per second of a time in microseconds."""
        times = (self.value, self.high, self.low)
        return Interval(*(1e6 / time if time > 0 else math.inf for time in times))

    def times(self, spread: Spread) -> "Interval":
        """Return the interval of a product with an independent factor of its own errors."""
        if not self.value:
            return self
        centre = (self.low + self.high) / 2
        half = (self.high - self.low) / 2 / centre
        widened = math.hypot(half, spread.half / spread.centre)
        middle = centre * spread.centre
        return Interval(self.value, max(0.0, middle * (1 - widened)), middle * (1 + widened))


def network_class(kernels: Sequence[FusedKernel]) -> NetworkClass:
    """Return the class of a network: products of activations, grouped convolutions, or neither."""
    heads = [kernel.head for kernel in kernels if kernel.kind == "matrix"]
    if any(
        head.op == "MatMul" and (right := head.input(1)) is not None and not right.constant
        for head in heads
    ):
        return "attention"
    grouped = any(head.op == "Conv" and head.integer("group", 1) > 1 for head in heads)
    return "grouped" if grouped else "plain"


def spread_of(
    rows: Iterable[ErrorRow],
    part: Part,
    precision: Precision,
    network: NetworkClass,
    *,
    fitted: bool,
) -> Spread:
    """Return the errors of the narrowest group that holds the figure.

    Raises ValueError: there is no group of the part.
    """
    key = (precision, network, fitted)
    matches = [
        row
        for row in rows
        if row.part == part
        and all(
            own is None or own == here
            for own, here in zip((row.precision, row.network, row.fitted), key, strict=True)
        )
    ]
    if not matches:
        raise ValueError(f"no errors of {part} are known")
    narrowest = max(matches, key=_width)
    return Spread(narrowest.low, narrowest.high)


def _width(row: ErrorRow) -> tuple[bool, bool, bool]:
    return row.precision is not None, row.network is not None, row.fitted is not None


def total(parts: Iterable[tuple[float, Spread]]) -> Interval:
    """Return the sum of figures whose errors are independent of each other."""
    terms = tuple(parts)
    middle = sum(size * spread.centre for size, spread in terms)
    half = math.hypot(*(size * spread.half for size, spread in terms))
    return Interval(sum(size for size, _ in terms), max(0.0, middle - half), middle + half)


def largest(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of the largest of several figures."""
    return Interval(
        max(i.value for i in intervals),
        max(i.low for i in intervals),
        max(i.high for i in intervals),
    )
