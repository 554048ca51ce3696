"""How far off predictions are: intervals that hold 80 % of rows like the figure.

All in logarithms of published over predicted, of rows that were predicted without their model or
their board, or that no fit has seen (`scripts/cost_errors.py`). Of the GPU, the rows like a figure
are those with similar shares of its time (`gpu.TimeShares`), on its generation, in its precision:
localised conformal prediction with a Gaussian kernel. Each distance from the fit widens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from device.engine.manifest import Precision
from toolkit.partition.costs.fusion import FusedKernel
from toolkit.partition.costs.gpu import TimeShares

Part = Literal["gpu", "dla", "power"]
# What lies between a figure and the rows of the fit. `int8_elsewhere`: INT8 on a board outside the
# fit; `batch`: few rows are in batches.
Distance = Literal[
    "board", "network", "generation", "int8", "int8_elsewhere", "fp32", "batch"
]  # fmt: skip
# How much wider at each distance, and a standard deviation from the nearest row: too few rows lie
# there to fit it.
FARTHER = 1.1
# The share of rows beyond each bound. Below a tenth: boards and networks that are left out of the
# bounds, too, have their own offsets (tests/partition/test_cost_errors.py).
TAIL = 0.08
# Squared distances of unlike rows; of shares, 1 is a standard deviation.
OTHER_GENERATION = 4.0
OTHER_PRECISION = 1.0
OTHER_BATCH = 1.0
BACKGROUND = 0.05  # weight of all rows, like the figure or not, where the nearest row is equal
NEAREST = 0.02  # that a bound is away at least
Array = npt.NDArray[np.float64]


class ErrorScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The errors of the DLA or of power: `low` and `high` in scales.

    `boards`: how much wider on a board whose own rows are farther off than others, at least 1.
    """

    rows: int
    scale: float
    low: float
    high: float
    boards: dict[str, float]

    def spread(self, board: str) -> "Spread":
        """Return the errors of figures of a board."""
        scale = self.scale * self.boards.get(board, 1.0)
        return Spread(math.exp(self.low * scale), math.exp(self.high * scale))


class ErrorRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of the GPU: what it is compared by, and its error.

    `sm`: the generation; `error`: divided by `widening`; `weight`: in the quantiles.
    """

    sm: int
    precision: Precision
    batch: bool
    shares: TimeShares
    error: float = 0.0
    weight: float = 1.0


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file `configs/errors.json`, written by `scripts/fit_costs.py`."""

    gpu: tuple[ErrorRow, ...]
    dla: ErrorScale
    power: ErrorScale


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


def batched(kernels: Sequence[FusedKernel]) -> bool:
    """Return True if the first product of a network is of several frames."""
    head = next((kernel.head for kernel in kernels if kernel.kind == "matrix"), None)
    shape = head.outputs[0].shape if head is not None and head.outputs else None
    first = shape[0] if shape else None
    return isinstance(first, int) and first > 1


def distances(
    precision: Precision,
    *,
    batch: bool,
    board_fitted: bool,
    generation_fitted: bool,
    network_fitted: bool = False,
) -> frozenset[Distance]:
    """Return all distances of a figure of the GPU."""
    holds: dict[Distance, bool] = {
        "board": not board_fitted,
        "network": not network_fitted,
        "generation": not generation_fitted,
        "int8": precision == "int8",
        "int8_elsewhere": precision == "int8" and not board_fitted,
        "fp32": precision == "fp32",
        "batch": batch,
    }
    return frozenset(name for name, present in holds.items() if present)


def widening(apart: Iterable[Distance]) -> float:
    """Return how much wider the bounds are at some distances."""
    return math.prod(FARTHER for _ in apart)


class ErrorRows:
    """The errors of the GPU by what rows are compared by."""

    def __init__(self, rows: Sequence[ErrorRow]) -> None:
        self._sm = np.array([row.sm for row in rows])
        self._precision = np.array([row.precision for row in rows])
        self._batch = np.array([row.batch for row in rows])
        shares = np.array([row.shares for row in rows])
        self._steps = np.maximum(np.std(shares, axis=0), 1e-3)
        self._shares = shares / self._steps
        self._errors = np.array([row.error for row in rows])
        self._weights = np.array([row.weight for row in rows])
        self._weights /= np.sum(self._weights)

    def spread(self, figure: ErrorRow, apart: Iterable[Distance]) -> "Spread":
        """Return the errors of figures like one, at some distances from the fit."""
        away = np.sum((self._shares - np.array(figure.shares) / self._steps) ** 2, axis=1)
        nearest = float(np.min(away))
        away += OTHER_GENERATION * (self._sm != figure.sm)
        away += OTHER_PRECISION * (self._precision != figure.precision)
        away += OTHER_BATCH * (self._batch != figure.batch)
        weights = self._weights * np.exp((np.min(away) - away) / 2)
        alike = (1 - BACKGROUND) * math.exp(-nearest / 2)
        weights = alike * weights / np.sum(weights) + (1 - alike) * self._weights
        low, high = (weighted_quantile(self._errors, weights, q) for q in (TAIL, 1 - TAIL))
        wider = widening(apart) * FARTHER ** math.sqrt(nearest)
        return Spread(math.exp(wider * min(-NEAREST, low)), math.exp(wider * max(NEAREST, high)))


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """Return the value below which a share of the weights is."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share, below / np.sum(weights), values[order]))


def total(parts: Iterable[tuple[float, Spread]]) -> Interval:
    """Return the sum of figures whose errors are independent of each other."""
    terms = tuple(parts)
    middle = sum(size * spread.centre for size, spread in terms)
    half = math.hypot(*(size * spread.half for size, spread in terms))
    value = sum(size for size, _ in terms)
    return Interval(value, max(0.0, min(value, middle - half)), max(value, middle + half))


def largest(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of the largest of several figures."""
    return Interval(
        max(i.value for i in intervals),
        max(i.low for i in intervals),
        max(i.high for i in intervals),
    )
