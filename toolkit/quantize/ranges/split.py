"""Which samples make ranges, and which judge them."""

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from calibration.dataset import Dataset, Sample, Skipped

LEAST = 6
"""Samples that can be parted; of fewer, a part says nothing of the others."""
MAX_VALIDATION = 16  # of each part; more hardly change a choice, and every trial runs them all
MAX_REPORTED = 8  # where nothing is chosen by them, only said


class Split:
    """A data set in two parts that judge each other's ranges.

    Every second sample, up to `MAX_VALIDATION`, is kept out of the first pass, which observes all
    others; these `held` samples are observed after it. As many of the others are kept beside them.
    Where nothing is tried (`wanted` False), or the samples are too few to be parted, all are
    observed, and the first of them serve as validation too.
    """

    def __init__(self, data: Dataset, wanted: bool) -> None:
        self._data = data
        self.unseen = wanted and len(data) >= LEAST
        self._most = MAX_VALIDATION if wanted else MAX_REPORTED
        self._kept: dict[int, Sample] = {}

    @property
    def asked(self) -> int:
        return self._data.asked

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return self._data.skipped

    @property
    def validation(self) -> tuple[Sample, ...]:
        """The samples of the latest pass that trials may use."""
        return tuple(self._kept[number] for number in sorted(self._kept))

    @property
    def held(self) -> NDArray[np.intp]:
        """Which of `validation` the first pass does not observe."""
        numbers = sorted(self._kept)
        return np.flatnonzero([self._is_held(number) for number in numbers])

    def __len__(self) -> int:
        count = len(self._data)
        return count - min(count // 2, MAX_VALIDATION) if self.unseen else count

    def __iter__(self) -> Iterator[Sample]:
        self._kept.clear()
        for number, sample in enumerate(self._data):
            held = self._is_held(number)
            if held or self._is_watched(number):
                self._kept[number] = _copy(sample)
            if not held:
                yield sample

    def _is_held(self, number: int) -> bool:
        return self.unseen and number % 2 == 1 and number // 2 < MAX_VALIDATION

    def _is_watched(self, number: int) -> bool:
        """Whether an observed sample is kept for trials as well."""
        if not self.unseen:
            return number < self._most
        return number % 2 == 0 and number // 2 < MAX_VALIDATION

    def first(self, count: int) -> tuple[Sample, ...]:
        """The first of the samples that are observed, in a pass of their own."""
        observed: Iterable[Sample] = islice(iter(self), count)
        return tuple(_copy(sample) for sample in observed)

    def sha256(self) -> str:
        return self._data.sha256()


def _copy(sample: Sample) -> Sample:
    """A loader may write the next sample into the same memory."""
    return {name: array.copy() for name, array in sample.items()}
