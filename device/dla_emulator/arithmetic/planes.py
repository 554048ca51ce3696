"""An image taken apart for a convolution, so that each tap of the kernel reads one run of memory.

With strides (sy, sx), plane (fy, fx) holds the padded image's rows fy, fy + sy, ... and columns
fx, fx + sx, ..., row behind row at one pitch. The tap at row r and column s of the kernel then
meets plane (r mod sy, s mod sx) from position (r div sy) pitch + s div sx on. What stands behind
the last result of a row belongs to none and is dropped.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Planes:
    """Planes (sy, sx, channels, numbers) and the distance between their rows."""

    numbers: NDArray[Any]
    pitch: int

    def run(self, tap: tuple[int, int], first_row: int, length: int) -> NDArray[Any]:
        """Return (channels, length): what a tap meets from the first column of a row on."""
        sy, sx = self.numbers.shape[:2]
        start = (first_row + tap[0] // sy) * self.pitch + tap[1] // sx
        return self.numbers[tap[0] % sy, tap[1] % sx, :, start : start + length]


def make_planes(
    image: NDArray[Any],
    strides: tuple[int, int],
    before: tuple[int, int],
    *,
    results: tuple[int, int],
    reach: tuple[int, int],
) -> Planes:
    """Return the planes of an image (channels, height, width), of its type or a wider one.

    `before` is the padding above and to the left, `results` how many rows and columns of results
    there are, `reach` the last row and column of the kernel, with its dilation.
    """
    (sy, sx), far = strides, (reach[0] // strides[0], reach[1] // strides[1])
    rows, pitch = results[0] + far[0], results[1] + far[1]
    padded = np.zeros((sy, len(image), (rows * pitch + far[1]) * sx), image.dtype)
    to_x, from_x = _along(0, 1, before[1], image.shape[2], pitch * sx)
    for fy in range(sy):
        to_y, from_y = _along(fy, sy, before[0], image.shape[1], rows)
        whole = padded[fy, :, : rows * pitch * sx].reshape(-1, rows, pitch * sx)
        whole[:, to_y, to_x] = image[:, from_y, from_x]
    return Planes(_by_columns(padded, sx), pitch)


def _by_columns(padded: NDArray[Any], stride: int) -> NDArray[Any]:
    """Return (sy, channels, columns) as (sy, stride, channels, every so many of the columns)."""
    if stride != 2 or padded.dtype != np.int8:
        return np.moveaxis(padded.reshape(*padded.shape[:2], -1, stride), 3, 1)
    pairs = padded.view("<i2")  # two INT8, the first in the low byte
    numbers = np.empty((pairs.shape[0], 2, *pairs.shape[1:]), np.int16)
    np.left_shift(pairs, 8, out=numbers[:, 0])
    numbers[:, 0] >>= 8
    np.right_shift(pairs, 8, out=numbers[:, 1])
    return numbers


def _along(offset: int, stride: int, before: int, length: int, room: int) -> tuple[slice, slice]:
    """Return where an axis of the image goes in a plane, and which of its positions."""
    at = max(0, -(-(before - offset) // stride))
    start = at * stride + offset - before
    count = max(0, min(room - at, -(-(length - start) // stride)))
    return slice(at, at + count), slice(
        start, start + (count - 1) * stride + 1 if count else start, stride
    )
