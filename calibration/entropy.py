"""The threshold that loses the least information at 128 levels, after TensorRT's calibrator."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from calibration.observer import BINS, Histogram
from calibration.search import LEVELS, bins_used, least_loss

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
    would clip what the threshold at the beginning of the gap clips, and round more.

    Our own are the one element of c and the zoom of `search.least_loss`, at which R counts all that
    lies beyond the range. In the original, an outlier so far out that all else lies in fewer than
    128 bins keeps the full range, because D is infinite at every other candidate; and no threshold
    is below max |x| / 32. With them it can be max |x| / 2048. As in the original, all numbers in
    the first bin of the whole range, below max |x| / 2048, count as zeros: where they are the
    signal, take another method.

    Fewer elements than bins leave most bins empty and tell nothing of a distribution; the range is
    then max |x|. That, too, is our own.
    """
    if histogram.elements < BINS:
        return histogram.amax
    return least_loss(histogram, lambda seen, zoom: (entropy_divergences(seen, zoom), _TIE))


def entropy_divergences(histogram: Histogram, zoom: int = 0) -> NDArray[np.float64]:
    """D(i) of `entropy_amax` in nats for i = 128, 129, ... up to the bin of max |x|.

    With B and N the running sums of b and of [b > 0], S_g and n_g their differences over group g,
    and m_g = S_g / n_g (its last one with c's element), all candidates follow from sums known
    beforehand:

        T D(i) = sum_j P[j] ln P[j] - sum_g S_g ln m_g - R ln m_127 - T ln T + T ln(sum c)
    """
    used = bins_used(histogram, zoom)
    linear = histogram.linear(zoom)
    beyond = float(histogram.elements - int(linear.sum()))
    counts = linear[:used].astype(np.float64)
    counts[0] = counts[1]
    held = np.concatenate(([0.0], np.cumsum(counts)))
    filled = np.concatenate(([0.0], np.cumsum(counts > 0.0)))
    candidates = np.arange(LEVELS, used + 1)
    last, inside, total = counts[candidates - 1], held[candidates], held[-1] + beyond
    outside = total - inside
    in_gap = (last == 0.0) & (outside > 0.0)
    stand_in = np.where(in_gap & (candidates == LEVELS), 1.0, 0.0)

    quantised = np.empty(candidates.size)
    for start in range(0, candidates.size, _ROWS):
        rows = slice(start, start + _ROWS)
        edges = _group_edges()[: candidates.size][rows]
        in_group = _between(held, edges)
        mean = _between(filled, edges)
        mean[:, -1] += stand_in[rows]
        np.maximum(mean, 1.0, out=mean)
        in_group[:, -1] += stand_in[rows]
        np.divide(in_group, mean, out=mean)
        # S_g = 0 makes the term 0, whatever finite number stands for its logarithm.
        np.log(np.maximum(mean, _TINY, out=mean), out=mean)
        in_group[:, -1] += outside[rows] - stand_in[rows]
        quantised[rows] = np.einsum("ij,ij->i", in_group, mean)

    reference = np.concatenate(([0.0], np.cumsum(_x_log_x(counts))))[candidates - 1]
    reference += _x_log_x(last + outside)
    divergences: NDArray[np.float64] = (reference - quantised) / total - math.log(total)
    divergences += np.log(np.maximum(inside + stand_in, 1.0))  # 0 only within a gap
    divergences[in_gap & (candidates > LEVELS)] = np.inf
    return divergences


def _between(sums: NDArray[np.float64], edges: NDArray[np.intp]) -> NDArray[np.float64]:
    """Running sums -> the sums between the edges of each row."""
    # "clip" changes nothing, but lets numpy leave out a copy.
    at = np.take(sums, edges, mode="clip")
    between: NDArray[np.float64] = np.subtract(at[:, 1:], at[:, :-1])
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
