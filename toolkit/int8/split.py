"""Which samples make ranges, and which judge them."""

from collections.abc import Iterable, Iterator
from itertools import islice

from calibration.dataset import Dataset, Sample, Skipped

VALIDATION_EVERY = 3  # of the samples one in so many is kept for trials
MAX_VALIDATION = 32  # more hardly changes a choice, and every trial runs them all
MAX_REPORTED = 8  # where nothing is chosen by them, only said


class Split:
    """A data set without every third sample, which are kept for trials.

    Where nothing is tried (`wanted` False), or the samples are too few to spare any, all are
    observed, and the first of them serve as validation too.
    """

    def __init__(self, data: Dataset, wanted: bool) -> None:
        self._data = data
        self._most = MAX_VALIDATION if wanted else MAX_REPORTED
        self.unseen = wanted and len(data) >= 2 * VALIDATION_EVERY
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
        return tuple(self._kept.values())

    def __len__(self) -> int:
        count = len(self._data)
        return count - count // VALIDATION_EVERY if self.unseen else count

    def __iter__(self) -> Iterator[Sample]:
        self._kept.clear()
        for number, sample in enumerate(self._data):
            mine = not self.unseen or number % VALIDATION_EVERY == VALIDATION_EVERY - 1
            if mine and len(self._kept) < self._most:
                self._kept[number] = _copy(sample)
            if not self.unseen or not mine:
                yield sample

    def first(self, count: int) -> tuple[Sample, ...]:
        """The first of the samples that are observed, in a pass of their own."""
        observed: Iterable[Sample] = islice(iter(self), count)
        return tuple(_copy(sample) for sample in observed)

    def sha256(self) -> str:
        return self._data.sha256()


def _copy(sample: Sample) -> Sample:
    """A loader may write the next sample into the same memory."""
    return {name: array.copy() for name, array in sample.items()}
