"""Ranges of tensors: exact extremes and a histogram of |x| that is a value and can be merged.

e is the least exponent with amax < 2^e. The octave [2^(k-1), 2^k) has 2048 bins of width 2^(k-12)
for each k in e - `ZOOM` < k <= e, and [0, 2^(e-ZOOM)) has 4096 bins of the width that its upper
half asks for. So small numbers have fine bins even beside a far outlier, and a plain histogram of
4096 equal bins over [0, 2^(e-z)) follows for each zoom z <= ZOOM (`Histogram.linear`).

Every width is a power of two that depends on k alone. When the range doubles, an octave keeps its
bins, and the lowest 4096 merge in pairs, floor(floor(x / w) / 2) = floor(x / 2w), to the lower half
of the new ones: no count is lost or moved. So the histogram of a data set does not depend on how it
was cut into pieces or in which order the pieces were merged, down to the last bit. Since
2^(e-1) <= amax, at least 2048 of the 4096 equal bins lie within the data's own range at any time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError

BINS = 4096
"""Equal bins over a range."""
ZOOM = 6
"""How often the range can be halved without losing bins."""
ALL_BINS = BINS + ZOOM * (BINS // 2)
LEAST_EXPONENT = -99
"""The range never shrinks below 2^-99, so that 1 / w stays a finite float32."""
DEAD_BELOW = math.ldexp(1.0, LEAST_EXPONENT - 1)
"""A tensor whose amax is below 2^-100 carries no signal."""

_LOG2_BINS = BINS.bit_length() - 1
_OCTAVE = BINS // 2
_BLOCK = 1 << 15  # elements: the block and its bin numbers stay in the second-level cache
_WORKING_DTYPE: dict[str, type[np.floating[Any]]] = {
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}


def _no_counts() -> NDArray[np.int64]:
    return np.zeros(ALL_BINS, np.int64)


@dataclass(frozen=True, eq=False)
class Histogram:
    """What was seen of one tensor; the default value has seen nothing.

    `bins`: int64 [ALL_BINS], the counts in the bins above, from small to large; `edges` says
    where each begins. `exponent`: e. `minimum`, `maximum`: exact, in the tensor's unit.
    """

    bins: NDArray[np.int64] = field(default_factory=_no_counts)
    exponent: int = LEAST_EXPONENT
    minimum: float = math.inf
    maximum: float = -math.inf

    def __post_init__(self) -> None:
        self.bins.flags.writeable = False

    @property
    def amax(self) -> float:
        """max |x|, exact; 0 if nothing was seen."""
        return max(self.maximum, -self.minimum, 0.0)

    @property
    def counts(self) -> NDArray[np.int64]:
        """`linear(0)`: the whole range in equal bins of `width`."""
        return self.linear(0)

    @property
    def width(self) -> float:
        """Width of the bins of `counts`, a power of two."""
        return self.linear_width(0)

    def linear(self, zoom: int) -> NDArray[np.int64]:
        """int64 [BINS]: counts[i] elements have i * w <= |x| < (i + 1) * w, w = `linear_width`.

        The range is [0, 2^(e - zoom)); larger elements are in no bin. 0 <= zoom <= ZOOM.
        """
        counts = self.bins[:BINS]
        for start in range(BINS, BINS + (ZOOM - zoom) * _OCTAVE, _OCTAVE):
            counts = np.concatenate((_paired(counts), self.bins[start : start + _OCTAVE]))
        counts.flags.writeable = False
        return counts

    def linear_width(self, zoom: int) -> float:
        """Width of the bins of `linear(zoom)`, a power of two."""
        return math.ldexp(1.0, self.exponent - zoom - _LOG2_BINS)

    @property
    def edges(self) -> NDArray[np.float64]:
        """float64 [ALL_BINS + 1]: bins[i] elements have edges[i] <= |x| < edges[i + 1]."""
        return np.ldexp(_edges(), self.exponent)

    @cached_property
    def elements(self) -> int:
        """How many numbers were seen."""
        return int(self.bins.sum())

    @property
    def dead(self) -> bool:
        """True if every element seen is zero (|x| < 2^-100)."""
        return self.amax < DEAD_BELOW

    @property
    def constant(self) -> bool:
        """True if every element seen is the same number."""
        return self.minimum == self.maximum


Counts = Callable[[NDArray[np.uint16]], NDArray[np.int64]]
"""Bin numbers -> int64 [ALL_BINS]: how often each occurs."""


def observe(
    tensor: str, values: NDArray[Any], sample: int, count: Counts | None = None
) -> Histogram:
    """The histogram of one array of float16, float32 or float64, any shape.

    A NaN or an infinity, or another dtype, is an error that names `tensor` and `sample` (0-based).
    """
    working = _WORKING_DTYPE.get(values.dtype.name)
    if working is None:
        raise CalibrationError(
            f"tensor '{tensor}' is {values.dtype.name} in sample {sample}, but only float16, "
            "float32 and float64 have a range: leave it out of the calibrated tensors"
        )
    if values.size == 0:
        return Histogram()
    # A view where the memory allows it; float16 is widened, because numpy computes it one by one.
    flat = np.ravel(values, order="K").astype(working, copy=False)
    # Adding zero turns -0.0 into 0.0, which min() and max() would otherwise pick by order.
    minimum, maximum = float(flat.min()) + 0.0, float(flat.max()) + 0.0
    if not (math.isfinite(minimum) and math.isfinite(maximum)):
        raise _not_finite(tensor, flat, sample)
    exponent = exponent_of(max(maximum, -minimum))
    bins = (count or numpy_counts)(_bin_numbers(flat, exponent))
    return Histogram(bins, exponent, minimum, maximum)


def exponent_of(amax: float) -> int:
    """The exponent of the range that holds `amax`."""
    # frexp gives 0 for 0.0; a sample of zeros must not widen the range of a small tensor.
    return max(math.frexp(amax)[1], LEAST_EXPONENT) if amax else LEAST_EXPONENT


def merge(one: Histogram, other: Histogram) -> Histogram:
    """The histogram of both data together: associative, commutative, exact."""
    exponent = max(one.exponent, other.exponent)
    bins = _widened(one, exponent) + _widened(other, exponent)
    return Histogram(
        bins, exponent, min(one.minimum, other.minimum), max(one.maximum, other.maximum)
    )


def numpy_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Count bin numbers with NumPy alone; whoever has something faster may bring it."""
    return np.bincount(numbers, minlength=ALL_BINS).astype(np.int64, copy=False)


def _bin_numbers(flat: NDArray[Any], exponent: int) -> NDArray[np.uint16]:
    """The bin of each element, block by block.

    With y = |x| / w, w the least width, the bin is floor(y) below 2048 and, above, 2048 + the steps
    of the 11 leading bits after the first and of the exponent from 2048 to y: exactly the bits of
    the number. Scaling by a power of two is exact, so no element is put beside its bin.
    """
    per_width = flat.dtype.type(math.ldexp(1.0, _LOG2_BINS + ZOOM - exponent))
    block = min(_BLOCK, flat.size)
    low, high = np.empty(block, flat.dtype), np.empty(block, flat.dtype)
    steps = high.view(np.int32 if flat.dtype == np.float32 else np.int64)
    shift = np.finfo(flat.dtype).nmant - (_LOG2_BINS - 1)
    knee, begin = _constants(flat.dtype.name)
    numbers = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        n = part.size
        np.abs(part, out=low[:n])
        np.multiply(low[:n], per_width, out=low[:n])
        np.maximum(low[:n], knee[:n], out=high[:n])
        np.minimum(low[:n], knee[:n], out=low[:n])
        np.right_shift(steps[:n], shift, out=steps[:n])
        np.subtract(steps[:n], begin, out=steps[:n])
        # Truncation is floor: y >= 0. To int64 by way of steps.dtype, which is faster.
        np.add(steps[:n], low[:n].astype(steps.dtype), out=steps[:n])
        numbers[start : start + n] = steps[:n]
    return numbers


@lru_cache(maxsize=2)
def _constants(dtype: str) -> tuple[NDArray[Any], int]:
    """2048.0 as an array of a block, since numpy is slower with a scalar, and the steps of it."""
    knee = np.full(_BLOCK, _OCTAVE, dtype)
    whole = np.int32 if dtype == "float32" else np.int64
    return knee, int(knee[:1].view(whole)[0]) >> (np.finfo(dtype).nmant - (_LOG2_BINS - 1))


def _paired(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = counts.reshape(-1, 2).sum(axis=1)
    return sums


def _widened(histogram: Histogram, exponent: int) -> NDArray[np.int64]:
    """The bins of `histogram` for the range 2^exponent."""
    bins = histogram.bins
    # After so many doublings everything lies in the lowest bin and stays there.
    for _ in range(min(exponent - histogram.exponent, ZOOM + _LOG2_BINS)):
        empty = np.zeros(_OCTAVE, np.int64)
        bins = np.concatenate((_paired(bins[:BINS]), bins[BINS:], empty))
    return bins


@lru_cache(maxsize=1)
def _edges() -> NDArray[np.float64]:
    """`Histogram.edges` of exponent 0."""
    lowest = np.arange(BINS) * 2.0 ** -(ZOOM + _LOG2_BINS)
    step = np.arange(_OCTAVE, BINS)
    octaves = [np.ldexp(step, zoom - ZOOM + 1 - _LOG2_BINS) for zoom in range(ZOOM)]
    edges = np.concatenate([lowest, *octaves, [1.0]])
    edges.flags.writeable = False
    return edges


def _not_finite(tensor: str, flat: NDArray[Any], sample: int) -> CalibrationError:
    nans, infinities = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
    return CalibrationError(
        f"tensor '{tensor}' holds {nans} NaN and {infinities} infinite of {flat.size} numbers in "
        f"sample {sample}: look for an overflow in the model or a wrong preprocessing"
    )
