"""The threshold of least mean squared quantisation error."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from calibration.observer import ALL_BINS, BINS, Histogram
from calibration.threshold_search import LEVELS, bins_used, threshold_of_least_loss

_ROWS = 128  # candidates at a time: their gathered sums stay in the second-level cache
_TIE = 1e-13  # of the sum of squares; errors closer than the rounding of their sums are equal


def mse_amax(histogram: Histogram) -> float:
    """The threshold with the least sum of (x - Q(x))^2, each |x| taken as the middle of its bin.

    n_j elements at c_j; for a candidate of i bins (T = i w, see `threshold_search`) s = T / 127
    and Q(c) = s min(round(c / s), 127):

        E(i) = sum_j n_j (c_j - Q(c_j))^2

    The result is T for the least E, never more than max |x|; among equal E the largest. Spread
    within a bin adds n_j w_j^2 / 12 to every candidate, which changes nothing. Elements beyond the
    range add their clipping error at every zoom.
    """
    return threshold_of_least_loss(histogram, squared_errors)


def squared_errors(histogram: Histogram, zoom: int = 0) -> tuple[NDArray[np.float64], float]:
    """E(i) of `mse_amax`, i = 128, 129, ... up to the bin of max |x|; and the error of their sums.

    Q(c) is the number of steps (q - 1/2) s, q = 1..127, that c has passed, times s. With
    N(c) = sum of n_j and C(c) = sum of n_j c_j over c_j >= c, each step adds
    (q s)^2 - ((q - 1) s)^2 to the square of Q and s to Q, for all elements beyond it:

        E(i) = sum_j n_j c_j^2 + s^2 sum_q (2q - 1) N((q - 1/2) s) - 2 s sum_q C((q - 1/2) s)

    The first bin beyond step q is j = ceil(((2q - 1) i - 127) / 254), whatever w is.
    """
    used, width = bins_used(histogram, zoom), histogram.linear_width(zoom)
    number, weight, squares = _sums(histogram, zoom)
    beyond = np.concatenate((np.cumsum(number[::-1])[::-1], [0.0]))
    moment = np.concatenate((np.cumsum(weight[::-1])[::-1], [0.0]))
    candidates = np.arange(LEVELS, used + 1)
    odd = 2.0 * np.arange(1, LEVELS) - 1.0
    steps = np.empty((2, candidates.size))
    for start in range(0, candidates.size, _ROWS):
        rows = slice(start, start + _ROWS)
        first = _first_beyond()[: candidates.size][rows]
        steps[0, rows] = np.take(beyond, first) @ odd
        steps[1, rows] = np.take(moment, first).sum(axis=1)
    scale = candidates * (width / (LEVELS - 1))
    # In units of the widest element, whose square a float64 always holds.
    unit = max(histogram.amax, width)
    errors = squares + (scale / unit) ** 2 * steps[0] - 2.0 * (scale / unit) * (steps[1] / unit)
    return errors, _TIE * squares


def _sums(
    histogram: Histogram, zoom: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """n_j and n_j c_j of the linear bins and of one bin beyond; sum of n_j c_j^2 / amax^2."""
    linear = histogram.linear(zoom).astype(np.float64)
    middles = (np.arange(BINS) + 0.5) * histogram.linear_width(zoom)
    edges = histogram.edges
    far = slice(ALL_BINS - zoom * (BINS // 2), ALL_BINS)
    far_counts = histogram.bins[far].astype(np.float64)
    far_middles = (edges[:-1][far] + edges[1:][far]) / 2.0
    number = np.append(linear, far_counts.sum())
    weight = np.append(linear * middles, far_counts @ far_middles)
    unit = max(histogram.amax, histogram.linear_width(zoom))
    squares = linear @ (middles / unit) ** 2 + far_counts @ (far_middles / unit) ** 2
    return number, weight, float(squares)


@lru_cache(maxsize=1)
def _first_beyond() -> NDArray[np.intp]:
    """[BINS - 127, 127]: row i - 128 holds ceil(((2q - 1) i - 127) / 254) for q = 1..127."""
    candidates = np.arange(LEVELS, BINS + 1, dtype=np.intp)[:, None]
    odd = 2 * np.arange(1, LEVELS, dtype=np.intp) - 1
    first: NDArray[np.intp] = -((LEVELS - 1 - odd * candidates) // (2 * (LEVELS - 1)))
    first.flags.writeable = False
    return first
