"""How far tensor a is from its reference b, over all samples.

    error      |a - b|;  relative error  |a - b| / |b|, of elements where b is not 0
    SQNR       10 log10(sum b^2 / sum (a - b)^2) dB
    cosine     sum a b / sqrt(sum a^2 sum b^2)
    arg-max    share of rows whose largest element is at the same place: along the channels (axis 1)
               of tensors of 3 and more dimensions, else along the last axis

Elements that are not finite count as equal where both are the same (NaN, or the same infinity), and
else as beyond every tolerance; they are left out of all other figures.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.evaluate.agreement.tolerance import Tolerance
from toolkit.evaluate.error_tally import ErrorTally

Array = NDArray[Any]
DECADES = tuple(range(-9, 4))
"""Upper edges of the histogram's bins, as powers of ten; one more bin lies above the last."""


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest error: its sample, index, and both values."""

    sample: int
    index: tuple[int, ...]
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one tensor; None where there is nothing to measure.

    `equal`: elements without error; `histogram`: the others, by `DECADES`; `beyond`: elements
    beyond the tolerance; `not_finite`: those of them that are finite on one side only or differ.
    """

    elements: int
    equal: int
    beyond: int
    not_finite: int
    max_abs: float
    max_rel: float
    mean_abs: float
    sqnr_db: float
    cosine: float
    argmax: float | None
    histogram: tuple[int, ...]
    worst: Worst | None


@dataclass(slots=True)
class Tally:
    """Adds up the samples of one tensor, judged by one tolerance."""

    tolerance: Tolerance
    elements: int = 0
    equal: int = 0
    beyond: int = 0
    not_finite: int = 0
    _errors: ErrorTally = field(default_factory=ErrorTally)
    _relative: float = 0.0
    _sum: float = 0.0  # of |e|
    _histogram: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(DECADES) + 1, np.int64)
    )
    _rows: int = 0
    _same_rows: int = 0
    _samples: int = 0

    def add(self, a: Array, b: Array) -> None:
        """Count a sample; both arrays have one shape."""
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        strange = int(np.count_nonzero(~finite & ~same))
        self.elements += x.size
        self.not_finite += strange
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(finite, np.abs(x - y), 0.0)
        if a.dtype.kind in "iu" and b.dtype.kind in "iu":
            same = np.asarray(a == b)
            error = np.asarray(
                np.maximum(error, ~same)
            )  # above 2^53 float64 does not tell them apart
        self.equal += int(np.count_nonzero(same))
        reference = np.where(finite, y, 0.0)
        self._errors.add(reference, np.where(finite, x, 0.0), self._samples, error)
        self._count_sizes(reference, error)
        if self.tolerance.atol is not None:
            limit = self.tolerance.atol + (self.tolerance.rtol or 0.0) * np.abs(reference)
            self.beyond += int(np.count_nonzero(finite & (error > limit)))
        self.beyond += strange
        self._count_rows(a, b)
        self._samples += 1

    def _count_sizes(self, reference: Array, error: Array) -> None:
        self._sum += float(error.sum())
        nonzero = reference != 0
        if nonzero.any():
            relative = float((error[nonzero] / np.abs(reference[nonzero])).max())
            self._relative = max(self._relative, relative)
        bins = np.searchsorted(10.0 ** np.array(DECADES), error[error > 0], side="left")
        self._histogram += np.bincount(bins, minlength=len(DECADES) + 1)

    def _count_rows(self, a: Array, b: Array) -> None:
        axis = 1 if a.ndim >= 3 else a.ndim - 1
        if a.dtype.kind != "f" or axis < 0 or not a.size or a.shape[axis] < 2:
            return
        same = a.argmax(axis) == b.argmax(axis)
        self._rows += same.size
        self._same_rows += int(np.count_nonzero(same))

    @property
    def agrees(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        least_db = self.tolerance.sqnr_db
        return not self.beyond and (least_db is None or self.figures().sqnr_db >= least_db)

    def figures(self) -> Figures:
        """Return the figures of all samples."""
        total = self._errors.error()
        worst = total.worst
        return Figures(
            elements=self.elements,
            equal=self.equal,
            beyond=self.beyond,
            not_finite=self.not_finite,
            max_abs=self._errors.largest,
            max_rel=self._relative,
            mean_abs=self._sum / self.elements if self.elements else 0.0,
            sqnr_db=total.sqnr_db,
            cosine=total.cosine,
            argmax=self._same_rows / self._rows if self._rows else None,
            histogram=tuple(int(count) for count in self._histogram),
            worst=None
            if worst is None
            else Worst(worst.sample, worst.index, a=worst.found, b=worst.expected),
        )


def finite_json(value: Any) -> Any:  # noqa: ANN401
    """Return a value with None for NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
