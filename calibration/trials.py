"""Trials over validation samples: counted, limited, and compared by more than chance."""

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

ALL = slice(None)
QUICK_SHARE = 4
LEAST_QUICK = 4
"""One sample in so many is asked first, but not fewer than these: few prove nothing."""
Assignment = Mapping[str, float | None]
"""Tensor -> amax; None, or a tensor left out: in floating point."""
SampleSelection = slice | NDArray[np.intp]
"""Some of the samples: a slice of them, or their numbers."""
Errors = Callable[[Assignment, SampleSelection], NDArray[np.float64]]
"""Assignment and which samples -> e_s of each of them, >= 0; not finite: worthless."""
Progress = Callable[[int, int], None]
"""Called after each trial with (trials done, trials expected)."""


class Trials:
    """Counts trials and reports them; `refused` tells that one was wanted beyond the limit."""

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
        """How many full trials the runs so far amount to, rounded up."""
        return -(-self._runs // max(self.samples, 1))

    @property
    def spent(self) -> bool:
        """Whether no trial is left; asking means that one is wanted."""
        self.refused = self.refused or self.trials >= self.limit
        return self.trials >= self.limit

    def expect(self, more: int) -> None:
        """Say how many trials will be wanted at most from now on."""
        self._expected = min(self.trials + more, self.limit)

    def measure(
        self, assignment: Assignment, samples: SampleSelection = ALL, errors: Errors | None = None
    ) -> NDArray[np.float64]:
        found = np.asarray((errors or self.errors)(assignment, samples), np.float64)
        self.samples = max(self.samples, found.size)
        self._runs += found.size
        if self._on_progress is not None:
            self._on_progress(self.trials, max(self._expected, self.trials))
        # What is not a number is worse than any number.
        return np.where(np.isfinite(found), found, math.inf)


def surely_less(found: NDArray[np.float64], than: NDArray[np.float64], sure: float) -> bool:
    """Whether `found` is less than `than` by more than chance; z of `calibration.auto`."""
    if not np.isfinite(found).all():
        return False
    if not np.isfinite(than).all():
        return True
    difference = found - than
    mean = float(difference.mean())
    if difference.size < 2:
        return mean < 0.0
    variance = float(difference.var(ddof=1))
    return mean < 0.0 and mean * mean > sure * sure * variance / difference.size


def mean_of(errors: NDArray[np.float64]) -> float:
    """E: the mean of e_s."""
    return float(errors.mean())


def decibels(one: float, other: float) -> float:
    """10 log10(one / other), 0 if both are 0."""
    if one == other:
        return 0.0
    if one == 0.0 or other == 0.0:
        return -math.inf if one == 0.0 else math.inf
    return 10.0 * (math.log10(one) - math.log10(other))
