"""The threshold below which a given share of the elements lies."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from calibration.errors import CalibrationError
from calibration.observer import Histogram

DEFAULT = "99.99"


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
            f"the percentile is '{parameter}', but must be a number such as {DEFAULT}: write "
            f"percentile:{DEFAULT}"
        )
    percent = Fraction(parameter)
    if not 0 < percent <= 100:
        raise CalibrationError(
            f"the percentile is {parameter}, but must lie above 0 and not above 100: write "
            f"percentile:{DEFAULT}"
        )
    return lambda histogram: percentile_amax(histogram, percent)
