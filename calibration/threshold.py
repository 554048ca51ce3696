"""Histogram -> amax; one row per method.

A tensor is quantised symmetrically: q = round(x / s) clipped to [-127, 127], s = amax / 127. A
large amax keeps outliers and rounds the rest coarsely; a small one clips outliers.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import MappingProxyType

import numpy as np

from calibration.entropy import entropy_amax
from calibration.errors import CalibrationError
from calibration.mse import mse_amax
from calibration.observer import Histogram
from device.choices import list_choices

DEAD_AMAX = 127.0 * 2.0**-24
"""amax of a tensor that is always zero: any scale represents it, and this one (2^-24) is positive,
a power of two and still a float16."""

DEFAULT_PERCENT = "99.99"
_THREADS = 2  # more gain little: the NumPy calls are short

Choose = Callable[[Histogram], float]


def percentile_amax(histogram: Histogram, percent: Fraction) -> float:
    """The upper edge of the bin that holds the k-th smallest |x| of n, k = ceil(n percent / 100).

    At least `percent` of all elements, zeros included, are not clipped. The result exceeds the
    exact percentile by less than one bin: less than 1/2048 of it, or max |x| / 2^17 if that is
    more. It is at most max |x|. If the k-th is in the bin of zero (a tensor that is almost always
    zero), all other values would be clipped; then the result is max |x|.
    """
    rank = -(-histogram.elements * percent.numerator // (100 * percent.denominator))
    bin_of_rank = int(np.searchsorted(np.cumsum(histogram.bins), rank))
    if bin_of_rank == 0:
        return histogram.amax
    return min(float(histogram.edges[bin_of_rank + 1]), histogram.amax)


def at_percent(parameter: str) -> Callable[[Histogram], float]:
    """`percentile_amax` for a decimal percentage, such as "99.9"; exact, in (0, 100]."""
    if not parameter.replace(".", "", 1).isdigit() or not parameter.isascii():
        raise CalibrationError(
            f"the percentile is '{parameter}', but must be a number such as {DEFAULT_PERCENT}:"
            f" write percentile:{DEFAULT_PERCENT}"
        )
    percent = Fraction(parameter)
    if not 0 < percent <= 100:
        raise CalibrationError(
            f"the percentile is {parameter}, but must lie above 0 and not above 100: write "
            f"percentile:{DEFAULT_PERCENT}"
        )
    return lambda histogram: percentile_amax(histogram, percent)


@dataclass(frozen=True)
class Method:
    """A method to choose amax. `choose` gets histograms that are not dead.

    `with_parameter`: parameter -> `choose`, for methods written "name:parameter".
    """

    name: str
    choose: Choose
    summary: str
    with_parameter: Callable[[str], Choose] | None = None


def choose_amax(histogram: Histogram, method: str) -> float:
    """The amax that `method` chooses: 0 < amax <= histogram.amax, or `DEAD_AMAX` if it is dead."""
    row = method_named(method)
    if histogram.elements == 0:
        raise CalibrationError(
            "a tensor without a single element has no amax: give samples that fill it"
        )
    return DEAD_AMAX if histogram.dead else row.choose(histogram)


def amax_by_method(
    histograms: Mapping[str, Histogram], methods: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Method -> tensor -> amax, from one observation."""
    amax_of_method: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for method in methods:
            chosen = pool.map(partial(amax_of, method=method), histograms, histograms.values())
            amax_of_method[method] = dict(zip(histograms, chosen, strict=True))
    return amax_of_method


def amax_of(tensor: str, histogram: Histogram, method: str) -> float:
    """`choose_amax`, with the tensor's name in the error."""
    if histogram.elements == 0:
        raise CalibrationError(
            f"tensor '{tensor}' was empty in every sample, so it has no range: give samples that "
            "fill it or leave it out"
        )
    return choose_amax(histogram, method)


def method_named(method: str) -> Method:
    """The row of METHODS for "name" or "name:parameter"; raises CalibrationError if unknown."""
    name, colon, parameter = method.partition(":")
    row = METHODS.get(name)
    if row is None:
        raise CalibrationError(
            f"there is no calibration method '{method}': take one of {list_choices(name, METHODS)}"
        )
    if not colon:
        return row
    if row.with_parameter is None:
        raise CalibrationError(
            f"calibration method '{name}' takes no parameter, but '{parameter}' was given: write "
            f"{name}"
        )
    return Method(method, row.with_parameter(parameter), row.summary, row.with_parameter)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method(
                "minmax", lambda histogram: histogram.amax, "the largest |x| seen; clips nothing"
            ),
            Method("entropy", entropy_amax, "least KL divergence at 128 levels; clips outliers"),
            Method(
                "percentile",
                at_percent(DEFAULT_PERCENT),
                f"{DEFAULT_PERCENT} % of all |x| keep their value; percentile:99.9 for another",
                at_percent,
            ),
            Method("mse", mse_amax, "least mean squared error; clips what costs little"),
        )
    }
)
