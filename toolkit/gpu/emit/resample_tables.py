"""Which elements of a dimension, with which weights, make each element of a resized one.

Formulas: ONNX, operator Resize. For index i of the result, its coordinate x in the source follows
from the coordinate transformation; the taps are the source's indices near x.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
_ROUNDING = 1e-5  # of coordinates, whose scales are given in FP32: this near an end is inside
Mode = Literal["nearest", "linear", "cubic"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of `size` elements that becomes `result` elements, `scale` times as many.

    `region`: start and end of the part that is cropped, for tf_crop_and_resize, in shares.
    """

    size: int
    result: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Filter:
    """How elements are weighed: ONNX's attributes of Resize under their names."""

    mode: Mode
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool


@dataclass(frozen=True, slots=True)
class Table:
    """`places` [result, taps], int32, and `weights` of the same shape, float32 (None: all 1).

    A place of -1 says that the element lies outside the region that is cropped.
    """

    places: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None


def table_of(axis: Axis, how: Filter) -> Table:
    """Return the taps of every index of the result."""
    x = coordinates(axis, how.coordinates)
    if how.mode == "nearest":
        places = _nearest(x, how.nearest)[:, None]
        weights = None
    else:
        stretch = min(axis.scale, 1.0) if how.antialias else 1.0
        places, weights = _weighted(x, how, axis.size, stretch)
    found = np.clip(places, 0, axis.size - 1).astype(np.int32)
    if how.coordinates == "tf_crop_and_resize":
        found[(x < -_ROUNDING) | (x > axis.size - 1 + _ROUNDING)] = -1
    return Table(found, None if weights is None else weights.astype(np.float32))


def coordinates(axis: Axis, how: str) -> Numbers:
    """Return where in the source each index of the result lies.

    Raises KeyError: a transformation that ONNX does not have.
    """
    i = np.arange(axis.result, dtype=np.float64)
    size, result, scale = axis.size, axis.result, axis.scale
    start, end = axis.region
    centred = (i + 0.5) / scale - 0.5
    shift = size / 2 * (1 - result / (scale * size))
    cropped = start * (size - 1) + i * (end - start) * (size - 1) / max(result - 1, 1)
    return {
        "half_pixel": centred,
        "half_pixel_symmetric": shift + centred,
        "pytorch_half_pixel": centred if result > 1 else 0 * i,
        "align_corners": i * (size - 1) / max(result - 1, 1),
        "asymmetric": i / scale,
        "tf_half_pixel_for_nn": (i + 0.5) / scale,
        "tf_crop_and_resize": (cropped if result > 1 else 0 * i + 0.5 * (start + end) * (size - 1)),
    }[how]


def _nearest(x: Numbers, rounding: str) -> Numbers:
    rounded: dict[str, Numbers] = {
        "round_prefer_floor": np.ceil(x - 0.5),
        "round_prefer_ceil": np.floor(x + 0.5),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }
    return rounded[rounding]


def _weighted(x: Numbers, how: Filter, size: int, stretch: float) -> tuple[Numbers, Numbers]:
    """Weigh all taps under the filter, which is 1 / stretch times as wide as its formula."""
    reach = 1 if how.mode == "linear" else 2
    radius = int(np.ceil(reach / stretch))
    taps = np.arange(1 - radius, radius + 1, dtype=np.float64)
    places = np.floor(x)[:, None] + taps
    distance = np.abs(places - x[:, None]) * stretch
    linear = how.mode == "linear"
    weights = np.clip(1 - distance, 0, 1) if linear else _cubic(distance, how.cubic_a)
    if how.exclude_outside:
        weights = np.where((places < 0) | (places >= size), 0, weights)
    return places, weights / weights.sum(1, keepdims=True)


def _cubic(t: Numbers, a: float) -> Numbers:
    """R. Keys, Cubic Convolution Interpolation for Digital Image Processing (1981), with a free."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = a * (((t - 5) * t + 8) * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))
