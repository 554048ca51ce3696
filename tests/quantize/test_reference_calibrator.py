"""Our thresholds beside those of NVIDIA's HistogramCalibrator, as its documentation describes it.

pytorch-quantization and ModelOpt share it: 2048 bins of |x| up to the largest, and the threshold
* entropy: the first edge after i bins, i from 128 in steps of 1, of the last least KL divergence
  between the first i bins, with the tail in the last, and their means over 128 equal groups, bins
  that are empty left out, bin 0 set to bin 1;
* mse: the middle of the bin, from the 128th, that as amax gives the least squared error of the
  middles, quantised with rounding to even;
* percentile: the lower edge of the bin in which the running share reaches 99.99 %.

Written here in our own words. Where a threshold differs by more than a bin, the case and the reason
are in a table below.
"""

import functools
import math

import numpy as np
import pytest

from calibration.observer import BINS, ZOOM, observe
from calibration.threshold import choose_amax

SIZE = 200_000


@functools.cache
def groups(bins):
    """The group of each bin: the same for all histograms, and most of the reference's time."""
    return (np.digitize(np.arange(bins), np.linspace(0, bins, 129)) - 1).astype(np.int16)


def reference_divergences(counts):
    """KL divergence in nats for i = 128, 129, ... bins; infinite where Q is 0 and P is not."""
    bins = counts.astype(np.float64)
    bins[0] = bins[1]
    results = []
    for i in range(128, bins.size + 1):
        inside = bins[:i]
        group = groups(i)
        filled = inside > 0
        sums = np.bincount(group[filled], inside[filled], 128)
        means = sums / np.maximum(np.bincount(group[filled], minlength=128), 1)
        quantised = np.where(filled, means[group], 0.0)
        folded = inside.copy()
        folded[-1] += bins[i:].sum()
        p = folded / max(folded.sum(), 1.0)
        q = quantised / max(quantised.sum(), 1.0)
        with np.errstate(divide="ignore"):
            results.append(float(np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))))
    return np.array(results)


def reference_entropy(counts, edges):
    result = reference_divergences(counts)
    return edges[128 + result.size - 1 - int(np.argmin(result[::-1]))]


def reference_zoomed(seen, zoom):
    """The reference on a part of the range, all beyond it in one more bin; and the bins' width."""
    inside, width = seen.linear(zoom), seen.linear_width(zoom)
    result = reference_divergences(np.append(inside, seen.elements - inside.sum()))[:-1]
    return (128 + result.size - 1 - int(np.argmin(result[::-1]))) * width, width


def reference_errors(counts, middles, thresholds):
    """Sum of squared errors of the middles, for each threshold."""
    steps = np.asarray(thresholds)[:, None] / 127
    quantised = steps * np.clip(np.rint(middles / steps), -127, 127)
    return ((quantised - middles) ** 2 * counts).sum(axis=1)


def reference_mse(counts, edges):
    middles = (edges[1:] + edges[:-1]) / 2
    blocks = np.array_split(middles[128:], 32)
    errors = np.concatenate([reference_errors(counts, middles, block) for block in blocks])
    return middles[128 + int(np.argmin(errors))]


def reference_percentile(counts, edges):
    return edges[np.searchsorted(np.cumsum(counts) / counts.sum(), 0.9999)]


def with_outlier(far):
    return lambda rng: np.append(rng.normal(size=SIZE), far)


CASES = {
    "gaussian": lambda rng: rng.normal(size=SIZE),
    "laplace": lambda rng: rng.laplace(size=SIZE),
    "uniform": lambda rng: rng.uniform(-1, 1, SIZE),
    "student-t": lambda rng: rng.standard_t(3, size=SIZE),
    "heavy-tail": lambda rng: rng.standard_t(2, size=SIZE),
    "log-normal": lambda rng: rng.lognormal(size=SIZE),
    "relu": lambda rng: np.maximum(rng.normal(size=SIZE), 0),
    "relu6": lambda rng: np.clip(rng.normal(size=SIZE) * 4, 0, 6),
    "sigmoid": lambda rng: 1 / (1 + np.exp(-rng.normal(-6, 2, SIZE))),
    "softmax": lambda rng: rng.dirichlet(np.full(200, 0.1), SIZE // 200),
    "two-humps": lambda rng: np.concatenate(
        [0.1 * rng.normal(size=SIZE), rng.normal(3, 0.1, SIZE)]
    ),
    "outlier-at-20": with_outlier(20.0),
    "outlier-at-60": with_outlier(60.0),
    "outlier-at-300": with_outlier(300.0),
    "outlier-at-1000": with_outlier(-1000.0),
    "few": lambda rng: rng.normal(size=300),
    "constant": lambda _: np.full(1000, 3.0),
}
# All but the outlier lie in fewer than 128 bins: in the reference every threshold but the full
# range ends in an empty bin, where its divergence is infinite. We look at those bins closer.
ZOOMED = {"outlier-at-300", "outlier-at-1000"}


def observed(case, rng):
    """A histogram, and its bins up to the largest number with their edges."""
    seen = observe("x", CASES[case](rng).astype(np.float32), 0)
    used = math.floor(seen.amax / seen.width) + 1
    return seen, seen.counts[:used], np.arange(used + 1) * seen.width


@pytest.mark.parametrize(
    "case",  # of a heavy tail the reference takes seconds
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case == "heavy-tail"))
        for case in sorted(CASES)
    ],
)
def test_on_the_same_bins_the_entropy_threshold_is_that_of_the_reference(case, rng):
    seen, counts, edges = observed(case, rng)
    ours, reference = choose_amax(seen, "entropy"), reference_entropy(counts, edges)
    if seen.elements < BINS:  # too few to be a distribution: nothing is clipped
        assert ours == seen.amax
    elif case in ZOOMED:
        assert reference == edges[-1]
        assert 3.0 < ours < 6.0
    elif reference >= edges[256]:
        assert abs(ours - reference) <= seen.width
    else:  # a long tail by chance: fewer than two bins for a level, so we look closer
        results = [reference_zoomed(seen, zoom) for zoom in range(1, ZOOM + 1)]
        closer = next((edge for edge, width in results if edge >= 256 * width), results[-1][0])
        assert abs(ours - closer) <= seen.width


@pytest.mark.parametrize("case", sorted(CASES))
def test_on_the_same_bins_the_percentile_is_that_of_the_reference(case, rng):
    seen, counts, edges = observed(case, rng)
    ours, reference = choose_amax(seen, "percentile"), reference_percentile(counts, edges)
    assert abs(ours - reference) <= seen.width


@pytest.mark.parametrize("case", sorted(CASES))
def test_on_the_same_bins_mse_is_that_of_the_reference_or_as_good(case, rng):
    """Ours are edges, theirs middles: on a flat and jagged error the best of each may lie apart."""
    seen, counts, edges = observed(case, rng)
    ours, reference = choose_amax(seen, "mse"), reference_mse(counts, edges)
    if abs(ours - reference) > seen.width:
        middles = (edges[1:] + edges[:-1]) / 2
        errors = reference_errors(counts, middles, [ours, reference])
        assert errors[0] <= errors[1] * 1.001
        assert abs(ours - reference) <= 0.05 * reference


# Their own 2048 bins up to the largest number are not our bins of a power of two. What follows for
# the threshold: nothing for the percentile; little where the criterion is flat.


@pytest.mark.parametrize("case", sorted(CASES))
def test_beside_2048_bins_of_its_own_the_reference_finds_nothing_better(case, rng):
    values = np.abs(CASES[case](rng).astype(np.float32)).astype(np.float64)
    seen = observe("x", values, 0)
    counts, edges = np.histogram(values, 2048, (0.0, values.max()))
    width, middles = edges[1], (edges[1:] + edges[:-1]) / 2
    percentile = reference_percentile(counts, edges)
    assert abs(choose_amax(seen, "percentile") - percentile) <= 1.01 * width + seen.width
    ours, reference = choose_amax(seen, "mse"), reference_mse(counts, edges)
    errors = reference_errors(counts, middles, [ours, reference])
    assert errors[0] <= errors[1] * 1.02 or abs(ours - reference) <= width
    if case not in {*ZOOMED, "few", "heavy-tail", "student-t"}:  # ours look closer, or not at all
        result = reference_divergences(counts)
        at_ours = min(max(round(choose_amax(seen, "entropy") / width), 128), 2048)
        near = result[max(at_ours - 130, 0) : at_ours - 128 + 3]
        assert near.min() <= result.min() + 0.02
