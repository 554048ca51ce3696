"""How far off predictions are: intervals that hold 80 % of rows like the figure.

An interval is a scale times two quantiles, all in logarithms of published over predicted. The
scale grows by a factor with every distance from the fit: another board or generation of GPU, other
precisions, layer kinds that few rows have, batches. It is fitted to rows that were predicted
without their model or their board, or that no fit has seen (`scripts/cost_errors.py`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from device.engine.manifest import Precision
from toolkit.partition.costs.fusion import FusedKernel
from toolkit.partition.costs.gpu import CURVES

Part = Literal["gpu", "dla", "power"]
# What lies between a figure and the rows of the fit. `int8_elsewhere`: INT8 on a board outside the
# fit; `rectified`: few activations have an exponential, unlike the detectors that most rows are of.
Distance = Literal[
    "board", "generation", "int8", "int8_elsewhere", "fp32", "batch", "rectified", "grouped",
    "attention",
]  # fmt: skip
FEW_CURVES = 0.2  # share of the products


class ErrorScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of a part: `scale` near the fit, `low` and `high` in scales.

    `factors`: how much wider at a distance; `boards`: how much wider on a board whose own rows are
    farther off than others, at least 1.
    """

    rows: int
    scale: float
    low: float
    high: float
    factors: dict[Distance, float]
    boards: dict[str, float]


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


def layer_kinds(kernels: Sequence[FusedKernel]) -> frozenset[Distance]:
    """Return the distances of a network that its layers make."""
    products = [kernel for kernel in kernels if kernel.kind == "matrix"]
    heads = [kernel.head for kernel in products]
    curved = sum(any(node.op in CURVES for node in kernel.nodes) for kernel in products)
    shape = heads[0].outputs[0].shape if heads and heads[0].outputs else None
    first = shape[0] if shape else None
    holds: dict[Distance, bool] = {
        "attention": any(
            head.op == "MatMul" and (right := head.input(1)) is not None and not right.constant
            for head in heads
        ),
        "grouped": any(head.op == "Conv" and head.integer("group", 1) > 1 for head in heads),
        "rectified": curved < FEW_CURVES * len(products),
        "batch": isinstance(first, int) and first > 1,
    }
    return frozenset(name for name, present in holds.items() if present)


def distances(
    kinds: Iterable[Distance], precision: Precision, *, board_fitted: bool, generation_fitted: bool
) -> frozenset[Distance]:
    """Return all distances of a figure of the GPU; `kinds`: see `layer_kinds`."""
    holds: dict[Distance, bool] = {
        "board": not board_fitted,
        "generation": not generation_fitted,
        "int8": precision == "int8",
        "int8_elsewhere": precision == "int8" and not board_fitted,
        "fp32": precision == "fp32",
    }
    return frozenset(kinds) | {name for name, present in holds.items() if present}


def spread_of(errors: ErrorScale, board: str, apart: Iterable[Distance]) -> Spread:
    """Return the errors of figures of a board at some distances from the fit."""
    scale = errors.scale * errors.boards.get(board, 1.0)
    scale *= math.prod(errors.factors.get(distance, 1.0) for distance in apart)
    return Spread(math.exp(errors.low * scale), math.exp(errors.high * scale))


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
