"""Measures of closeness: known values and the corners where a quotient has no value."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from calibration.compare import Comparison, compare, sqnr_db
from calibration.errors import CalibrationError

FINITE = st.floats(-1e6, 1e6, width=32)
PAIRS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[npst.arrays(np.float32, n, elements=FINITE)] * 2)
)


def test_known_values():
    comparison = compare(np.array([3.0, 4.0]), np.array([3.0, 3.0]))
    assert comparison.sqnr_db == pytest.approx(10 * math.log10(25))
    assert comparison.cosine == pytest.approx(21 / (5 * math.sqrt(18)))
    assert comparison.max_abs_error == 1.0


def test_int8_rounding_of_a_uniform_signal_gives_the_textbook_sqnr():
    values = np.random.default_rng(1).uniform(-1, 1, 300_000)
    rounded = np.rint(values * 127) / 127
    assert sqnr_db(values, rounded) == pytest.approx(20 * math.log10(127 * 2), abs=0.05)


@settings(deadline=None)
@given(PAIRS)
def test_measures_equal_their_definitions(pair):
    r, t = (array.astype(np.float64) for array in pair)
    comparison = compare(*pair)
    assert comparison.max_abs_error == np.abs(r - t).max()
    assert -1 <= comparison.cosine <= 1
    noise, signal = math.fsum((r - t) ** 2), math.fsum(r**2)
    if noise > 0 and signal > 0:
        assert comparison.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)
        if t.any():
            cosine = math.fsum(r * t) / math.sqrt(signal) / math.sqrt(math.fsum(t**2))
            assert comparison.cosine == pytest.approx(cosine, abs=1e-12)


@pytest.mark.parametrize(
    ("reference", "test", "expected"),
    [
        ([0, 0], [0, 0], Comparison(sqnr_db=math.inf, cosine=1.0, max_abs_error=0.0)),
        ([0, 0], [0, 2], Comparison(sqnr_db=-math.inf, cosine=0.0, max_abs_error=2.0)),
        ([0, 2], [0, 0], Comparison(sqnr_db=0.0, cosine=0.0, max_abs_error=2.0)),
        ([1, 2], [1, 2], Comparison(sqnr_db=math.inf, cosine=1.0, max_abs_error=0.0)),
        ([0, 2], [0, -2], Comparison(sqnr_db=-10 * math.log10(4), cosine=-1.0, max_abs_error=4.0)),
    ],
)
def test_zero_signals_and_zero_noise_have_documented_values(reference, test, expected):
    comparison = compare(np.array(reference, np.float32), np.array(test, np.float32))
    assert comparison.cosine == expected.cosine
    assert comparison.max_abs_error == expected.max_abs_error
    assert comparison.sqnr_db == pytest.approx(expected.sqnr_db)


def test_sums_do_not_lose_small_errors_of_large_tensors():
    reference = np.full(3_000_000, 1.0, np.float32)
    test = reference + np.float32(2.0**-12)
    assert sqnr_db(reference, test) == pytest.approx(20 * math.log10(2**12), abs=1e-9)


def test_unsigned_integers_do_not_wrap_around():
    assert compare(np.array([1], np.uint8), np.array([2], np.uint8)).max_abs_error == 1.0


def test_layout_and_mixed_dtypes_do_not_matter():
    values = np.random.default_rng(2).normal(size=(30, 40)).astype(np.float16)
    assert compare(values.T, values.T.astype(np.float64).copy()).sqnr_db == math.inf


@pytest.mark.parametrize(
    ("reference", "test", "message"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), r"y have shapes \[2, 3\] and \[3, 2\]"),
        (np.zeros(0), np.zeros(0), "y are empty"),
        (np.array([1.0, np.nan]), np.ones(2), "y hold NaN, infinite"),
        (np.ones(2), np.array([1.0, -np.inf]), "y hold NaN, infinite"),
        (np.ones(2, np.complex64), np.ones(2, np.complex64), "y hold complex64"),
    ],
)
def test_what_cannot_be_compared_is_named(reference, test, message):
    with pytest.raises(CalibrationError, match=message):
        compare(reference, test, "y")
