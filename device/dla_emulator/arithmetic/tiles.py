"""Sums of a 3x3 convolution two by two: 16 products in place of 36, and the same whole numbers.

Winograd's minimal filtering F(2x2, 3x3). Of three weights g and four inputs d along one axis,

    m0 = (d0 - d2) g0             m1 = (d1 + d2) (g0 + g1 + g2) / 2
    m3 = (d1 - d3) g2             m2 = (d2 - d1) (g0 - g1 + g2) / 2
    sums    m0 + (m1 + m2),    (m1 - m2) - m3

and so along the other. Inputs, of up to 512, and weights are exact. float32 holds multiples of 1/4
up to 2^22, of 1/2 up to 2^23, so that all is exact, whatever the order in a product of matrices, if

    512 sum over c of |u|         <= 2^22    u: weights transformed along both axes, in quarters
    256 sum over c, s of |v|      <= 2^23    v: transformed along the rows alone, in halves
    128 sum over c, r, s of |w|   <= 2^24

The second bounds what comes of the columns: m1 + m2 is the sum of d1 v1 + d2 (v0 + v2), m1 - m2
that of d1 (v0 + v2) + d2 v1, and the results are those of a convolution with v. The third bounds
the same along the rows.

Source: A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016,
arXiv:1509.09308, section 4.1. The hardware has it too (nvdla/hw, doc "Winograd convolution mode").
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic.planes import Planes

Singles = NDArray[np.float32]

SIDE = 2  # results of a tile along one axis
KERNEL = (3, 3)
_EXACT_SINGLE = 1 << 24
_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_FEWEST_CHANNELS = 16  # with fewer the additions cost more than the products saved


def tile_weights(weight: NDArray[np.integer[Any]]) -> Singles | None:
    """Return weights (outputs, channels, 3, 3) as (4, 4, outputs, channels), column then row.

    None where a sum might not be exact, or there are too few channels for it to pay.
    """
    if min(weight.shape[:2]) < _FEWEST_CHANNELS:
        return None
    real = weight.astype(np.float64)
    by_rows = np.matmul(_WEIGHTS, real)
    both = np.matmul(by_rows, _WEIGHTS.T)
    in_quarters = 512 * np.abs(both).sum(axis=1).max()
    in_halves = 256 * np.abs(by_rows).sum(axis=(1, 3)).max()
    in_ones = 128 * np.abs(real).sum(axis=(1, 2, 3)).max()
    if max(4 * in_quarters, 2 * in_halves, in_ones) > _EXACT_SINGLE:
        return None
    return np.ascontiguousarray(both.transpose(3, 2, 0, 1), np.float32)


def tile_sums(planes: Planes, weights: Singles, rows: slice) -> Singles:
    """Return sums (2 rows of a tile, 2 columns, outputs, tiles) of some rows of tiles.

    `planes` hold INT16 and have strides 2; the tiles of a row stand at their pitch.
    """
    count, pitch, channels = (rows.stop - rows.start) * planes.pitch, planes.pitch, weights.shape[3]
    start = rows.start * pitch
    numbers = planes.numbers[..., start : start + count + pitch + 1]
    # All channels in one run: what reaches from one into the next stands behind `count`.
    even, odd = numbers.reshape(SIDE, -1)
    along = np.empty((4, SIDE, even.size // SIDE), np.int16)
    _transform(even, odd, pitch, along.reshape(4, -1))
    inputs = np.empty((4, 4, along.shape[2]), np.float32)
    _transform(along[:, 0], along[:, 1], 1, inputs)
    tiles = inputs.reshape(4, 4, channels, -1)[..., :count]
    return _add_up(_add_up(np.matmul(weights, tiles)).swapaxes(0, 1))


def _transform(even: NDArray[Any], odd: NDArray[Any], distance: int, into: NDArray[Any]) -> None:
    """Put the four inputs of products in `into`, of d0, d1 and, a distance further on, d2, d3."""
    d0, d1, d2, d3 = (
        numbers[..., part]
        for part in (slice(-distance), slice(distance, None))
        for numbers in (even, odd)
    )
    into = into[..., :-distance]
    np.subtract(d0, d2, out=into[0])
    np.add(d1, d2, out=into[1])
    np.subtract(d2, d1, out=into[2])
    np.subtract(d1, d3, out=into[3])


def _add_up(m: Singles) -> Singles:
    """Return both sums along the first axis, in place of the first two products."""
    m[0] += m[1]
    m[0] += m[2]
    m[1] -= m[2]
    m[1] -= m[3]
    return m[:2]
