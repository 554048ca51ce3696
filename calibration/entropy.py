"""The entropy threshold: least KL divergence at 128 levels, after TensorRT's calibrator."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.observer import BINS, Histogram
from calibration.threshold_search import LEVELS, bins_used, threshold_of_least_loss

_ROWS = 256  # candidates at a time: their groups stay in the second-level cache
_TINY = float(np.finfo(np.float64).tiny)
_TIE = 1e-12  # nats; divergences closer than the rounding error of their sums are equal
_STEP = 64  # candidates from one whose D bounds the others to the next
_SLACK = 1e-9  # nats, far beyond `_TIE` and the rounding of bounds


def entropy_amax(histogram: Histogram) -> float:
    """The threshold with the least information loss, after TensorRT's EntropyCalibration2.

    b = counts, with b[0] := b[1]: zero is represented exactly whatever the scale, and the spike
    that ReLU puts there would hide everything else. T = sum b. For each candidate of i bins,
    128 <= i <= the bin of max |x| (2048 bins or more):

        reference  P[j] = b[j] for j < i - 1,  P[i-1] = b[i-1] + R,  R = sum over j >= i of b[j]
        source     c[j] = b[j], but for i = 128: c[127] = 1 if b[127] = 0 and R > 0
        groups     G_g = { j : floor(128 j / i) = g },  g = 0..127
        quantised  Q[j] = (sum of c over G_g) / (how many c in G_g are not 0) where c[j] > 0, else 0
        D(i)       KL(P / sum P || Q / sum Q) in nats; infinite if c[i-1] = 0 and R > 0

    The result is i * w for the least D(i), never more than max |x|. Among equal D the largest i
    wins, so data that lose nothing keep their full range. A threshold within a gap (D infinite)
    clips the same as the threshold at the start of the gap, and rounds more.

    Differences from the original: the one element of c, and the zoom of
    `threshold_search.threshold_of_least_loss`, at which R counts all beyond the range. In the
    original, a far outlier that leaves all else in fewer than 128 bins keeps the full range,
    because D is infinite at every other candidate, and no threshold is below max |x| / 32; here it
    can be max |x| / 2048. As in the original, values in the first bin of the whole range, below
    max |x| / 2048, count as zeros: if they are the signal, take another method.

    With fewer elements than bins most bins are empty; the range is then max |x|. This is another
    difference from the original.
    """
    if histogram.elements < BINS:
        return histogram.amax
    return threshold_of_least_loss(
        histogram, lambda observed, zoom: (_least_divergences(observed, zoom), _TIE)
    )


def entropy_divergences(histogram: Histogram, zoom: int = 0) -> NDArray[np.float64]:
    """D(i) of `entropy_amax` in nats for i = 128, 129, ... up to the bin of max |x|."""
    candidates = _Candidates(histogram, zoom)
    return candidates.divergences(np.arange(candidates.bins.size))


def _least_divergences(histogram: Histogram, zoom: int) -> NDArray[np.float64]:
    """`entropy_divergences`, but infinite where a bound says that another candidate has less."""
    candidates = _Candidates(histogram, zoom)
    divergences = np.full(candidates.bins.size, np.inf)
    some = np.arange(0, divergences.size, _STEP)
    divergences[some] = candidates.divergences(some)
    others = np.flatnonzero(candidates.bounds() <= divergences.min() + _SLACK)
    divergences[others] = candidates.divergences(others)
    return divergences


class _Candidates:
    """The candidates of a histogram at a zoom, `bins` of each.

    With B and N the running sums of b and of [b > 0], S_g and n_g their differences over group g,
    and m_g = S_g / n_g (the last one with the element of c), all candidates follow from running
    sums:

        T D(i) = sum_j P[j] ln P[j] - sum_g S_g ln m_g - R ln m_127 - T ln T + T ln(sum c)
    """

    def __init__(self, histogram: Histogram, zoom: int) -> None:
        used = bins_used(histogram, zoom)
        linear = histogram.linear(zoom)
        beyond = float(histogram.elements - int(linear.sum()))
        counts = linear[:used].astype(np.float64)
        counts[0] = counts[1]
        self.bins = bins = np.arange(LEVELS, used + 1)
        self._count_sums = _running(counts)
        self._filled_sums = _running(counts > 0.0)
        self._log_sums = _running(_x_log_x(counts))
        self._last, self._inside = counts[bins - 1], self._count_sums[bins]
        self._total = float(self._count_sums[-1]) + beyond
        self._outside = self._total - self._inside
        is_first = bins == LEVELS
        in_gap = (self._last == 0.0) & (self._outside > 0.0)
        self._added_element = np.where(in_gap & is_first, 1.0, 0.0)
        self._infinite = in_gap & ~is_first
        empty = np.flatnonzero(counts == 0.0)
        self._first_empty = int(empty[0]) if empty.size else used

    def divergences(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """D of the candidates with these numbers, which ascend."""
        possible = rows[~self._infinite[rows]]
        divergences = np.full(rows.size, np.inf)
        parts = [
            self._quantised(possible[start : start + _ROWS])
            for start in range(0, possible.size, _ROWS)
        ]
        if parts:
            quantised = np.concatenate(parts)
            divergences[~self._infinite[rows]] = self._divergences(possible, quantised)
        return divergences

    def bounds(self) -> NDArray[np.float64]:
        """Numbers that D is not below, but for the rounding of sums.

        Q is c in all groups but the last: what a group rounds makes D larger (log sum inequality).
        """
        start = _group_edges()[: self.bins.size, -2]
        in_last = np.maximum(self._inside - self._count_sums[start], _TINY)
        filled = np.maximum(self._filled_sums[self.bins] - self._filled_sums[start], 1.0)
        quantised = self._log_sums[start] + (in_last + self._outside) * np.log(in_last / filled)
        bounds = self._divergences(np.arange(self.bins.size), quantised)
        bounds[self._infinite] = np.inf
        return bounds

    def _quantised(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """sum_g S_g ln m_g + R ln m_127 of at most `_ROWS` candidates."""
        stop = int(rows[-1]) + 1
        # A view where no candidate is left out.
        block = slice(int(rows[0]), stop) if stop - rows[0] == rows.size else rows
        outside, added = self._outside[rows], self._added_element[rows]
        in_group = _between(self._count_sums, _group_edges()[block])
        if self.bins[rows[-1]] <= self._first_empty:  # then no group has an empty bin
            mean = in_group / _group_sizes()[block]
            np.log(mean, out=mean)
            in_group[:, -1] += outside
        else:
            mean = _between(self._filled_sums, _group_edges()[block])
            mean[:, -1] += added
            np.maximum(mean, 1.0, out=mean)
            in_group[:, -1] += added
            np.divide(in_group, mean, out=mean)
            # S_g = 0 makes the term 0 for any finite logarithm.
            np.log(np.maximum(mean, _TINY, out=mean), out=mean)
            in_group[:, -1] += outside - added
        quantised: NDArray[np.float64] = np.einsum("ij,ij->i", in_group, mean)
        return quantised

    def _divergences(
        self, rows: NDArray[np.intp], quantised: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        reference = self._log_sums[self.bins[rows] - 1]
        reference += _x_log_x(self._last[rows] + self._outside[rows])
        divergences = (reference - quantised) / self._total - math.log(self._total)
        inside_sums = self._inside[rows] + self._added_element[rows]
        divergences += np.log(np.maximum(inside_sums, 1.0))  # 0 only within a gap
        result: NDArray[np.float64] = divergences
        return result


def _running(numbers: NDArray[Any]) -> NDArray[np.float64]:
    """Running sums, from 0 on."""
    return np.concatenate(([0.0], np.cumsum(numbers)))


def _between(sums: NDArray[np.float64], edges: NDArray[np.intp]) -> NDArray[np.float64]:
    """Running sums -> the sums between the edges of each row."""
    # mode "clip" avoids a copy; all indices are valid.
    edge_sums = np.take(sums, edges, mode="clip")
    between: NDArray[np.float64] = np.subtract(edge_sums[:, 1:], edge_sums[:, :-1])
    return between


def _x_log_x(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """x ln x with its limit 0 at 0."""
    return x * np.log(np.where(x > 0.0, x, 1.0))


@lru_cache(maxsize=1)
def _group_edges() -> NDArray[np.intp]:
    """[BINS - 127, 129]: row i - 128 holds ceil(g i / 128), the first bin of each group g."""
    candidates = np.arange(LEVELS, BINS + 1, dtype=np.intp)[:, None]
    edges: NDArray[np.intp] = -(-candidates * np.arange(LEVELS + 1, dtype=np.intp) // LEVELS)
    edges.flags.writeable = False
    return edges


@lru_cache(maxsize=1)
def _group_sizes() -> NDArray[np.float64]:
    """[BINS - 127, 128]: the bins of each group of `_group_edges`."""
    sizes = np.diff(_group_edges()).astype(np.float64)
    sizes.flags.writeable = False
    return sizes
