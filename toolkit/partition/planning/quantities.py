"""Quantities as people read them: a unit in which the number is neither long nor an exponent."""

import math
from collections.abc import Mapping

# Each unit with its larger ones; the largest in which a value is at least 1 is taken.
_UNITS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "us": (("us", 1.0), ("ms", 1e3), ("s", 1e6)),
    "mJ": (("mJ", 1.0), ("J", 1e3)),
    "mW": (("mW", 1.0), ("W", 1e3)),
    "bytes": (("bytes", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20)),
}


def quantity(value: float, unit: str, figures: int = 3) -> str:
    """Return a value with its unit: 12596 "us" is "12.6 ms". Other units stay as they are."""
    name, size = _scale(value, unit)
    return f"{number(value / size, figures)} {name}"


def apart(first: float, second: float, unit: str) -> tuple[str, str]:
    """Return two values in one unit with the fewest digits, 4 to 7, that tell them apart."""
    _, size = _scale(max(abs(first), abs(second)), unit)
    texts = ("", "")
    for figures in range(4, 8):
        texts = number(first / size, figures), number(second / size, figures)
        if texts[0] != texts[1]:
            break
    return texts


def pair(first: float, second: float, unit: str) -> tuple[str, str, str]:
    """Return two values in one unit, and the unit."""
    name, size = _scale(max(abs(first), abs(second)), unit)
    return number(first / size), number(second / size), name


def between(bounds: tuple[float, float], unit: str) -> str:
    """Return two bounds with one unit: (9500, 12596) "us" is "9.5 to 12.6 ms"."""
    low, high, name = pair(*bounds, unit)
    return f"{low} to {high} {name}"


def unit_of(unit: str, *values: float) -> str:
    """Return the unit in which `apart` gives values."""
    return _scale(max(map(abs, values)), unit)[0]


def number(value: float, figures: int = 3) -> str:
    """Return a number with so many significant digits, all digits before the point, no exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, figures - 1 - math.floor(math.log10(abs(value))))
    rounded = f"{value:.{decimals}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded


def _scale(value: float, unit: str) -> tuple[str, float]:
    scales = _UNITS.get(unit, ((unit, 1.0),))
    fitting = [scale for scale in scales if abs(value) >= scale[1]]
    return fitting[-1] if fitting else scales[0]
