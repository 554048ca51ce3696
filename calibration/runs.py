"""How a model is run: sample by sample, or in blocks of several samples."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from calibration.arrays import Sample

Arrays = Mapping[str, NDArray[Any]]
"""By tensor or input. Those of a block have the samples along a new first axis."""

Run = Callable[[Sample], Arrays]
"""Feeds of one sample -> the arrays of (at least) the requested tensors.

The calling thread counts them before it calls again.
"""

BLOCK_BYTES = 8 << 20
"""Inputs of a block, or activations, at most: they stay in the third-level cache."""


@runtime_checkable
class BlockRun(Protocol):
    """A `Run` that also takes several samples at a time, with the same results to the last bit."""

    @property
    def block(self) -> int:
        """How many samples a block has at most."""

    def __call__(self, feeds: Sample) -> Arrays:
        """Run one sample."""

    def run_block(self, feeds: Arrays) -> Arrays | None:
        """Run the samples of a block; None: they must be run one by one, as one may fail."""


def block_of(run: Run) -> int:
    """How many samples `run` takes at a time, at most."""
    return run.block if isinstance(run, BlockRun) else 1


class Block:
    """Consecutive samples of the same shapes, from `first` on, copied to one array per input:
    `most` of them, or as many as have `BLOCK_BYTES`."""

    def __init__(self, first: int, sample: Sample, most: int) -> None:
        self.first, self.count = first, 0
        sample_bytes = sum(array.nbytes for array in sample.values())
        self._most = min(most, max(1, BLOCK_BYTES // max(1, sample_bytes)))
        self._arrays = {
            name: np.empty((self._most, *array.shape), array.dtype)
            for name, array in sample.items()
        }
        self.append(sample)

    @property
    def full(self) -> bool:
        """True if no other sample fits."""
        return self.count == self._most

    @property
    def feeds(self) -> dict[str, NDArray[Any]]:
        """The inputs, [samples, *shape]."""
        return {name: array[: self.count] for name, array in self._arrays.items()}

    def samples(self) -> list[tuple[int, Sample]]:
        """The samples with their numbers."""
        return [
            (self.first + at, {name: array[at] for name, array in self._arrays.items()})
            for at in range(self.count)
        ]

    def is_like(self, sample: Sample) -> bool:
        """True if a sample has the inputs, shapes and types of the others."""
        return self._arrays.keys() == sample.keys() and all(
            (array.shape, array.dtype) == (self._arrays[name].shape[1:], self._arrays[name].dtype)
            for name, array in sample.items()
        )

    def append(self, sample: Sample) -> None:
        """Copy a sample: a loader may write the next one into the same memory."""
        for name, array in sample.items():
            self._arrays[name][self.count] = array
        self.count += 1
