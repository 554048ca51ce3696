"""Thresholds against a plain re-implementation and on distributions with a known answer."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.entropy import entropy_amax, entropy_divergences
from calibration.errors import CalibrationError
from calibration.mse import squared_errors
from calibration.observer import ALL_BINS, BINS, ZOOM, Histogram, merge, observe
from calibration.threshold import DEAD_AMAX, METHODS, amax_by_method, choose_amax, method_named
from calibration.threshold_search import threshold_of_least_loss

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
        if i > 128:
            return math.inf
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


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_bounds_change_no_threshold(seed):
    histogram = observe("x", _random_values(np.random.default_rng(seed)), 0)
    chosen = threshold_of_least_loss(
        histogram, lambda h, zoom: (entropy_divergences(h, zoom), 1e-12)
    )
    if histogram.elements >= BINS:
        assert entropy_amax(histogram) == chosen


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


@pytest.mark.parametrize("outlier", [300.0, -1000.0, 2000.0])
def test_an_outlier_far_out_costs_no_resolution(outlier):
    values = np.append(np.random.default_rng(11).normal(size=200_000), outlier)
    assert 3.0 < choose_amax(observe("x", values, 0), "entropy") < 6.0


def test_numbers_in_the_first_of_4096_bins_count_as_zeros():
    values = np.append(np.random.default_rng(11).normal(size=200_000), 1e6)
    assert choose_amax(observe("x", values, 0), "entropy") == 1e6


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
    with pytest.raises(CalibrationError, match=r"no calibration method 'best'.*entropy, minmax"):
        choose_amax(observe("x", np.ones(3), 0), "best")


def test_a_tensor_that_never_had_an_element_is_refused():
    with pytest.raises(CalibrationError, match="without a single element"):
        choose_amax(Histogram(), "minmax")


def test_a_full_histogram_of_4096_bins_is_searched_to_its_end():
    counts = np.full(ALL_BINS, 1000, np.int64)
    top = math.nextafter(1.0, 0.0)
    assert entropy_divergences(Histogram(counts, 0, -top, top)).size == BINS - 127


def _plain_error(histogram, amax):
    """The squared error of quantising each |x| as the middle of its bin, element by element."""
    edges = histogram.edges
    step = amax / 127
    error = 0.0
    for low, high, count in zip(edges, edges[1:], histogram.bins.tolist(), strict=False):
        if count:
            middle = (low + high) / 2
            error += count * (middle - step * min(math.floor(middle / step + 0.5), 127)) ** 2
    return error


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(0, ZOOM))
def test_squared_errors_equal_the_plain_ones_at_every_zoom(seed, zoom):
    rng = np.random.default_rng(seed)
    histogram = observe("x", _random_values(rng), 0)
    fast, _ = squared_errors(histogram, zoom)
    # The plain sum must see the same bins: equal ones within the range, wider ones beyond it.
    equal = np.arange(BINS + 1) * histogram.linear_width(zoom)
    edges = np.append(equal, histogram.edges[histogram.edges > equal[-1]])
    bins = np.append(histogram.linear(zoom), histogram.bins[ALL_BINS - zoom * BINS // 2 :])
    same = SimpleNamespace(edges=edges, bins=bins)
    for i in {128, 129, 255, 256, fast.size + 127, *rng.integers(128, fast.size + 128, 3).tolist()}:
        plain = _plain_error(same, i * histogram.linear_width(zoom)) / histogram.amax**2
        assert fast[i - 128] == pytest.approx(plain, rel=1e-6, abs=1e-12 * histogram.elements)


def test_mse_is_the_threshold_that_really_has_the_least_error(rng):
    values = np.append(rng.laplace(size=20_000), 40.0).astype(np.float32)
    histogram = observe("x", values, 0)

    def error(amax):
        step = amax / 127
        return float(((values - step * np.clip(np.rint(values / step), -127, 127)) ** 2).mean())

    chosen = error(choose_amax(histogram, "mse"))
    tried = [error(amax) for amax in np.linspace(histogram.amax / 40, histogram.amax, 600)]
    assert chosen <= min(tried) * 1.005


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["50", "99", "99.9", "99.99", "99.999", "100"]))
def test_a_percentile_is_that_of_the_sorted_magnitudes(seed, percent):
    rng = np.random.default_rng(seed)
    values = _random_values(rng)
    histogram = observe("x", values, 0)
    ranked = np.sort(np.abs(values))
    exact = ranked[math.ceil(Fraction(percent) * ranked.size / 100) - 1]
    result = choose_amax(histogram, f"percentile:{percent}")
    if exact < histogram.edges[1]:
        assert result == histogram.amax
    else:
        assert exact <= result <= max(exact * (1 + 1 / 2048), exact + histogram.edges[1])
        assert result <= histogram.amax


def test_the_percentile_is_99_99_unless_another_is_named(rng):
    histogram = observe("x", rng.normal(size=100_000), 0)
    assert choose_amax(histogram, "percentile") == choose_amax(histogram, "percentile:99.99")
    assert choose_amax(histogram, "percentile:99.9") < choose_amax(histogram, "percentile")
    assert choose_amax(histogram, "percentile:100") == histogram.amax


def test_a_tensor_that_is_almost_always_zero_is_not_clipped_to_nothing(rng):
    seen = observe("x", rng.normal(size=10), 0)
    rare = merge(seen, observe("x", np.zeros(1_000_000), 1))
    assert choose_amax(rare, "percentile") == rare.amax


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("percentile:", "the percentile is ''"),
        ("percentile:best", "the percentile is 'best'.*write percentile:99.99"),
        ("percentile:0", "is 0, but must lie above 0"),
        ("percentile:100.1", "is 100.1, but must lie above 0 and not above 100"),
        ("percentile:-1", "the percentile is '-1'"),
        ("percentile:1e2", "the percentile is '1e2'"),
        ("entropy:5", "'entropy' takes no parameter, but '5' was given"),
        ("best:5", "no calibration method 'best:5'"),
    ],
)
def test_a_parameter_that_a_method_cannot_take_is_refused(method, message):
    with pytest.raises(CalibrationError, match=message):
        method_named(method)


def test_several_methods_share_one_observation(rng):
    seen = {"a": observe("a", rng.normal(size=900), 0), "b": observe("b", np.zeros(4), 0)}
    result = amax_by_method(seen, ["mse", "percentile:99"])
    assert result == {
        method: {name: choose_amax(histogram, method) for name, histogram in seen.items()}
        for method in ("mse", "percentile:99")
    }


@pytest.mark.parametrize("method", ["entropy", "mse"])
def test_merged_shards_give_the_threshold_of_the_whole(rng, method):
    values = rng.standard_t(2, size=30_000)
    shards = [observe("x", part, 0) for part in np.array_split(values, 7)]
    rng.shuffle(shards)
    merged = shards[0]
    for shard in shards[1:]:
        merged = merge(merged, shard)
    assert choose_amax(merged, method) == choose_amax(observe("x", values, 0), method)
