"""Histograms lose nothing: not by growth, not by shards, not by order."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from calibration import observer
from calibration.errors import CalibrationError
from calibration.observer import (
    ALL_BINS,
    BINS,
    MIN_EXPONENT,
    ZOOM,
    Histogram,
    Tally,
    merge,
    observe,
)

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
ARRAYS = npst.arrays(np.float32, st.integers(0, 50), elements=FLOATS)


def _state(histogram):
    """Every bit of a histogram; the sign of a zero, too."""
    ends = (histogram.minimum.hex(), histogram.maximum.hex())
    return histogram.bins.tobytes(), histogram.exponent, ends


def _merged(shards):
    whole = Histogram()
    for shard in shards:
        whole = merge(whole, shard)
    return whole


@settings(deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=6), st.data())
def test_shards_merge_to_the_histogram_of_the_whole_in_any_order_and_grouping(arrays, data):
    whole = observe("x", np.concatenate(arrays), 0)
    shards = [observe("x", array, 0) for array in arrays]
    shuffled = data.draw(st.permutations(shards))
    cut = data.draw(st.integers(0, len(shards)))
    grouped = merge(_merged(shuffled[:cut]), _merged(shuffled[cut:]))
    assert _state(_merged(shards)) == _state(_merged(shuffled)) == _state(grouped) == _state(whole)


@settings(deadline=None)
@given(ARRAYS)
def test_counts_are_those_of_a_plain_float64_floor(array):
    histogram = observe("x", array, 0)
    expected = np.zeros(BINS, np.int64)
    for x in array.tolist():
        expected[math.floor(abs(x) / histogram.width)] += 1
    assert histogram.counts.tolist() == expected.tolist()
    assert histogram.elements == array.size


@settings(deadline=None)
@given(npst.arrays(np.float32, st.integers(1, 50), elements=FLOATS))
def test_extremes_are_exact(array):
    histogram = observe("x", array, 0)
    assert histogram.minimum == array.min()
    assert histogram.maximum == array.max()
    assert histogram.amax == np.abs(array).max()


@settings(deadline=None)
@given(st.floats(2.0**-100, 1.7e38), st.floats(1.0, 2.0**20))
def test_at_least_2048_bins_lie_within_the_range_of_the_data_after_growth(first, factor):
    small, large = np.array([first]), np.array([first * factor])
    grown = merge(observe("x", small, 0), observe("x", large, 1))
    assert grown.amax / grown.width >= 2048
    assert grown.amax < grown.width * BINS
    assert grown.elements == 2


def test_a_sample_of_zeros_does_not_widen_the_range_of_a_small_tensor():
    small = observe("x", np.array([1e-5, 3e-6]), 0)
    both = merge(small, observe("x", np.zeros(4), 1))
    assert _state(both) == _state(observe("x", np.array([1e-5, 3e-6, 0, 0, 0, 0]), 0))
    assert both.width == small.width


def test_growth_over_the_whole_float32_range_keeps_every_count():
    values = np.ldexp(np.float32(1.5), np.arange(-126, 127)).astype(np.float32)
    one_by_one = _merged(observe("x", values[i : i + 1], i) for i in range(values.size))
    assert _state(one_by_one) == _state(observe("x", values[::-1], 0))
    assert one_by_one.elements == values.size


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_float_width_counts_alike(dtype):
    values = np.random.default_rng(3).normal(size=1000).astype(np.float16)
    expected = observe("x", values.astype(np.float64), 0)
    assert _state(observe("x", values.astype(dtype), 0)) == _state(expected)


def test_shape_and_memory_layout_do_not_matter():
    values = np.random.default_rng(5).normal(size=(40, 50, 60)).astype(np.float32)
    expected = _state(observe("x", values.reshape(-1), 0))
    assert _state(observe("x", values.transpose(2, 0, 1), 0)) == expected
    assert _state(observe("x", np.repeat(values, 2, axis=1)[:, ::2], 0)) == expected


def test_more_elements_than_a_block_are_all_counted():
    values = np.random.default_rng(7).uniform(-1, 1, 200_003).astype(np.float32)
    histogram = observe("x", values, 0)
    expected = np.bincount(
        np.floor(np.abs(values.astype(np.float64)) / histogram.width).astype(int), minlength=BINS
    )
    assert np.array_equal(histogram.counts, expected)


@pytest.mark.parametrize(
    ("bad", "counted"), [(np.nan, "1 NaN and 0 infinite"), (-np.inf, "0 NaN and 1 infinite")]
)
def test_a_number_that_is_not_finite_is_named_with_tensor_and_sample(bad, counted):
    values = np.ones(100_000, np.float32)
    values[70_001] = bad
    with pytest.raises(CalibrationError, match=f"'conv1'.*{counted}.*sample 12"):
        observe("conv1", values, 12)


@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8", "complex64"])
def test_a_tensor_that_is_not_floating_point_is_refused(dtype):
    with pytest.raises(CalibrationError, match=re.escape(f"'shape' is {dtype} in sample 0")):
        observe("shape", np.ones(3, dtype), 0)


def test_an_empty_array_changes_nothing():
    seen = observe("x", np.array([1.0, -3.0]), 0)
    assert _state(merge(seen, observe("x", np.zeros((0, 4), np.float32), 1))) == _state(seen)


def test_the_input_is_not_changed():
    values = np.array([-1.0, 2.0], np.float32)
    observe("x", values, 0)
    assert values.tolist() == [-1.0, 2.0]


def test_counts_cannot_be_changed():
    histogram = observe("x", np.array([1.0]), 0)
    with pytest.raises(ValueError, match="read-only"):
        histogram.counts[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        histogram.bins[0] = 1


def test_zeros_are_dead_and_one_number_is_constant():
    zeros = observe("x", np.array([0.0, -0.0], np.float32), 0)
    assert zeros.dead
    assert zeros.constant
    assert zeros.exponent == MIN_EXPONENT
    ones = observe("x", np.ones(5), 0)
    assert ones.constant
    assert not ones.dead
    assert not merge(ones, zeros).constant
    assert not merge(ones, zeros).dead


@settings(deadline=None)
@given(ARRAYS.filter(len), st.sampled_from([np.float32, np.float64]))
def test_every_bin_holds_what_lies_between_its_edges(array, dtype):
    histogram = observe("x", array.astype(dtype), 0)
    assert histogram.edges.size == ALL_BINS + 1
    expected = np.zeros(ALL_BINS, np.int64)
    for x in np.abs(array.astype(np.float64)):
        expected[np.flatnonzero(histogram.edges <= x)[-1]] += 1
    assert histogram.bins.tolist() == expected.tolist()


@settings(deadline=None)
@given(ARRAYS.filter(len), st.integers(0, ZOOM))
def test_a_zoom_gives_equal_bins_over_a_part_of_the_range(array, zoom):
    histogram = observe("x", array, 0)
    width = histogram.linear_width(zoom)
    assert width == histogram.width / 2**zoom
    expected = np.zeros(BINS, np.int64)
    for x in array.tolist():
        if abs(x) < width * BINS:
            expected[math.floor(abs(x) / width)] += 1
    assert histogram.linear(zoom).tolist() == expected.tolist()


def test_small_numbers_keep_fine_bins_beside_a_far_outlier():
    histogram = observe("x", np.array([1.0, 1.1, 1000.0]), 0)
    assert np.count_nonzero(histogram.bins) == 3
    assert np.count_nonzero(histogram.counts) == 2


@settings(deadline=None)
@given(st.lists(ARRAYS, min_size=1, max_size=6), st.data())
def test_a_tally_of_arrays_in_any_order_and_grouping_is_the_histogram_of_the_whole(arrays, data):
    whole = observe("x", np.concatenate(arrays), 0)
    shuffled = data.draw(st.permutations(arrays))
    cut = data.draw(st.integers(0, len(arrays)))
    tally = Tally("x")
    for array in shuffled[:cut]:
        tally.add(array, 0)
    # Looking at it on the way, or going on from there, changes nothing.
    for going_on in (tally, Tally("x", initial=tally.histogram())):
        for array in shuffled[cut:]:
            going_on.add(array, 0)
        assert _state(going_on.histogram()) == _state(whole)


def test_arrays_of_every_size_and_width_are_counted_where_parts_are_small(rng, monkeypatch):
    monkeypatch.setattr(observer, "MAX_PER_COUNT", 64)
    monkeypatch.setattr(observer, "_BLOCK", 24)
    monkeypatch.setattr(observer, "_lower_limits", observer._lower_limits.__wrapped__)  # no cache
    monkeypatch.setattr(observer, "_MAX_COUNTED", 200)
    for _ in range(20):
        arrays = [
            (rng.standard_t(1, size=int(rng.integers(0, 300))) * 10.0 ** rng.integers(-4, 4))
            .astype(np.float32)
            .astype(rng.choice(["float32", "float64"]))
            for _ in range(12)
        ]
        tally = Tally("x")
        for number, array in enumerate(arrays):
            tally.add(array, number)
        actual, values = tally.histogram(), np.abs(np.concatenate(arrays).astype(np.float64))
        expected, _ = np.histogram(values, actual.edges)
        assert np.array_equal(actual.bins, expected)
        assert actual.elements == values.size
        assert actual.amax == values.max()


def test_single_precision_after_a_number_that_it_cannot_hold_is_still_counted():
    tally = Tally("x")
    tally.add(np.array([1e300]), 0)
    tally.add(np.array([3.0, -7.0], np.float32), 1)
    whole = observe("x", np.array([1e300, 3.0, -7.0]), 0)
    assert _state(tally.histogram()) == _state(whole)


@pytest.mark.parametrize("exponent", [-140, -120, -100, -99, -40, 0, 17, 100, 127])
def test_edges_of_bins_are_kept_at_every_size_a_float32_has(exponent, rng):
    top = math.ldexp(1.0, exponent)
    steps = rng.integers(0, 1 << 24, 500) / (1 << 24)
    values = np.concatenate([[top], top * steps, top * np.ldexp(1.0, -np.arange(1, 25))])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(0))])
    result = observe("x", values, 0)
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), result.edges)
    assert np.array_equal(result.bins, expected)
