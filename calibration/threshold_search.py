"""Search for the threshold of least loss over the bins of a histogram, at the zoom that it needs.

A candidate of i bins is the threshold T = i w, w the width of a bin: i runs from 128 (`LEVELS`),
one bin for each magnitude of INT8, to the bin of max |x|. A loss is computed at the middle or the
edges of bins, so it sees little of the rounding where a level is hardly wider than a bin. That is
where the best candidate lies if a far outlier stretches the range. Then the range is halved, the
bins with it (`Histogram.linear`), and the search is repeated.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from calibration.observer import ZOOM, Histogram

LEVELS = 128
"""Magnitudes that INT8 can tell apart in |x|: 0 to 127."""

_COARSE = 2 * LEVELS  # bins; below, a level has less than two of them

Losses = Callable[[Histogram, int], tuple[NDArray[np.float64], float]]
"""(histogram, zoom) -> the losses of i = 128, 129, ..., and how far apart equal ones may lie."""


def least_loss(histogram: Histogram, losses: Losses) -> float:
    """T of the least loss, at most max |x|; among equal losses the largest T."""
    for zoom in range(ZOOM + 1):
        found, tie = losses(histogram, zoom)
        bins = LEVELS + int(np.flatnonzero(found <= found.min() + tie)[-1])
        if bins >= _COARSE:
            break
    return min(bins * histogram.linear_width(zoom), histogram.amax)


def bins_used(histogram: Histogram, zoom: int) -> int:
    """How many bins of `linear(zoom)` reach max |x|; at least LEVELS, at most all."""
    counts = histogram.linear(zoom)
    filled = math.floor(histogram.amax / histogram.linear_width(zoom)) + 1
    return min(max(filled, LEVELS), counts.size)
