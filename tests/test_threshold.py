"""Thresholds against a plain re-implementation and on distributions with a known answer."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.errors import CalibrationError
from calibration.observer import BINS, Histogram, merge, observe
from calibration.threshold import (
    DEAD_AMAX,
    METHODS,
    choose_amax,
    entropy_amax,
    entropy_divergences,
)

SEEDS = st.integers(0, 2**32 - 1)


def _plain_divergence(counts, i):
    """KL(P || Q) for a threshold of i bins, written down bin by bin."""
    b = list(counts)
    b[0] = b[1]
    outliers = sum(b[i:])
    p = b[:i]
    p[i - 1] += outliers
    c = b[:i]
    if c[i - 1] == 0 and outliers > 0:
        c[i - 1] = 1
    groups = [[] for _ in range(128)]
    for j in range(i):
        groups[128 * j // i].append(j)
    q = [0.0] * i
    for group in groups:
        filled = [j for j in group if c[j] > 0]
        for j in filled:
            q[j] = sum(c[k] for k in group) / len(filled)
    p_sum, q_sum = sum(p), sum(q)
    return sum(
        p[j] / p_sum * math.log((p[j] / p_sum) / (q[j] / q_sum)) for j in range(i) if p[j] > 0
    )


def _plain_amax(histogram):
    counts = histogram.counts.tolist()
    used = int(histogram.amax / histogram.width) + 1
    divergences = {i: _plain_divergence(counts[:used], i) for i in range(128, used + 1)}
    least = min(divergences.values())
    widest = max(i for i, value in divergences.items() if value <= least + 1e-12)
    return min(widest * histogram.width, histogram.amax)


def _random_values(rng):
    """Sometimes dense, sometimes sparse, with and without zeros, tails and gaps."""
    size = int(rng.choice([30, 1000, 50_000]))
    body = rng.choice([rng.normal(size=size), rng.laplace(size=size), rng.uniform(-1, 1, size)])
    if rng.random() < 0.5:
        body = np.maximum(body, 0.0)
    outliers = rng.normal(size=int(rng.integers(0, 4))) * 10.0 ** rng.integers(0, 4)
    return np.concatenate([body, outliers, [1e-3]]) * 10.0 ** rng.integers(-6, 6)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_divergences_equal_the_plain_ones(seed):
    rng = np.random.default_rng(seed)
    histogram = observe("x", _random_values(rng), 0)
    fast = entropy_divergences(histogram)
    used = fast.size + 127
    counts = histogram.counts[:used].tolist()
    assert sum(counts) == histogram.elements  # the candidates reach the largest value
    for i in {128, 129, 255, 256, used, *rng.integers(128, used + 1, 3).tolist()}:
        assert fast[i - 128] == pytest.approx(_plain_divergence(counts, i), rel=1e-9, abs=1e-11)


def test_the_chosen_threshold_is_the_plain_one():
    rng = np.random.default_rng(1)
    values = np.append(rng.normal(size=20_000), [4.2, -7.5])
    histogram = observe("x", values, 0)
    assert entropy_amax(histogram) == _plain_amax(histogram)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.sampled_from(sorted(METHODS)))
def test_every_method_gives_a_positive_amax_within_the_data(seed, method):
    histogram = observe("x", _random_values(np.random.default_rng(seed)), 0)
    assert 0 < choose_amax(histogram, method) <= histogram.amax


def test_minmax_is_the_exact_largest_magnitude_of_both_signs():
    values = np.array([-10.3, 2.0], np.float32)
    assert choose_amax(observe("x", values, 0), "minmax") == float(np.float32(10.3))


@pytest.mark.parametrize("outlier", [20.0, 40.0, -60.0])
def test_one_outlier_does_not_widen_a_gaussian(outlier):
    values = np.append(np.random.default_rng(11).normal(size=200_000), outlier)
    assert 3.0 < choose_amax(observe("x", values, 0), "entropy") < 6.0


def test_an_outlier_beyond_empty_bins_is_clipped_as_far_as_the_histogram_resolves():
    values = np.append(np.random.default_rng(11).normal(size=200_000), 1000.0)
    assert choose_amax(observe("x", values, 0), "entropy") <= 1024.0 / 32 * 1.1


def test_a_uniform_tensor_keeps_its_range():
    values = np.random.default_rng(13).uniform(-5, 5, 500_000)
    histogram = observe("x", values, 0)
    assert choose_amax(histogram, "entropy") > 0.98 * histogram.amax


@pytest.mark.parametrize("rectify", [np.abs, lambda x: np.maximum(x, 0)])
def test_half_of_a_gaussian_keeps_three_sigma_whatever_its_spike_at_zero(rectify):
    values = rectify(np.random.default_rng(17).normal(size=1_000_000)).astype(np.float32)
    histogram = observe("x", values, 0)
    assert 3.0 < choose_amax(histogram, "entropy") <= histogram.amax
    many_zeros = merge(histogram, observe("x", np.zeros(50_000_000, np.float16), 1))
    assert choose_amax(many_zeros, "entropy") == choose_amax(histogram, "entropy")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_tensor_of_zeros_gets_the_documented_amax(method):
    assert choose_amax(observe("x", np.zeros(100), 0), method) == DEAD_AMAX
    assert np.float16(DEAD_AMAX / 127) == DEAD_AMAX / 127 > 0


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("value", [3.0, -0.7, 1e-20, 2.0**10])
def test_a_constant_tensor_keeps_its_value(method, value):
    assert choose_amax(observe("x", np.full(1000, value), 0), method) == abs(value)


def test_two_numbers_lose_nothing_and_keep_their_range():
    values = np.array([0.0] * 90 + [6.0] * 10)
    assert choose_amax(observe("x", values, 0), "entropy") == 6.0


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(-40, 40))
def test_entropy_scales_with_the_data(seed, power):
    values = np.random.default_rng(seed).laplace(size=5000)
    scaled = choose_amax(observe("x", np.ldexp(values, power), 0), "entropy")
    assert scaled == math.ldexp(choose_amax(observe("x", values, 0), "entropy"), power)


def test_an_unknown_method_is_answered_with_the_known_ones():
    with pytest.raises(CalibrationError, match=r"no calibration method 'best'.*minmax, entropy"):
        choose_amax(observe("x", np.ones(3), 0), "best")


def test_a_tensor_that_never_had_an_element_is_refused():
    with pytest.raises(CalibrationError, match="without a single element"):
        choose_amax(Histogram(), "minmax")


def test_a_full_histogram_of_4096_bins_is_searched_to_its_end():
    counts = np.full(BINS, 1000, np.int64)
    top = math.nextafter(1.0, 0.0)
    assert entropy_divergences(Histogram(counts, 0, -top, top)).size == BINS - 127
