"""Tables of source indices and weights for each index of a resized dimension.

Formulas: ONNX, operator Resize. For index i of the result, its coordinate x in the source follows
from the coordinate transformation; the taps are the source's indices near x.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Of coordinates, whose scales are FP32: this close to an end is inside.
_COORDINATE_TOLERANCE = 1e-5
Mode = Literal["nearest", "linear", "cubic"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of `size` elements that is resized by `scale` to `result` elements.

    `region`: relative start and end of the crop, for tf_crop_and_resize.
    """

    size: int
    result: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Interpolation:
    """The interpolation: attributes of ONNX's Resize."""

    mode: Mode
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool


Table = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32] | None]
"""Indices [result, taps], and weights of the same shape (None: all 1).

An index of -1: the element is outside the cropped region.
"""


def table_of(axis: Axis, interpolation: Interpolation) -> Table:
    """Return the taps of every index of the result."""
    x = coordinates(axis, interpolation.coordinates)
    if interpolation.mode == "nearest":
        indices = _nearest(x, interpolation.nearest)[:, None]
        weights = None
    else:
        stretch = min(axis.scale, 1.0) if interpolation.antialias else 1.0
        indices, weights = _weighted(x, interpolation, axis.size, stretch)
    clamped = np.clip(indices, 0, axis.size - 1).astype(np.int32)
    if interpolation.coordinates == "tf_crop_and_resize":
        clamped[(x < -_COORDINATE_TOLERANCE) | (x > axis.size - 1 + _COORDINATE_TOLERANCE)] = -1
    return clamped, None if weights is None else weights.astype(np.float32)


def coordinates(axis: Axis, transformation: str) -> Floats:
    """Return the source coordinate of each index of the result.

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
    }[transformation]


def _nearest(x: Floats, rounding: str) -> Floats:
    rounded: dict[str, Floats] = {
        "round_prefer_floor": np.ceil(x - 0.5),
        "round_prefer_ceil": np.floor(x + 0.5),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }
    return rounded[rounding]


def _weighted(
    x: Floats, interpolation: Interpolation, size: int, stretch: float
) -> tuple[Floats, Floats]:
    """Return indices and weights under the filter, stretched to 1 / stretch times its width."""
    reach = 1 if interpolation.mode == "linear" else 2
    radius = int(np.ceil(reach / stretch))
    taps = np.arange(1 - radius, radius + 1, dtype=np.float64)
    indices = np.floor(x)[:, None] + taps
    distance = np.abs(indices - x[:, None]) * stretch
    linear = interpolation.mode == "linear"
    weights = np.clip(1 - distance, 0, 1) if linear else _cubic(distance, interpolation.cubic_a)
    if interpolation.exclude_outside:
        weights = np.where((indices < 0) | (indices >= size), 0, weights)
    return indices, weights / weights.sum(1, keepdims=True)


def _cubic(t: Floats, a: float) -> Floats:
    """R. Keys, Cubic Convolution Interpolation for Digital Image Processing (1981), with a free."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = a * (((t - 5) * t + 8) * t - 4)
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))
