"""Find the threshold of least loss over the bins of a histogram, at the necessary zoom.

A candidate of i bins is the threshold T = i w, w the width of a bin: i runs from 128 (`LEVELS`),
one bin for each INT8 magnitude, to the bin of max |x|. A loss is computed at the middle or edges of
bins, so it misses rounding if a level is hardly wider than a bin. The best candidate lies there if
a far outlier stretches the range. Then the range and its bins are halved (`Histogram.linear`), and
the search is repeated.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from calibration.observer import ZOOM, Histogram

LEVELS = 128
"""INT8 magnitudes: 0 to 127."""

_MIN_BINS = 2 * LEVELS  # fewer: a level has less than two bins

Losses = Callable[[Histogram, int], tuple[NDArray[np.float64], float]]
"""(histogram, zoom) -> the losses of i = 128, 129, ..., and the tolerance of equal losses."""


def threshold_of_least_loss(histogram: Histogram, losses: Losses) -> float:
    """T of the least loss, at most max |x|; among equal losses the largest T."""
    for zoom in range(ZOOM + 1):
        loss_of, tie = losses(histogram, zoom)
        bins = LEVELS + int(np.flatnonzero(loss_of <= loss_of.min() + tie)[-1])
        if bins >= _MIN_BINS:
            break
    return min(bins * histogram.linear_width(zoom), histogram.amax)


def bins_used(histogram: Histogram, zoom: int) -> int:
    """Number of bins of `linear(zoom)` up to max |x|; at least LEVELS, at most all."""
    counts = histogram.linear(zoom)
    filled = math.floor(histogram.amax / histogram.linear_width(zoom)) + 1
    return min(max(filled, LEVELS), counts.size)
