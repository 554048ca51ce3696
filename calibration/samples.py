"""The data set protocol, data sets in memory, and batching."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from calibration.arrays import Sample, check_finite
from calibration.errors import CalibrationError


@dataclass(frozen=True)
class Skipped:
    """A sample that was not used, and the reason."""

    name: str
    reason: str


class Dataset(Protocol):
    """Samples that can be read repeatedly, the same each time."""

    @property
    def requested(self) -> int:
        """Number of requested samples."""

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Samples that the latest pass could not read."""

    @property
    def names(self) -> tuple[str, ...]:
        """What people call the samples of the latest pass: their files; () where there are none."""

    def __len__(self) -> int:
        """Number of samples of a pass if all are readable."""

    def __iter__(self) -> Iterator[Sample]:
        """One pass."""

    def sha256(self) -> str:
        """Hash of the names and bytes of the data, as hexadecimal digits."""


Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp:
    """Return what writing to a file, or replacing it, changes; () if there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@runtime_checkable
class Divisible(Dataset, Protocol):
    """A data set in files, of which a part can be read alone."""

    shifts: bool
    """An unreadable sample changes those after it."""

    def part(self, start: int, stop: int) -> "Divisible":
        """The samples `start` to `stop` of `len`; of a part none need be readable."""

    def stamps(self) -> Mapping[str, Stamp]:
        """By the names of files what writing to one changes."""


def memory_dataset(samples: Sequence[Sample]) -> Dataset:
    """A data set of arrays that are already in memory."""
    return _Memory(tuple(samples))


def batched(data: Dataset, batch: int) -> Dataset:
    """Samples of `batch` samples each, stacked along their first axis.

    Samples that do not fill a batch are skipped and counted; repeating samples would count them
    twice.
    """
    return data if batch == 1 else _Batches(data, batch)


def digest_sample(digest: "hashlib._Hash", sample: Mapping[str, NDArray[Any]]) -> None:
    """Update a hash with the names, types, shapes and bytes of a sample."""
    for name, array in sorted(sample.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).data)


@dataclass(frozen=True)
class _Memory:
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def requested(self) -> int:
        return len(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        for number, sample in enumerate(self.samples):
            for name, array in sample.items():
                check_finite(array, f"input '{name}' of sample {number}")
            yield sample

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for sample in self.samples:
            digest_sample(digest, sample)
        return digest.hexdigest()


class _Batches:
    shifts = True

    def __init__(self, data: Dataset, batch: int, *, whole: bool = True) -> None:
        self._data = data
        self._batch = batch
        self._whole = whole
        self._rest: tuple[Skipped, ...] = ()

    @property
    def requested(self) -> int:
        return self._data.requested // self._batch

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return self._data.skipped + self._rest

    @property
    def names(self) -> tuple[str, ...]:
        names, size = self._data.names, self._batch
        whole = len(names) // size * size
        return tuple(", ".join(names[first : first + size]) for first in range(0, whole, size))

    def __len__(self) -> int:
        return len(self._data) // self._batch

    def part(self, start: int, stop: int) -> "Divisible":
        """Batches; those of all data are the same only where every sample can be read."""
        assert isinstance(self._data, Divisible)
        end = len(self._data) if stop == len(self) else stop * self._batch
        return _Batches(self._data.part(start * self._batch, end), self._batch, whole=False)

    def __iter__(self) -> Iterator[Sample]:
        self._rest = ()
        waiting: list[Sample] = []
        batches = 0
        for sample in self._data:
            waiting.append(sample)
            if len(waiting) == self._batch:
                yield {name: np.concatenate([item[name] for item in waiting]) for name in sample}
                batches += 1
                waiting.clear()
        if not batches and self._whole:
            raise CalibrationError(
                f"{len(waiting)} calibration samples do not fill one batch of {self._batch}, which "
                f"the model's input has: give at least {self._batch}"
            )
        if waiting:
            why = f"they do not fill a batch of {self._batch}"
            self._rest = (Skipped(f"the last {len(waiting)} samples", why),)

    def sha256(self) -> str:
        return hashlib.sha256(f"{self._batch} {self._data.sha256()}".encode()).hexdigest()

    def stamps(self) -> Mapping[str, Stamp]:
        assert isinstance(self._data, Divisible)
        return self._data.stamps()
