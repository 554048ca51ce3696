"""Find channels that are zero in every sample: wasted work of a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.arrays import Sample
from calibration.runs import Arrays, BlockRun, Run, block_of


@dataclass(frozen=True, slots=True)
class DeadChannels:
    """`dead` of the `channels` (axis 1) of a tensor were zero in every sample."""

    dead: int
    channels: int


class ChannelWatch:
    """Runs a model and records which channels (axis 1) of its results are ever non-zero.

    After the first sample it checks only channels that were always zero, which costs little.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._alive: dict[str, NDArray[np.bool_]] = {}
        self._lock = Lock()
        self.samples = 0

    @property
    def block(self) -> int:
        """How many samples `run_block` takes at most."""
        return block_of(self._run)

    def __call__(self, sample: Sample) -> Arrays:
        """Run one sample; thread-safe if `run` is."""
        arrays = self._run(sample)
        self._see(arrays, 1)
        return arrays

    def run_block(self, feeds: Arrays) -> Arrays | None:
        """Run the samples of a block, see `BlockRun`."""
        arrays = self._run.run_block(feeds) if isinstance(self._run, BlockRun) else None
        if arrays is not None:
            joined = {name: _joined(array) for name, array in arrays.items() if array.ndim >= 2}
            self._see(joined, len(next(iter(feeds.values()))))
        return arrays

    def _see(self, arrays: Arrays, samples: int) -> None:
        with self._lock:
            for name, array in arrays.items():
                if array.ndim >= 2 and array.size:
                    self._update(name, array)
            self.samples += samples

    @property
    def alive(self) -> Mapping[str, NDArray[np.bool_]]:
        """By tensor: which channels were non-zero in a sample."""
        return self._alive

    def merge(self, alive: Mapping[str, NDArray[np.bool_]], samples: int) -> None:
        """Add what another watch saw in other samples, as if it had been seen here."""
        for name, theirs in alive.items():
            ours = self._alive.get(name, theirs)
            self._alive[name] = (
                ours | theirs if ours.size == theirs.size else np.ones(theirs.size, np.bool_)
            )
        self.samples += samples

    @property
    def dead(self) -> dict[str, DeadChannels]:
        """The tensors with some dead channels; a tensor with only dead channels is dead itself."""
        dead_channels = {}
        for name, alive in self._alive.items():
            count = int(alive.size - alive.sum())
            if 0 < count < alive.size:
                dead_channels[name] = DeadChannels(count, alive.size)
        return dead_channels

    def _update(self, name: str, array: NDArray[Any]) -> None:
        axes = (0, *range(2, array.ndim))
        alive = self._alive.get(name)
        if alive is None or alive.size != array.shape[1]:  # a dynamic dimension
            active: NDArray[np.bool_] = np.any(array, axis=axes)
            self._alive[name] = active if alive is None else np.ones(array.shape[1], np.bool_)
            return
        (silent,) = np.nonzero(~alive)
        if silent.size:
            alive[silent] = np.any(array[:, silent], axis=axes)


def _joined(array: NDArray[Any]) -> NDArray[Any]:
    """Arrays of a block, [samples, batch, ...] -> [samples * batch, ...]."""
    joined: NDArray[Any] = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return joined
