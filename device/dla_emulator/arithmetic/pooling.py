"""Pooling (PDP): maximum, minimum, and the average that rounds twice.

    maximum, minimum   exact; padding is left out
    average            t = rha(sum recip_w, 16), y = rha(t recip_h, 16), recip_k = floor(65536 / k)

The sum covers the whole window with the padding (pad_value for each padded position) and is divided
by its full size. Two roundings and reciprocals cut to 16 bits: the result differs from one rounding
of sum / N for a quarter of all sums of 2x2 windows, an eighth of 4x4, none of 3x3, 5x5, 7x7.
Windows have 1 to 8 positions a side. At most 64 INT8 numbers: a sum has 14 bits, t has 11. With
INT16 (in nv_full alone) these are 22 and 19 bits, by the same rule.

Source: nvdla/hw cmod/pdp PoolingStage1Calc; vmod NV_NVDLA_PDP_CORE_cal2d.v; the reciprocals from
nvdla/sw kmd/firmware/pdp.c. An average that leaves the padding out is not in the open hardware:
here it divides by the rows and columns that count, by the same rule (inferred).
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic import checks, rounding
from device.dla_emulator.arithmetic.rounding import IntLike, Ints

LARGEST_WINDOW = 8
Singles = NDArray[np.float32]
Whole = TypeVar("Whole", np.int8, np.int16)
Number = TypeVar("Number", np.int8, np.int16, np.int32, np.float32)
_INTEGERS = (np.int8, np.int16)


@dataclass(frozen=True, slots=True)
class Window:
    """A pooling window: size and strides as (height, width), pads as (top, left, bottom, right).

    `ceil_mode` keeps the last windows that begin in the image or the padding before it and hang
    over.
    """

    size: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    ceil_mode: bool = False

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the result."""
        top, left, bottom, right = self.pads
        rows = self._along(height, top, bottom, 0)
        return rows, self._along(width, left, right, 1)

    def _along(self, length: int, before: int, after: int, axis: int) -> int:
        size, stride = self.size[axis], self.strides[axis]
        room = length + before + after - size
        if not self.ceil_mode:
            return room // stride + 1
        count = -(-room // stride) + 1
        # A window that would begin in the padding behind the image does not count.
        return count - 1 if (count - 1) * stride >= length + before else count


def reciprocal(size: int) -> int:
    """Return the register value for a window side of 1 to 8 positions: floor(65536 / size)."""
    return 65536 // size


def average_of(sums: IntLike, recip_w: IntLike, recip_h: IntLike) -> Ints:
    """Return averages of window sums (at most 22 bits); 22 + 17 bits at most: exact in int64."""
    along_width = rounding.shift_right(np.asarray(sums, np.int64) * recip_w, 16)
    return rounding.shift_right(along_width * recip_h, 16)


def average(
    x: NDArray[Whole], window: Window, *, pad_value: int = 0, count_padding: bool = True
) -> NDArray[Whole]:
    """Return averages of windows, of x's type; x is INT8 or INT16, (batch, channels, h, w).

    Raises DlaError: another type or shape, a window of more than 8 positions a side.
    """
    checks.images("the input of a pooling", x, _INTEGERS)
    checks.within("a side of a window", np.asarray(window.size), 1, LARGEST_WINDOW)
    height, width = x.shape[2:]
    sums = _reduced(np.add, x.astype(np.int32), window, pad_value)
    recip_h: IntLike = reciprocal(window.size[0])
    recip_w: IntLike = reciprocal(window.size[1])
    if not count_padding:
        rows = _counted(height, window, 0)
        columns = _counted(width, window, 1)
        recip_h, recip_w = 65536 // rows[:, None], 65536 // columns
    return average_of(sums.astype(np.int64), recip_w, recip_h).astype(x.dtype)


def extreme(x: NDArray[Whole], window: Window, which: Literal["max", "min"]) -> NDArray[Whole]:
    """Return maxima or minima of windows without the padding; x as for `average`."""
    checks.images("the input of a pooling", x, _INTEGERS)
    limits = np.iinfo(x.dtype)
    if which == "max":
        return _reduced(np.maximum, x, window, limits.min)
    return _reduced(np.minimum, x, window, limits.max)


def real(
    x: Singles, window: Window, which: Literal["max", "average"], *, count_padding: bool = True
) -> Singles:
    """Return maxima or averages of windows in floating point; no rounding of the DLA's."""
    if which == "max":
        return _reduced(np.maximum, x, window, -np.inf)
    sums = _reduced(np.add, x, window, 0)
    if count_padding:
        return np.asarray(sums / (window.size[0] * window.size[1]), np.float32)
    rows, columns = _counted(x.shape[2], window, 0), _counted(x.shape[3], window, 1)
    return np.asarray(sums / (rows[:, None] * columns), np.float32)


def _counted(length: int, window: Window, axis: int) -> Ints:
    """Return how many positions of each window along an axis lie inside the image."""
    ones = np.ones((1, 1, length, 1), np.int16)
    column = Window(
        (window.size[axis], 1),
        (window.strides[axis], 1),
        (window.pads[axis], 0, window.pads[axis + 2], 0),
        window.ceil_mode,
    )
    return _reduced(np.add, ones, column, 0).reshape(-1).astype(np.int64)


def _reduced(combine: np.ufunc, x: NDArray[Number], window: Window, fill: float) -> NDArray[Number]:
    """Combine each window's rows, then its columns; positions outside the image hold `fill`."""
    batch, channels, height, width = x.shape
    counts = window.positions(height, width)
    top, left = window.pads[:2]
    spans = [
        (count - 1) * stride + size
        for count, stride, size in zip(counts, window.strides, window.size, strict=True)
    ]
    padded = np.full((batch, channels, spans[0], spans[1]), fill, x.dtype)
    rows, columns = min(height, spans[0] - top), min(width, spans[1] - left)
    padded[:, :, top : top + rows, left : left + columns] = x[:, :, :rows, :columns]
    result = padded
    for axis, (count, stride, size) in enumerate(
        zip(counts, window.strides, window.size, strict=True), start=2
    ):
        steps = [
            result[(slice(None),) * axis + (slice(at, at + (count - 1) * stride + 1, stride),)]
            for at in range(size)
        ]
        result = steps[0].copy()
        for step in steps[1:]:
            combine(result, step, out=result)
    return result
