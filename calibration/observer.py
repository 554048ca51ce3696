"""Ranges of tensors: exact extremes and a histogram of |x| that is a value and can be merged.

The histogram has `BINS` bins of width w = 2^(e - 12) that cover [0, 2^e), where e is the least
exponent with amax < 2^e. Because every width is a power of two, a range of 2^e nests exactly in
one of 2^(e+1): bins merge in pairs, floor(floor(x / w) / 2) = floor(x / 2w), and no count is lost
or moved. So the histogram of a data set does not depend on how it was cut into pieces or in which
order the pieces were merged, down to the last bit. Since 2^(e-1) <= amax, at least half of the
bins (2048) lie within the data's own range at any time.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError

BINS = 4096
LEAST_EXPONENT = -99
"""The range never shrinks below 2^-99, so that 1 / w stays a finite float32."""
DEAD_BELOW = math.ldexp(1.0, LEAST_EXPONENT - 1)
"""A tensor whose amax is below 2^-100 carries no signal."""

_LOG2_BINS = BINS.bit_length() - 1
_BLOCK = 1 << 15  # elements: the block and its bin numbers stay in the second-level cache
_WORKING_DTYPE: dict[str, type[np.floating[Any]]] = {
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}


def _no_counts() -> NDArray[np.int64]:
    return np.zeros(BINS, np.int64)


@dataclass(frozen=True, eq=False)
class Histogram:
    """What was seen of one tensor; the default value has seen nothing.

    `counts`: int64 [BINS]; counts[i] elements have i * w <= |x| < (i + 1) * w, w = `width`.
    `exponent`: the bins cover [0, 2^exponent). `minimum`, `maximum`: exact, in the tensor's unit.
    """

    counts: NDArray[np.int64] = field(default_factory=_no_counts)
    exponent: int = LEAST_EXPONENT
    minimum: float = math.inf
    maximum: float = -math.inf

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False

    @property
    def amax(self) -> float:
        """max |x|, exact; 0 if nothing was seen."""
        return max(self.maximum, -self.minimum, 0.0)

    @property
    def width(self) -> float:
        """Width of one bin, a power of two."""
        return math.ldexp(1.0, self.exponent - _LOG2_BINS)

    @cached_property
    def elements(self) -> int:
        """How many numbers were seen."""
        return int(self.counts.sum())

    @property
    def dead(self) -> bool:
        """True if every element seen is zero (|x| < 2^-100)."""
        return self.amax < DEAD_BELOW

    @property
    def constant(self) -> bool:
        """True if every element seen is the same number."""
        return self.minimum == self.maximum


def observe(tensor: str, values: NDArray[Any], sample: int) -> Histogram:
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
    amax = max(maximum, -minimum)
    # frexp gives 0 for 0.0; a sample of zeros must not widen the range of a small tensor.
    exponent = max(math.frexp(amax)[1], LEAST_EXPONENT) if amax else LEAST_EXPONENT
    return Histogram(_count(flat, exponent), exponent, minimum, maximum)


def merge(one: Histogram, other: Histogram) -> Histogram:
    """The histogram of both data together: associative, commutative, exact."""
    exponent = max(one.exponent, other.exponent)
    counts = _coarsened(one, exponent) + _coarsened(other, exponent)
    return Histogram(
        counts, exponent, min(one.minimum, other.minimum), max(one.maximum, other.maximum)
    )


def _count(flat: NDArray[Any], exponent: int) -> NDArray[np.int64]:
    """Count |x| / w, block by block; scaling by a power of two is exact, so no bin is missed."""
    per_width = flat.dtype.type(math.ldexp(1.0, _LOG2_BINS - exponent))
    block = min(_BLOCK, flat.size)
    scaled, bins = np.empty(block, flat.dtype), np.empty(block, np.intp)
    counts = np.zeros(BINS, np.int64)
    for start in range(0, flat.size, block):
        part = flat[start : start + block]
        size = part.size
        np.abs(part, out=scaled[:size])
        np.multiply(scaled[:size], per_width, out=scaled[:size])
        bins[:size] = scaled[:size]  # truncation is floor: |x| >= 0
        counts += np.bincount(bins[:size], minlength=BINS)
    return counts


def _coarsened(histogram: Histogram, exponent: int) -> NDArray[np.int64]:
    """The counts of `histogram` in the wider bins of range 2^exponent."""
    merged_bins = 1 << min(exponent - histogram.exponent, _LOG2_BINS)
    counts = np.zeros(BINS, np.int64)
    sums = histogram.counts.reshape(-1, merged_bins).sum(axis=1)
    counts[: sums.size] = sums
    return counts


def _not_finite(tensor: str, flat: NDArray[Any], sample: int) -> CalibrationError:
    nans, infinities = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
    return CalibrationError(
        f"tensor '{tensor}' holds {nans} NaN and {infinities} infinite of {flat.size} numbers in "
        f"sample {sample}: look for an overflow in the model or a wrong preprocessing"
    )
