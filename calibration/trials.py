"""Trials over validation samples: counted, limited, and compared for significance."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from calibration.progress import Progress
from device.error_figures import sqnr_db

ALL = slice(None)
QUICK_SHARE = 4
MIN_QUICK = 4
"""A quick trial runs 1 / QUICK_SHARE of the samples, at least MIN_QUICK."""
Assignment = Mapping[str, float | None]
"""Tensor -> amax; None or missing: in floating point."""
SampleSelection = slice | NDArray[np.intp]
"""A slice of the samples, or their indices."""
Errors = Callable[[Assignment, SampleSelection], NDArray[np.float64]]
"""(Assignment, samples) -> e_s of each sample, >= 0; not finite: unusable."""


class Trials:
    """Counts and reports trials; `refused`: a trial beyond the limit was requested."""

    def __init__(self, errors: Errors, limit: int, on_progress: Progress | None) -> None:
        self.errors = errors
        self.limit = limit
        self.samples = 0  # in a full trial; known after the first
        self.refused = False
        self._runs = 0
        self._expected = limit
        self._on_progress = on_progress

    @property
    def trials(self) -> int:
        """The runs so far in full trials, rounded up."""
        return -(-self._runs // max(self.samples, 1))

    @property
    def remaining(self) -> int:
        """The runs of single samples up to the limit; a full trial is known."""
        return max(0, self.limit * self.samples - self._runs)

    @property
    def spent(self) -> bool:
        """True if the limit is reached; then sets `refused`."""
        self.refused = self.refused or self.trials >= self.limit
        return self.trials >= self.limit

    def expect(self, more: int) -> None:
        """Expect at most `more` trials from now on (for progress)."""
        self._expected = min(self.trials + more, self.limit)

    def measure(
        self, assignment: Assignment, samples: SampleSelection = ALL, errors: Errors | None = None
    ) -> NDArray[np.float64]:
        """Return the error of each selected sample; infinity where it is not finite."""
        sample_errors = np.asarray((errors or self.errors)(assignment, samples), np.float64)
        self.samples = max(self.samples, sample_errors.size)
        self._runs += sample_errors.size
        if self._on_progress is not None:
            self._on_progress(self.trials, max(self._expected, self.trials))
        # NaN is worse than any number.
        return np.where(np.isfinite(sample_errors), sample_errors, math.inf)


def significantly_less(
    errors: NDArray[np.float64], reference: NDArray[np.float64], z: float
) -> bool:
    """True if `errors` are significantly less than `reference`; `z` as in `calibration.auto`."""
    if not np.isfinite(errors).all():
        return False
    if not np.isfinite(reference).all():
        return True
    difference = errors - reference
    mean = float(difference.mean())
    if difference.size < 2:
        return mean < 0.0
    variance = float(difference.var(ddof=1))
    return mean < 0.0 and mean * mean > z * z * variance / difference.size


def mean_of(errors: NDArray[np.float64]) -> float:
    """E: the mean of e_s."""
    return float(errors.mean())


def decibels(numerator: float, denominator: float) -> float:
    """10 log10(numerator / denominator), 0 if both are 0."""
    return 0.0 if numerator == denominator else sqnr_db(numerator, denominator)
