"""The entropy threshold: least KL divergence at 128 levels, after TensorRT's calibrator."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from calibration.observer import BINS, Histogram
from calibration.threshold_search import LEVELS, bins_used, threshold_of_least_loss

_ROWS = 256  # candidates at a time: their groups stay in the second-level cache
_TINY = float(np.finfo(np.float64).tiny)
_TIE = 1e-12  # nats; divergences closer than the rounding error of their sums are equal


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
        histogram, lambda observed, zoom: (entropy_divergences(observed, zoom), _TIE)
    )


def entropy_divergences(histogram: Histogram, zoom: int = 0) -> NDArray[np.float64]:
    """D(i) of `entropy_amax` in nats for i = 128, 129, ... up to the bin of max |x|.

    With B and N the running sums of b and of [b > 0], S_g and n_g their differences over group g,
    and m_g = S_g / n_g (the last one with the element of c), all candidates follow from running
    sums:

        T D(i) = sum_j P[j] ln P[j] - sum_g S_g ln m_g - R ln m_127 - T ln T + T ln(sum c)
    """
    used = bins_used(histogram, zoom)
    linear = histogram.linear(zoom)
    beyond = float(histogram.elements - int(linear.sum()))
    counts = linear[:used].astype(np.float64)
    counts[0] = counts[1]
    count_sums = np.concatenate(([0.0], np.cumsum(counts)))
    filled_sums = np.concatenate(([0.0], np.cumsum(counts > 0.0)))
    candidates = np.arange(LEVELS, used + 1)
    last, inside, total = counts[candidates - 1], count_sums[candidates], count_sums[-1] + beyond
    outside = total - inside
    in_gap = (last == 0.0) & (outside > 0.0)
    added_element = np.where(in_gap & (candidates == LEVELS), 1.0, 0.0)

    possible = np.flatnonzero(~in_gap | (candidates == LEVELS))
    empty = np.flatnonzero(counts == 0.0)
    first_empty = int(empty[0]) if empty.size else used
    quantised = np.zeros(candidates.size)
    for start in range(0, possible.size, _ROWS):
        rows = possible[start : start + _ROWS]
        stop = int(rows[-1]) + 1
        # A view where no candidate is left out.
        block = slice(int(rows[0]), stop) if stop - rows[0] == rows.size else rows
        in_group = _between(count_sums, _group_edges()[block])
        if candidates[rows[-1]] <= first_empty:  # then no group has an empty bin
            mean = in_group / _group_sizes()[block]
            np.log(mean, out=mean)
            in_group[:, -1] += outside[rows]
        else:
            mean = _between(filled_sums, _group_edges()[block])
            mean[:, -1] += added_element[rows]
            np.maximum(mean, 1.0, out=mean)
            in_group[:, -1] += added_element[rows]
            np.divide(in_group, mean, out=mean)
            # S_g = 0 makes the term 0 for any finite logarithm.
            np.log(np.maximum(mean, _TINY, out=mean), out=mean)
            in_group[:, -1] += outside[rows] - added_element[rows]
        quantised[rows] = np.einsum("ij,ij->i", in_group, mean)

    reference = np.concatenate(([0.0], np.cumsum(_x_log_x(counts))))[candidates - 1]
    reference += _x_log_x(last + outside)
    divergences: NDArray[np.float64] = (reference - quantised) / total - math.log(total)
    divergences += np.log(np.maximum(inside + added_element, 1.0))  # 0 only within a gap
    divergences[in_gap & (candidates > LEVELS)] = np.inf
    return divergences


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
