"""Which channels of a tensor were zero in every sample: work that a network does for nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

Run = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""Feeds of one sample -> arrays by tensor."""


@dataclass(frozen=True, slots=True)
class DeadChannels:
    """`dead` of the `channels` (axis 1) of a tensor were zero in every sample."""

    dead: int
    channels: int


class ChannelWatch:
    """Runs a model and keeps an eye on the channels, axis 1, of all that it returns.

    After the first sample it looks only at channels that have been zero so far: of all other work
    on a sample that is next to nothing, and the count is that of all samples that were run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._alive: dict[str, NDArray[np.bool_]] = {}
        self._lock = Lock()
        self._mine = Lock()
        self.samples = 0

    def __call__(self, sample: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """Run one sample; several threads may call it where they may call `run`."""
        found = self._run(sample)
        with self._mine:
            for name, array in found.items():
                if array.ndim >= 2 and array.size:
                    self._look(name, array)
            self.samples += 1
        return found

    @property
    def dead(self) -> dict[str, DeadChannels]:
        """The tensors that have dead channels, not all of them: such a tensor is dead itself."""
        found = {}
        for name, alive in self._alive.items():
            count = int(alive.size - alive.sum())
            if 0 < count < alive.size:
                found[name] = DeadChannels(count, alive.size)
        return found

    def _look(self, name: str, array: NDArray[Any]) -> None:
        others = (0, *range(2, array.ndim))
        alive = self._alive.get(name)
        if alive is None or alive.size != array.shape[1]:  # the second: a dynamic dimension
            now: NDArray[np.bool_] = np.any(array, axis=others)
            self._alive[name] = now if alive is None else np.ones(array.shape[1], np.bool_)
            return
        (still,) = np.nonzero(~alive)
        if still.size:
            alive[still] = np.any(array[:, still], axis=others)
