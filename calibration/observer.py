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
OCTAVES = ZOOM + _LOG2_BINS
"""Octaves of fine bins: the lowest of `ALL_BINS` ends where the lowest octave begins."""
_SPARE = 8
NUMBERS = _SPARE + OCTAVES * _OCTAVE
"""Numbers of fine bins; see `Tally`."""
TOGETHER = 1 << 19
"""Elements that are counted at a time at most. Not fewer, because counting begins and ends with
work on all bins: as much as on 100 000 elements in OpenCV."""
_MANY = 1 << 17  # elements from which an array is counted alone; fewer wait for those to come
_WAITING = 1 << 18  # elements of one tensor that wait at most
_BLOCK = 1 << 16  # elements: they and their numbers stay in the second-level cache
_MOST_COUNTED = 2**31 - 1
_MOST_FLOAT32 = 128
_WORKING_DTYPE: dict[str, type[np.floating[Any]]] = {
    "float16": np.float32,
    "float32": np.float32,
    "float64": np.float64,
}
_WHOLE: dict[str, type[np.unsignedinteger[Any]]] = {"float32": np.uint32, "float64": np.uint64}


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


Counts = Callable[[NDArray[np.uint16]], NDArray[np.int32]]
"""Numbers below `NUMBERS`, at most `TOGETHER` of them -> int32 [NUMBERS]: how often each occurs."""


def observe(
    tensor: str, values: NDArray[Any], sample: int, count: Counts | None = None
) -> Histogram:
    """The histogram of one array; see `Tally.add`."""
    tally = Tally(tensor, count)
    tally.add(values, sample)
    return tally.histogram()


class Tally:
    """The histogram of one tensor while it grows.

    It counts in finer bins than it gives: each of the `OCTAVES` octaves below 2^e has 2048, and one
    bin is left for all below. The number of such a bin is a part of the bits of a floating point
    number, the exponent and 11 bits of the mantissa, so that no element is put beside its bin.
    """

    def __init__(
        self,
        tensor: str,
        count: Counts | None = None,
        seen: Histogram | None = None,
    ) -> None:
        """`count`: None is `numpy_counts`. `seen`: what to begin with."""
        self._tensor = tensor
        self._count = count or numpy_counts
        self._numbers = np.empty(_WAITING, np.uint16)
        self._waiting = 0
        self._counts = np.zeros(NUMBERS, np.int32)
        self._counted = 0
        self._seen = seen if seen is not None else Histogram()
        self._exponent = self._seen.exponent
        self._minimum, self._maximum = self._seen.minimum, self._seen.maximum

    def add(self, values: NDArray[Any], sample: int) -> None:
        """Count an array of float16, float32 or float64, any shape; it is not changed.

        Raises CalibrationError, naming the tensor and `sample` (0-based): the array holds NaN or
        infinities, or is of another dtype. The tally is of no use after that.
        """
        working = _WORKING_DTYPE.get(values.dtype.name)
        if working is None:
            raise CalibrationError(
                f"tensor '{self._tensor}' is {values.dtype.name} in sample {sample}, but only "
                "float16, float32 and float64 have a range: leave it out of the calibrated tensors"
            )
        if self._exponent > _MOST_FLOAT32:  # of an earlier array
            working = np.float64
        # A view where the memory allows it; float16 is widened: numpy computes it one by one.
        flat = np.ravel(values, order="K").astype(working, copy=False)
        if flat.size and self._minimum > self._maximum:  # the first: widen once, not by parts
            self._widen(max(float(flat.max()), -float(flat.min())))
        for start in range(0, flat.size, TOGETHER):
            if not self._add_part(flat[start : start + TOGETHER]):
                raise _not_finite(self._tensor, flat, sample)

    def histogram(self) -> Histogram:
        """What was seen so far."""
        self._spill()
        return Histogram(self._seen.bins, self._exponent, self._minimum, self._maximum)

    def _add_part(self, part: NDArray[Any]) -> bool:
        """Add at most `TOGETHER` elements; False if they are not finite."""
        # Adding zero turns -0.0 into 0.0, which min() and max() would otherwise pick by order.
        minimum, maximum = float(part.min()) + 0.0, float(part.max()) + 0.0
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            return False
        self._minimum = min(self._minimum, minimum)
        self._maximum = max(self._maximum, maximum)
        self._widen(max(maximum, -minimum))
        if part.size >= _MANY:
            numbers = np.empty(part.size, np.uint16)
            _number_bins(part, minimum < 0.0, self._exponent, numbers)
            self._count_now(numbers)
            return True
        if self._waiting + part.size > self._numbers.size:
            self._count_waiting()
        end = self._waiting + part.size
        _number_bins(part, minimum < 0.0, self._exponent, self._numbers[self._waiting : end])
        self._waiting = end
        return True

    def _widen(self, amax: float) -> None:
        """Let the range hold `amax`; of what is not finite nothing is said here."""
        exponent = exponent_of(amax) if math.isfinite(amax) else self._exponent
        if exponent > self._exponent:
            self._spill()
            self._exponent = exponent

    def _count_waiting(self) -> None:
        if self._waiting:
            self._count_now(self._numbers[: self._waiting])
            self._waiting = 0

    def _count_now(self, numbers: NDArray[np.uint16]) -> None:
        if self._counted > _MOST_COUNTED - numbers.size:
            self._spill_counted()
        self._counts += self._count(numbers)
        self._counted += numbers.size

    def _spill(self) -> None:
        self._count_waiting()
        if self._counted:
            self._spill_counted()

    def _spill_counted(self) -> None:
        """Move what was counted to `_seen`."""
        counted = Histogram(_coarser(self._counts), self._exponent)
        self._seen = merge(self._seen, counted)
        self._counts[:] = 0
        self._counted = 0


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


def numpy_counts(numbers: NDArray[np.uint16]) -> NDArray[np.int32]:
    """Count numbers with NumPy alone; whoever has something faster may bring it."""
    return np.bincount(numbers, minlength=NUMBERS).astype(np.int32)


def _number_bins(
    values: NDArray[Any], signed: bool, exponent: int, numbers: NDArray[np.uint16]
) -> None:
    """Write the fine bin of each |x| into `numbers`; `signed`: some may be below 0.

    The `_SPARE` numbers below the first octave all mean "below it". Neighbours take them in turn:
    where every second element is 0, as behind a rectifier, counting them in one place makes the
    processor wait for itself.
    """
    least, first, shift = _least(values.dtype.name, exponent)
    unsigned = _WHOLE[values.dtype.name]
    high = np.empty(min(_BLOCK, values.size), values.dtype)
    for start in range(0, values.size, _BLOCK):
        block, found = values[start : start + _BLOCK], numbers[start : start + _BLOCK]
        scratch = high[: block.size]
        magnitudes = np.abs(block, out=scratch) if signed else block
        np.maximum(magnitudes, least[: block.size], out=scratch)
        # The cast keeps the lowest 16 bits, and the difference of two such numbers is right.
        np.right_shift(scratch.view(unsigned), shift, out=found, casting="unsafe")
        np.subtract(found, first, out=found)


@lru_cache(maxsize=16)
def _least(dtype: str, exponent: int) -> tuple[NDArray[Any], np.uint16, int]:
    """For a block the numbers that stand for "below the octaves", and the lowest bits of bin 0.

    The last one: how many bits of the mantissa lie below a fine bin.
    """
    kind = np.finfo(dtype)
    shift = int(kind.nmant) - (_LOG2_BINS - 1)
    first = (exponent - OCTAVES + int(kind.maxexp) - 1) * _OCTAVE - _SPARE
    bits = np.arange(first, first + _SPARE, dtype=np.uint64) << np.uint64(shift)
    least = bits.astype(_WHOLE[dtype]).view(dtype)
    return np.tile(least, _BLOCK // _SPARE), np.uint16(first & 0xFFFF), shift


def _coarser(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Counts of fine bins -> `Histogram.bins`: the low octaves merge into bins of equal width."""
    octaves = counts[_SPARE:].reshape(OCTAVES, _OCTAVE)
    bins = np.empty(ALL_BINS, np.int64)
    bins[0] = counts[:_SPARE].sum(dtype=np.int64)
    for low in range(_LOG2_BINS - 1):
        bins[1 << low : 2 << low] = octaves[low].reshape(1 << low, -1).sum(axis=1, dtype=np.int64)
    bins[_OCTAVE:] = octaves[_LOG2_BINS - 1 :].reshape(-1)
    return bins


def _paired(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    sums: NDArray[np.int64] = counts.reshape(-1, 2).sum(axis=1)
    return sums


def _widened(histogram: Histogram, exponent: int) -> NDArray[np.int64]:
    """The bins of `histogram` for the range 2^exponent."""
    bins = histogram.bins
    if histogram.elements == 0:  # no count, so none to move
        return bins
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
