"""Exact extremes of a tensor and a histogram of |x|, as a value that merges exactly.

e is the least exponent with amax < 2^e. The octave [2^(k-1), 2^k) has 2048 bins of width 2^(k-12)
for each k in e - `ZOOM` < k <= e, and [0, 2^(e-ZOOM)) has 4096 bins of the width of its upper half.
So small values have fine bins even beside a far outlier, and a linear histogram of 4096 equal bins
over [0, 2^(e-z)) follows for each zoom z <= ZOOM (`Histogram.linear`).

Every width is a power of two that depends on k alone. When the range doubles, an octave keeps its
bins, and the lowest 4096 merge in pairs, floor(floor(x / w) / 2) = floor(x / 2w), to the lower half
of the new ones: no count is lost or moved. So the histogram does not depend on how the data were
split or in which order parts were merged, down to the last bit. Since 2^(e-1) <= amax, at least
2048 of the 4096 equal bins are within the range of the data.
"""

import math
import threading
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
"""Number of times that the range can be halved without losing bins."""
ALL_BINS = BINS + ZOOM * (BINS // 2)
MIN_EXPONENT = -99
"""The range is at least 2^-99, so that 1 / w is a finite float32."""
DEAD_BELOW = math.ldexp(1.0, MIN_EXPONENT - 1)
"""A tensor whose amax is below 2^-100 carries no signal."""

_LOG2_BINS = BINS.bit_length() - 1
_OCTAVE = BINS // 2
OCTAVES = ZOOM + _LOG2_BINS
"""Octaves of fine bins: the lowest of `ALL_BINS` ends where the lowest octave starts."""
_SPARE = 8
FINE_BINS = _SPARE + OCTAVES * _OCTAVE
"""Number of fine bins; see `Tally`."""
MAX_PER_COUNT = 1 << 18
"""Elements per count, which wait as bin numbers of their tensor. Fewer are slower: a count has a
fixed cost over all bins, that of 100 000 elements in OpenCV."""
_BLOCK = 1 << 16  # elements; with their bin numbers they fit in the second-level cache
_THREAD = threading.local()
_MAX_COUNTED = 2**31 - 1
_MAX_FLOAT32_EXPONENT = 128
# By `dtype.char`, in either byte order; numpy puts `dtype.name` together at each call.
_WORKING_DTYPE: dict[str, type[np.floating[Any]]] = {
    "e": np.float32,
    "f": np.float32,
    "d": np.float64,
}
_UNSIGNED: dict[str, type[np.unsignedinteger[Any]]] = {"f": np.uint32, "d": np.uint64}


def _no_counts() -> NDArray[np.int64]:
    return np.zeros(ALL_BINS, np.int64)


@dataclass(frozen=True, eq=False)
class Histogram:
    """The histogram of one tensor; empty by default.

    `bins`: int64 [ALL_BINS], counts in ascending order of |x|; `edges`: where each bin starts.
    `exponent`: e. `minimum`, `maximum`: exact, in the tensor's unit.
    """

    bins: NDArray[np.int64] = field(default_factory=_no_counts)
    exponent: int = MIN_EXPONENT
    minimum: float = math.inf
    maximum: float = -math.inf

    def __post_init__(self) -> None:
        self.bins.flags.writeable = False

    @property
    def amax(self) -> float:
        """max |x|, exact; 0 if empty."""
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
        """Number of elements."""
        return int(self.bins.sum())

    @property
    def dead(self) -> bool:
        """True if every element is zero (|x| < 2^-100)."""
        return self.amax < DEAD_BELOW

    @property
    def constant(self) -> bool:
        """True if all elements are equal."""
        return self.minimum == self.maximum


Counts = Callable[[NDArray[np.uint16]], NDArray[np.int32]]
"""At most `MAX_PER_COUNT` bin numbers -> int32 [FINE_BINS]: the count of each."""


def observe(
    tensor: str, values: NDArray[Any], sample: int, count: Counts | None = None
) -> Histogram:
    """The histogram of one array; see `Tally.add`."""
    tally = Tally(tensor, count)
    tally.add(values, sample)
    return tally.histogram()


class Tally:
    """The histogram of one tensor while it grows.

    It counts in finer bins than those of `Histogram`: each of the `OCTAVES` octaves below 2^e has
    2048, and one bin is for all below. The number of a fine bin is a bit field of the floating
    point value, the exponent and 11 bits of the mantissa, so that the bin is exact.
    """

    def __init__(
        self,
        tensor: str,
        count: Counts | None = None,
        initial: Histogram | None = None,
    ) -> None:
        """`count`: None is `numpy_counts`. `initial`: the histogram to extend."""
        self._tensor = tensor
        self._count = count or numpy_counts
        self._buffer = np.empty(MAX_PER_COUNT, np.uint16)
        self._buffered = 0
        self._counts = np.zeros(FINE_BINS, np.int32)
        self._counted = 0
        self._merged = initial if initial is not None else Histogram()
        self._exponent = self._merged.exponent
        self._minimum, self._maximum = self._merged.minimum, self._merged.maximum

    def add(self, values: NDArray[Any], sample: int) -> None:
        """Count an array of float16, float32 or float64, any shape; it is not changed.

        Raises CalibrationError, naming the tensor and `sample` (0-based): the array holds NaN or
        infinities, or has another dtype. The tally is unusable afterwards.
        """
        working = _WORKING_DTYPE.get(values.dtype.char)
        if working is None:
            raise CalibrationError(
                f"tensor '{self._tensor}' is {values.dtype.name} in sample {sample}, but only "
                "float16, float32 and float64 have a range: leave it out of the calibrated tensors"
            )
        if self._exponent > _MAX_FLOAT32_EXPONENT:  # of an earlier array
            working = np.float64
        # A view if possible; float16 is widened because numpy has no vectorized float16.
        flat = np.ravel(values, order="K").astype(working, copy=False)
        if flat.size and self._minimum > self._maximum:  # the first array: widen once, not per part
            self._widen(max(float(flat.max()), -float(flat.min())))
        for start in range(0, flat.size, _BLOCK):
            if not self._add_block(flat[start : start + _BLOCK]):
                raise _not_finite(self._tensor, flat, sample)

    def histogram(self) -> Histogram:
        """The histogram so far."""
        self._spill()
        return Histogram(self._merged.bins, self._exponent, self._minimum, self._maximum)

    def _add_block(self, block: NDArray[Any]) -> bool:
        """Add at most `_BLOCK` elements; False if they are not finite."""
        # Adding zero turns -0.0 into 0.0; min() and max() would choose between them by order.
        minimum = float(np.minimum.reduce(block)) + 0.0
        maximum = float(np.maximum.reduce(block)) + 0.0
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            return False
        self._minimum = min(self._minimum, minimum)
        self._maximum = max(self._maximum, maximum)
        self._widen(max(maximum, -minimum))
        if self._buffered + block.size > self._buffer.size:
            self._count_buffered()
        end = self._buffered + block.size
        _number_bins(block, minimum < 0.0, self._exponent, self._buffer[self._buffered : end])
        self._buffered = end
        return True

    def _widen(self, amax: float) -> None:
        """Widen the range to hold `amax`, if it is finite."""
        exponent = exponent_of(amax) if math.isfinite(amax) else self._exponent
        if exponent > self._exponent:
            self._spill()
            self._exponent = exponent

    def _count_buffered(self) -> None:
        if not self._buffered:
            return
        if self._counted > _MAX_COUNTED - self._buffered:
            self._spill_counted()
        self._counts += self._count(self._buffer[: self._buffered])
        self._counted += self._buffered
        self._buffered = 0

    def _spill(self) -> None:
        self._count_buffered()
        if self._counted:
            self._spill_counted()

    def _spill_counted(self) -> None:
        """Merge the fine counts into `_merged`."""
        counted = Histogram(_coarser(self._counts), self._exponent)
        self._merged = merge(self._merged, counted)
        self._counts[:] = 0
        self._counted = 0


def exponent_of(amax: float) -> int:
    """The exponent of the smallest range that holds `amax`."""
    # frexp gives 0 for 0.0; a sample of zeros must not widen the range of a small tensor.
    return max(math.frexp(amax)[1], MIN_EXPONENT) if amax else MIN_EXPONENT


def merge(first: Histogram, second: Histogram) -> Histogram:
    """The histogram of both data together: associative, commutative, exact."""
    exponent = max(first.exponent, second.exponent)
    bins = _widened(first, exponent) + _widened(second, exponent)
    return Histogram(
        bins, exponent, min(first.minimum, second.minimum), max(first.maximum, second.maximum)
    )


def numpy_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Count bin numbers with NumPy; the default of `Counts`."""
    return np.bincount(numbers, minlength=FINE_BINS).astype(np.int32)


def _number_bins(
    values: NDArray[Any], signed: bool, exponent: int, numbers: NDArray[np.uint16]
) -> None:
    """Write the fine bin of each |x| of a block into `numbers`; `signed`: some may be below 0.

    The `_SPARE` numbers below the first octave all mean "below it". Neighbours use them in turn: if
    every second element is 0, as after a ReLU, incrementing one counter would stall the processor.
    """
    lower_limits, first, shift = _lower_limits(values.dtype.char, exponent)
    scratch = _scratch(values.dtype.char)[: values.size]
    magnitudes = np.abs(values, out=scratch) if signed else values
    np.maximum(magnitudes, lower_limits[: values.size], out=scratch)
    bits = scratch.view(_UNSIGNED[values.dtype.char])
    np.right_shift(bits, shift, out=bits)
    numbers[...] = bits  # the lowest 16; differences modulo 2^16 are exact
    np.subtract(numbers, first, out=numbers)


def _scratch(kind: str) -> NDArray[Any]:
    """Memory for a block, of this thread: it stays in the cache."""
    if not hasattr(_THREAD, kind):
        setattr(_THREAD, kind, np.empty(_BLOCK, kind))
    scratch: NDArray[Any] = getattr(_THREAD, kind)
    return scratch


@lru_cache(maxsize=16)
def _lower_limits(kind: str, exponent: int) -> tuple[NDArray[Any], np.uint16, int]:
    """Return the smallest value of each spare bin, tiled over a block; the low bits of bin 0; and
    the number of mantissa bits below a fine bin.
    """
    layout = np.finfo(kind)
    shift = int(layout.nmant) - (_LOG2_BINS - 1)
    first = (exponent - OCTAVES + int(layout.maxexp) - 1) * _OCTAVE - _SPARE
    bits = np.arange(first, first + _SPARE, dtype=np.uint64) << np.uint64(shift)
    lower_limits = bits.astype(_UNSIGNED[kind]).view(kind)
    return np.tile(lower_limits, _BLOCK // _SPARE), np.uint16(first & 0xFFFF), shift


def _coarser(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Counts of fine bins -> `Histogram.bins`: the low octaves merge into bins of equal width."""
    octaves = counts[_SPARE:].reshape(OCTAVES, _OCTAVE)
    bins = np.empty(ALL_BINS, np.int64)
    bins[0] = counts[:_SPARE].sum(dtype=np.int64)
    bins[_OCTAVE:] = octaves[_LOG2_BINS - 1 :].reshape(-1)
    lower = octaves[: _LOG2_BINS - 1].astype(np.int64)
    for low in reversed(range(_LOG2_BINS - 1)):  # one has half as many bins as the one above it
        lower = _paired(lower[: low + 1])
        bins[1 << low : 2 << low] = lower[low]
    return bins


def _paired(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = counts[..., ::2] + counts[..., 1::2]
    return sums


def _widened(histogram: Histogram, exponent: int) -> NDArray[np.int64]:
    """The bins of `histogram` for the range 2^exponent."""
    bins = histogram.bins
    if histogram.elements == 0:  # nothing to move
        return bins
    # After so many doublings all counts are in the lowest bin.
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
