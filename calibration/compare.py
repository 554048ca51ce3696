"""Compare an array with its reference, and two sets of ranges.

All sums are float64, over blocks, so that large tensors need no float64 copy. Exact for float32
and narrower; squares of float64 inputs overflow above about 1e150.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from calibration.errors import CalibrationError
from calibration.table import scale_of
from device import error_figures

_BLOCK = 1 << 16  # elements


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """r = reference, t = test, d = r - t, sums over all elements.

    `sqnr_db`: 10 log10(sum r^2 / sum d^2) in dB; +inf if d = 0 everywhere (also for r = t = 0),
    -inf if r = 0 everywhere and d is not.
    `cosine`: sum r t / sqrt(sum r^2 sum t^2), in [-1, 1]; 1 if both are zero everywhere, 0 if
    exactly one is.
    `max_abs_error`: max |d|, in the unit of the arrays.
    """

    sqnr_db: float
    cosine: float
    max_abs_error: float


class RangeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with another range, amax, in the second of two sets than in the first."""

    tensor: str
    first: float
    second: float

    @property
    def factor(self) -> float:
        """The larger range divided by the smaller."""
        return max(self.first, self.second) / min(self.first, self.second)


class RangesComparison(msgspec.Struct, frozen=True, kw_only=True):
    """`equal`: number of tensors with the same float32 scale; `changed`: the largest factor first;
    the others: names in only one of the two sets.
    """

    equal: int
    changed: tuple[RangeChange, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]


def compare_ranges(first: Mapping[str, float], second: Mapping[str, float]) -> RangesComparison:
    """Compare two sets of ranges, tensor -> amax."""
    both = [name for name in first if name in second]
    changed = [
        RangeChange(tensor=name, first=first[name], second=second[name])
        for name in both
        if _scale_bits(first[name]) != _scale_bits(second[name])
    ]
    return RangesComparison(
        equal=len(both) - len(changed),
        changed=tuple(sorted(changed, key=lambda change: (-change.factor, change.tensor))),
        only_first=tuple(name for name in first if name not in second),
        only_second=tuple(name for name in second if name not in first),
    )


def compare(reference: NDArray[Any], test: NDArray[Any], where: str = "the arrays") -> Comparison:
    """Compare two real arrays of one shape; `where` names them in errors."""
    _check(reference, test, where)
    signal = power = product = noise = worst = 0.0
    for r, t in _blocks(reference, test):
        d = r - t
        signal += float(r @ r)
        power += float(t @ t)
        product += float(r @ t)
        noise += float(d @ d)
        worst = max(worst, float(np.abs(d).max()))
    if not math.isfinite(signal + power + noise):
        raise CalibrationError(
            f"{where} hold NaN, infinite or too large numbers (sums of squares {signal:.3g} and "
            f"{power:.3g}): compare finite outputs only"
        )
    return Comparison(
        sqnr_db=error_figures.sqnr_db(signal, noise),
        cosine=error_figures.cosine(signal, power, product),
        max_abs_error=worst,
    )


def sqnr_db(reference: NDArray[Any], test: NDArray[Any]) -> float:
    """Signal to quantisation noise ratio in dB; see `Comparison`."""
    return compare(reference, test).sqnr_db


def _scale_bits(amax: float) -> bytes:
    return struct.pack(">f", scale_of(amax))


def _check(reference: NDArray[Any], test: NDArray[Any], where: str) -> None:
    if reference.shape != test.shape:
        raise CalibrationError(
            f"{where} have shapes {list(reference.shape)} and {list(test.shape)}: compare the same "
            "tensor"
        )
    if reference.size == 0:
        raise CalibrationError(f"{where} are empty: compare at least one number")
    for array in (reference, test):
        if array.dtype.kind not in "fiub":
            raise CalibrationError(
                f"{where} hold {array.dtype.name}, not real numbers: convert them first"
            )


def _blocks(
    reference: NDArray[Any], test: NDArray[Any]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    flat_reference, flat_test = reference.reshape(-1), test.reshape(-1)
    for start in range(0, flat_reference.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        yield flat_reference[block].astype(np.float64), flat_test[block].astype(np.float64)
