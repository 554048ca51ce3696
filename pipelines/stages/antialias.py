"""Resize as Pillow does, to the last bit: classifiers are trained on pictures resized by it.

A pixel of the result is the mean of all pixels that it covers, weighted by a triangle or a cubic as
wide as the scale; OpenCV's bilinear resize reads four pixels, however many lie between. Columns
come first, are rounded to bytes, then rows; weights are whole multiples of 2^-22 (`Resample.c`).
Sums are products of whole numbers in float64, so that they are exact. Only what a crop shows is
made: 1080p to 224x224 takes as long as Pillow's resize.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from device.engine.preprocessing import Interpolation
from pipelines.frame import Image
from pipelines.vision import cv2

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

PRECISION = 1 << 22
REACH = {"pillow-bilinear": 1.0, "pillow-bicubic": 2.0}  # of the filter, in pixels of the coarser
CUBIC = -0.5
BLOCK = 4  # rows of the result at once: they share most of what they read
MAX_PRODUCTS = 1 << 18  # of a matrix product: above, OpenBLAS wakes threads, which takes longer


def resize_part(
    image: Image,
    size: tuple[int, int],
    part: tuple[int, int, int, int],
    interpolation: Interpolation,
) -> Image:
    """Return a part of an image, uint8 [H, W, 3], that is resized to `size` (width, height).

    `part`: x, y, width and height in pixels of the resized image.
    """
    x, y, columns, rows = part
    if size[0] != image.shape[1]:
        # Rows of the transposed image are columns: they lie in one piece.
        turned = np.asarray(cv2.transpose(image), np.uint8)
        turned = _resize_rows(turned, size[0], x, x + columns, interpolation)
        image = np.asarray(cv2.transpose(turned), np.uint8)
    else:
        image = image[:, x : x + columns]
    if size[1] == image.shape[0]:
        return np.ascontiguousarray(image[y : y + rows])
    return _resize_rows(np.ascontiguousarray(image), size[1], y, y + rows, interpolation)


def _resize_rows(
    image: Bytes, count: int, start: int, stop: int, interpolation: Interpolation
) -> Bytes:
    """Return rows `start` to `stop` of an image that is resized to `count` rows."""
    first, last, weights = _weights(image.shape[0], count, start, stop, interpolation)
    flat = image.reshape(image.shape[0], -1)
    base = int(first[0])
    source = flat[base : int(last[-1])].astype(np.float64)
    out = np.empty((stop - start, flat.shape[1]), np.uint8)
    for top in range(0, stop - start, BLOCK):
        bottom = min(top + BLOCK, stop - start)
        low, high = int(first[top]) - base, int(last[bottom - 1]) - base
        taps = np.ascontiguousarray(weights[top:bottom, low:high])
        step = max(1, MAX_PRODUCTS // taps.size)
        for left in range(0, flat.shape[1], step):
            sums: Floats = taps @ source[low:high, left : left + step]
            sums += PRECISION // 2
            sums *= 1.0 / PRECISION
            np.floor(sums, out=sums)
            np.clip(sums, 0, 255, out=out[top:bottom, left : left + step], casting="unsafe")
    return out.reshape(stop - start, *image.shape[1:])


@lru_cache(maxsize=16)
def _weights(
    size: int, count: int, start: int, stop: int, interpolation: Interpolation
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """Return the first and the last source row (exclusive) of each result, and the weights of all
    rows from the first one's on, in units of 1 / PRECISION. Shared: do not write to them."""
    scale = size / count
    wide = max(scale, 1.0)
    reach = REACH[interpolation] * wide
    centres = (np.arange(start, stop) + 0.5) * scale
    first = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + reach + 0.5).astype(np.int64), size)
    rows = np.arange(first[0], last[-1])
    distance = np.abs((rows - centres[:, None] + 0.5) * (1.0 / wide))
    inside = (rows >= first[:, None]) & (rows < last[:, None])
    weights = np.where(inside, _filter(distance, interpolation), 0.0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # one after the other, as Pillow sums
    return first, last, np.trunc(weights * PRECISION + np.copysign(0.5, weights))


def _filter(distance: Floats, interpolation: Interpolation) -> Floats:
    if interpolation == "pillow-bilinear":
        return np.maximum(1.0 - distance, 0.0)
    near = ((CUBIC + 2.0) * distance - (CUBIC + 3.0)) * distance * distance + 1.0
    far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * CUBIC
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))
