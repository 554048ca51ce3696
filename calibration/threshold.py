"""Histogram -> amax; one row per method.

A tensor is quantised symmetrically: q = round(x / s) clipped to [-127, 127], s = amax / 127. A
large amax keeps outliers and rounds the rest coarsely; a small one clips outliers.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from calibration.entropy import entropy_amax
from calibration.errors import CalibrationError
from calibration.mse import mse_amax
from calibration.observer import Histogram
from calibration.percentile import DEFAULT as DEFAULT_PERCENT
from calibration.percentile import at_percent
from device.choices import list_choices

DEAD_AMAX = 127.0 * 2.0**-24
"""amax of a tensor that is always zero: any scale represents it, and this one (2^-24) is positive,
a power of two and still a float16."""

_THREADS = 2  # more gain little: the NumPy calls are short

Choose = Callable[[Histogram], float]


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
