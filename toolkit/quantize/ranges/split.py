"""Which samples make ranges, and which judge them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from calibration.dataset import Dataset, Divisible, Sample, Skipped

MIN_SAMPLES = 6
"""Samples needed to halve them; a half of fewer is not representative."""
MAX_VALIDATION = 8  # of each half: every trial runs all of them
MAX_REPORTED = 8  # if they are only reported and choose nothing


@dataclass(frozen=True, slots=True)
class Head:
    """The first samples of `data`, up to `stop`: those to observe, and those not readable."""

    data: Divisible
    observed: Sequence[Sample]
    skipped: tuple[Skipped, ...]
    stop: int


class Split:
    """A data set of which a part judges the ranges of the others.

    The first pass observes all samples but every second one, up to `most` (`MAX_VALIDATION`)
    or `MAX_REPORTED` unless `halve`; these `held_out` samples are observed later. Of fewer than
    `MIN_SAMPLES` only the last is held out, and of one none. Validation uses them and, if `halve`,
    as many of the others, else the first.

    `unseen`: True if there are enough samples held out to choose by. Without a known length none
    are held out; the first of them are the validation samples too.
    """

    def __init__(self, data: Dataset, halve: bool, most: int = MAX_VALIDATION) -> None:
        self._data = data
        self._halve = halve
        self._max = most if halve else MAX_REPORTED
        self._count = len(data)
        self.unseen = self._count >= MIN_SAMPLES
        self._validation: dict[int, Sample] = {}

    @property
    def count(self) -> int:
        """The samples of both parts; 0 as long as an iterator has not told."""
        return len(self._data)

    @property
    def requested(self) -> int:
        """How many samples were asked for; some may be skipped."""
        return self._data.requested

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The samples that could not be read, each with its reason."""
        return self._data.skipped

    @property
    def names(self) -> tuple[str, ...]:
        """No names: a pass leaves out the samples that are held out."""
        return ()

    @property
    def validation(self) -> tuple[Sample, ...]:
        """The validation samples of the latest pass."""
        return tuple(self._validation[number] for number in sorted(self._validation))

    @property
    def held_out(self) -> NDArray[np.intp]:
        """Indices in `validation` of the samples that the first pass does not observe."""
        numbers = sorted(self._validation)
        return np.flatnonzero([self._is_held_out(number) for number in numbers])

    def __len__(self) -> int:
        count = len(self._data)
        if self.unseen:
            return count - min(count // 2, self._max)
        return count - 1 if self._count > 1 else count

    def __iter__(self) -> Iterator[Sample]:
        self._validation.clear()
        for number, sample in enumerate(self._data):
            if self._observes(number, sample):
                yield sample

    def read_head(self) -> "Head | None":
        """Read the samples that validate and those between them, a pass of its own.

        None: they are all that there are, or the rest cannot be read without them.
        """
        data = self._data
        if not self.unseen or not isinstance(data, Divisible):
            return None
        self._validation.clear()
        observed, skipped, stop, number = list[Sample](), list[Skipped](), 0, 0
        while number < 2 * self._max:
            part = data.part(stop, min(stop + 2 * self._max - number, len(data)))
            for sample in part:
                if self._observes(number, sample):
                    observed.append(_copy(sample))
                number += 1
            stop, skipped = stop + len(part), skipped + list(part.skipped)
            if stop == len(data) or (skipped and data.shifts):
                return None
        return Head(data, observed, tuple(skipped), stop)

    def _observes(self, number: int, sample: Sample) -> bool:
        """Keep a sample if it validates; True if the first pass observes it."""
        held_out = self._is_held_out(number)
        if held_out or self._is_watched(number):
            self._validation[number] = _copy(sample)
        return not held_out

    def _is_held_out(self, number: int) -> bool:
        if self.unseen:
            return number % 2 == 1 and number // 2 < self._max
        return number == self._count - 1 > 0

    def _is_watched(self, number: int) -> bool:
        """True if an observed sample is a validation sample too."""
        if self._count > 1 and not self._halve:
            return number == 0  # stands in if the others cannot be read
        if not self.unseen:
            return number < self._max
        return number % 2 == 0 and number // 2 < self._max

    def first(self, count: int) -> tuple[Sample, ...]:
        """The first `count` observed samples, in a pass of their own."""
        observed: Iterable[Sample] = islice(iter(self), count)
        return tuple(_copy(sample) for sample in observed)

    def sha256(self) -> str:
        """Hash of all samples, of both parts."""
        return self._data.sha256()


def _copy(sample: Sample) -> Sample:
    """A loader may write the next sample into the same memory."""
    return {name: array.copy() for name, array in sample.items()}
