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

Floats = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Planes:
    """Planes (sy, sx, channels, numbers) and the distance between their rows."""

    numbers: Floats
    pitch: int

    def run(self, tap: tuple[int, int], first_row: int, length: int) -> Floats:
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
    kind: type[np.float32] | type[np.float64],
) -> Planes:
    """Return the planes of an image (channels, height, width).

    `before` is the padding above and to the left, `results` how many rows and columns of results
    there are, `reach` the last row and column of the kernel, with its dilation.
    """
    (sy, sx), far = strides, (reach[0] // strides[0], reach[1] // strides[1])
    rows, pitch = results[0] + far[0], results[1] + far[1]
    whole = image.astype(kind)  # once, and faster than number by number as they are spread
    numbers: NDArray[Any] = np.zeros((sy, sx, image.shape[0], rows * pitch + far[1]), kind)
    for fy in range(sy):
        to_y, from_y = _along(fy, sy, before[0], image.shape[1], rows)
        for fx in range(sx):
            to_x, from_x = _along(fx, sx, before[1], image.shape[2], pitch)
            plane = numbers[fy, fx, :, : rows * pitch].reshape(-1, rows, pitch)
            plane[:, to_y, to_x] = whole[:, from_y, from_x]
    return Planes(numbers, pitch)


def _along(offset: int, stride: int, before: int, length: int, room: int) -> tuple[slice, slice]:
    """Return where an axis of the image goes in a plane, and which of its positions."""
    at = max(0, -(-(before - offset) // stride))
    start = at * stride + offset - before
    count = max(0, min(room - at, -(-(length - start) // stride)))
    return slice(at, at + count), slice(
        start, start + (count - 1) * stride + 1 if count else start, stride
    )
