"""Calibration data from a Python iterable of samples."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.arrays import InputSpec, Sample, check_finite, cut_array, misfit
from calibration.errors import CalibrationError
from calibration.samples import Dataset, Skipped, digest_sample

Item = Mapping[str, NDArray[Any]] | NDArray[Any]
"""Input name -> array, or the array of a model's only input."""


def iterable_dataset(
    iterable: Iterable[Item], inputs: Sequence[InputSpec], limit: int | None = None
) -> Dataset:
    """Samples from an iterable, at most `limit`, checked against `inputs` as they come.

    With a limit, samples are spread evenly over a sequence; other iterables give their first ones.
    A generator is exhausted by one pass, which is enough for a calibration. A missing batch axis of
    1 is added. Without a length, `len` is the number of samples so far.
    """
    if limit is not None and limit < 1:
        raise CalibrationError(f"limit is {limit} samples, but must be at least 1: raise it")
    return _Stream(iterable, tuple(inputs), limit)


class _Stream:
    skipped: tuple[Skipped, ...] = ()
    names: tuple[str, ...] = ()

    def __init__(
        self, iterable: Iterable[Item], inputs: tuple[InputSpec, ...], limit: int | None
    ) -> None:
        self._iterable = iterable
        self._inputs = inputs
        self._limit = limit
        self._count = 0
        self._digest = hashlib.sha256()
        self._exhausted = False

    @property
    def requested(self) -> int:
        return self._limit or len(self)

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            return self._count
        return min(len(self._iterable), self._limit or len(self._iterable))

    def __iter__(self) -> Iterator[Sample]:
        if self._exhausted:
            raise CalibrationError(
                "the iterable of calibration samples was used up by the first pass: give a list, "
                "or an object that makes a new iterator each time"
            )
        self._exhausted = isinstance(self._iterable, Iterator)
        self._count, self._digest = 0, hashlib.sha256()
        for number, item in self._chosen():
            sample = self._sample(item, number)
            self._count += 1
            digest_sample(self._digest, sample)
            yield sample

    def sha256(self) -> str:
        """Hash of the samples of the latest pass so far."""
        return self._digest.hexdigest()

    def _chosen(self) -> Iterator[tuple[int, Item]]:
        if isinstance(self._iterable, Sequence | np.ndarray):
            total = len(self._iterable)
            for number in range(len(self)):
                chosen = number * total // len(self)
                yield chosen, self._iterable[chosen]
        else:
            yield from enumerate(islice(self._iterable, self._limit))

    def _sample(self, item: Item, number: int) -> Sample:
        if isinstance(item, np.ndarray) and len(self._inputs) == 1:
            item = {self._inputs[0].name: item}
        expected = sorted(spec.name for spec in self._inputs)
        if not isinstance(item, Mapping) or sorted(item) != expected:
            actual = sorted(item) if isinstance(item, Mapping) else type(item).__name__
            raise CalibrationError(
                f"calibration sample {number} feeds {actual}, but the model's inputs are "
                f"{expected}: "
                "give every sample an array for each input"
            )
        return {spec.name: _fitted(item[spec.name], spec, number) for spec in self._inputs}


def _fitted(array: object, spec: InputSpec, number: int) -> NDArray[Any]:
    where = f"calibration sample {number}, input '{spec.name}',"
    if not isinstance(array, np.ndarray):
        raise CalibrationError(
            f"{where} is a {type(array).__name__}: give a numpy array of {spec.dtype}"
        )
    cut = cut_array(array.shape, array.dtype, spec, where)
    if cut.samples != 1 or cut.rest:
        raise misfit(array.shape, array.dtype, spec, where)
    check_finite(array, where)
    return array.reshape(cut.shape)
