"""How far numbers are from those they stand for, over any number of samples.

sqnr = 10 log10(sum |y|^2 / sum |y' - y|^2) dB,  cosine = sum y y' / sqrt(sum |y|^2 sum |y'|^2)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.error_figures import cosine, sqnr_db

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest difference: its sample, index, and both values."""

    sample: int
    index: tuple[int, ...]
    expected: float
    found: float


@dataclass(frozen=True, slots=True)
class Error:
    """SQNR in dB, cosine, and the worst element (None where nothing differs)."""

    sqnr_db: float
    cosine: float
    worst: Worst | None


class ErrorTally:
    """Adds up samples of one tensor."""

    def __init__(self) -> None:
        """Start with no samples."""
        self._signal = self._noise = self._power = self._product = 0.0
        self.largest = 0.0
        self._worst: Worst | None = None

    def add(
        self, expected: Array, actual: Array, sample: int, distance: Array | None = None
    ) -> None:
        """Count arrays of one shape; a tensor may have several in a sample, by its number.

        `distance`: |actual - expected| of each element, where float64 does not tell it.
        """
        y, z = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        if distance is None:
            distance = np.abs(z - y)
        self._signal += float(np.vdot(y, y))
        self._power += float(np.vdot(z, z))
        self._product += float(np.vdot(y, z))
        self._noise += float(np.vdot(distance, distance))
        if distance.size:
            at = np.unravel_index(int(distance.argmax()), distance.shape)
            if distance[at] > self.largest:
                self.largest = float(distance[at])
                index = tuple(int(i) for i in at)
                self._worst = Worst(sample, index, float(y[at]), float(z[at]))

    def error(self) -> Error:
        """Return the figures of all samples."""
        return Error(
            sqnr_db(self._signal, self._noise),
            cosine(self._signal, self._power, self._product),
            self._worst,
        )
