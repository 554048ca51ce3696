"""Convolution in INT8: exact sums of products, through BLAS where floating point is exact.

    a[k, p, q] = sum over c, r, s of w[k, c, r, s] x[c, p sy + r dy - top, q sx + s dx - left]

The hardware adds up to 64 products exactly into a partial sum of 22 bits (cmac) and the partial
sums into 34 bits that saturate (`accumulator`): for each block of 64 channels r, then s. Padding
is 0. Deconvolution is the transposed sum.

Every sum of some of the products of one output is at most B = 128 max_k sum |w[k]|. So, whatever
the order and also with fused multiply-add,

    B <= 2^24         float32 is exact, one product of matrices
    B <= 2^33 - 1     the accumulator cannot saturate: slices of the products, each with B <= 2^24
                      of its own in float32, added up in float64
    else              package by package in the hardware's order, saturating each time
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from device.padding import same_padding
from device.runtime.dla import accumulator

Int8s = NDArray[np.int8]
Singles = NDArray[np.float32]
Sums = NDArray[np.float32] | NDArray[np.float64]

EXACT_SINGLE = 1 << 24
EXACT_ACCUMULATOR = (1 << (accumulator.ACCUMULATOR_BITS - 1)) - 1
_LARGEST_INPUT = 128
_BLOCK_NUMBERS = 1 << 20  # of unrolled input at a time: some megabytes, about a cache


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a kernel moves: (height, width) pairs; pads are top, left, bottom, right."""

    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)
    groups: int = 1

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the result of a convolution."""
        top, left, bottom, right = self.pads
        rows = height + top + bottom - (self.kernel[0] - 1) * self.dilations[0] - 1
        columns = width + left + right - (self.kernel[1] - 1) * self.dilations[1] - 1
        return rows // self.strides[0] + 1, columns // self.strides[1] + 1

    def same(self, shape: tuple[int, ...], auto_pad: str) -> "Geometry":
        """Return it with the SAME padding of an input (N, C, H, W)."""
        (top, bottom), (left, right) = (
            same_padding(
                shape[2 + axis],
                -(-shape[2 + axis] // self.strides[axis]),
                stride=self.strides[axis],
                span=(self.kernel[axis] - 1) * self.dilations[axis] + 1,
                upper=auto_pad == "SAME_UPPER",
            )
            for axis in range(2)
        )
        return replace(self, pads=(top, left, bottom, right))


@dataclass(frozen=True, slots=True)
class ConvKernel:
    """Weights made ready: per group a matrix (outputs, channels * rows * columns) in float32.

    `cuts` are the borders of the slices of the products that are exact in float32; None where the
    accumulator could saturate. `bound` is B.
    """

    geometry: Geometry
    matrices: Singles  # (groups, outputs per group, products)
    bound: int
    cuts: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of the accumulators of one picture: sums (outputs, rows, columns)."""

    batch: int
    rows: slice
    sums: Sums


def make_kernel(weight: Int8s, geometry: Geometry) -> ConvKernel:
    """Return weights of the shape (outputs, channels per group, rows, columns) made ready."""
    matrices = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1)
    sizes = np.abs(matrices.astype(np.int64)) * _LARGEST_INPUT
    bound = int(sizes.sum(axis=2).max(initial=0))
    cuts = _cuts(sizes) if bound <= EXACT_ACCUMULATOR else None
    return ConvKernel(geometry, matrices.astype(np.float32), bound, cuts)


def float_kernel(weight: Singles, geometry: Geometry) -> ConvKernel:
    """Return weights in floating point made ready; nothing about them is exact."""
    matrices = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1)
    return ConvKernel(geometry, matrices, 0, (0, matrices.shape[2]))


def convolve(x: Int8s | Singles, kernel: ConvKernel) -> Iterator[Block]:
    """Yield the accumulators of a convolution, block by block; x is (batch, channels, h, w).

    The sums are whole numbers, exact. They are only good until the next block.
    """
    for batch, picture in enumerate(_padded(x, kernel.geometry.pads)):
        yield from _convolve_one(batch, picture, x.shape[2:], kernel)


def convolve_whole(x: Int8s | Singles, kernel: ConvKernel) -> Sums:
    """Return the accumulators of a convolution in one array (batch, outputs, rows, columns)."""
    rows, columns = kernel.geometry.positions(x.shape[2], x.shape[3])
    outputs = kernel.matrices.shape[0] * kernel.matrices.shape[1]
    single = kernel.cuts is not None and len(kernel.cuts) == 2
    sums: Sums = np.empty(
        (x.shape[0], outputs, rows, columns), np.float32 if single else np.float64
    )
    for block in convolve(x, kernel):
        sums[block.batch, :, block.rows] = block.sums
    return sums


def deconvolve(x: Int8s, kernel: ConvKernel, output_padding: tuple[int, int] = (0, 0)) -> Sums:
    """Return the accumulators of a deconvolution (batch, outputs, rows, columns), in float64.

    Output row p gets x[i] w[r] wherever p = i sy + r dy - top. `kernel` holds the weights as
    (outputs, channels per group, rows, columns), unflipped. Exact as long as the accumulator
    cannot saturate; raises ValueError if it could.
    """
    if kernel.bound > EXACT_ACCUMULATOR:
        raise ValueError(
            f"a deconvolution may add up to {kernel.bound}, the accumulator holds "
            f"{EXACT_ACCUMULATOR}; split its input channels"
        )
    shape = kernel.geometry
    groups, outputs, products = kernel.matrices.shape
    taps = shape.kernel[0] * shape.kernel[1]
    channels = products // taps
    weights = kernel.matrices.reshape(groups, outputs, channels, taps).transpose(0, 1, 3, 2)
    batch, _, height, width = x.shape
    planes = x.reshape(batch, groups, channels, height * width).astype(np.float64)
    spread = np.matmul(
        weights.reshape(groups, outputs * taps, channels).astype(np.float64), planes
    ).reshape(batch, groups * outputs, taps, height, width)
    return _overlay(spread, shape, output_padding)


def _cuts(sizes: NDArray[np.int64]) -> tuple[int, ...]:
    """Return borders of slices of the products (axis 2) with each sum of sizes <= 2^24."""
    products = sizes.shape[2]
    totals = np.concatenate(
        [np.zeros((*sizes.shape[:2], 1), np.int64), np.cumsum(sizes, axis=2)], axis=2
    )
    count = 1
    while True:
        cuts = np.linspace(0, products, count + 1).astype(np.int64)
        if int(np.diff(totals[:, :, cuts], axis=2).max(initial=0)) <= EXACT_SINGLE:
            return tuple(int(cut) for cut in cuts)
        count += 1


def _padded(x: Int8s | Singles, pads: tuple[int, int, int, int]) -> Singles:
    top, left, bottom, right = pads
    batch, channels, height, width = x.shape
    if not any(pads):
        return x.astype(np.float32)
    padded = np.zeros((batch, channels, height + top + bottom, width + left + right), np.float32)
    padded[:, :, top : top + height, left : left + width] = x
    return padded


def _convolve_one(
    batch: int, picture: Singles, size: tuple[int, ...], kernel: ConvKernel
) -> Iterator[Block]:
    shape = kernel.geometry
    rows, columns = shape.positions(size[0], size[1])
    groups, _, products = kernel.matrices.shape
    by_taps = groups > 1 and products == shape.kernel[0] * shape.kernel[1]
    numbers = picture.shape[0] if by_taps else groups * products
    step = max(1, min(rows, _BLOCK_NUMBERS // max(1, numbers * columns)))
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        if by_taps:
            yield Block(batch, part, _depthwise(picture, part, columns, kernel))
        elif kernel.cuts is None:
            yield Block(batch, part, _by_packages(picture, part, columns, kernel))
        else:
            yield Block(batch, part, _by_matrices(picture, part, columns, kernel))


def _tap(
    picture: Singles, shape: Geometry, rows: slice, columns: int, at: tuple[int, int]
) -> Singles:
    """Return what the tap at (row, column) of the kernel meets at some rows of the result."""
    r, s = at
    (sy, sx), (dy, dx) = shape.strides, shape.dilations
    top = rows.start * sy + r * dy
    bottom = (rows.stop - 1) * sy + r * dy + 1
    first = s * dx
    return picture[:, top:bottom:sy, first : first + (columns - 1) * sx + 1 : sx]


def _by_matrices(picture: Singles, rows: slice, columns: int, kernel: ConvKernel) -> Sums:
    shape = kernel.geometry
    groups, outputs, products = kernel.matrices.shape
    count = rows.stop - rows.start
    taps_y, taps_x = shape.kernel
    unrolled: Singles
    if taps_y * taps_x == 1:
        unrolled = np.ascontiguousarray(_tap(picture, shape, rows, columns, (0, 0)))
    else:
        unrolled = np.empty((picture.shape[0], taps_y, taps_x, count, columns), np.float32)
        for r in range(taps_y):
            for s in range(taps_x):
                unrolled[:, r, s] = _tap(picture, shape, rows, columns, (r, s))
    matrix = unrolled.reshape(groups, products, count * columns)
    assert kernel.cuts is not None
    sums = _multiplied(kernel.matrices, matrix, kernel.cuts)
    return sums.reshape(groups * outputs, count, columns)


def _multiplied(weights: Singles, matrix: Singles, cuts: tuple[int, ...]) -> Sums:
    if len(cuts) == 2:
        return weights @ matrix
    total = np.zeros((weights.shape[0], weights.shape[1], matrix.shape[2]))
    for first, last in pairwise(cuts):
        total += weights[:, :, first:last] @ matrix[:, first:last]
    return total


def _depthwise(picture: Singles, rows: slice, columns: int, kernel: ConvKernel) -> Sums:
    """One channel a group: at most 32 x 32 products of 2^14, so float32 is exact throughout."""
    shape = kernel.geometry
    groups, outputs, _ = kernel.matrices.shape
    taps = kernel.matrices.reshape(groups * outputs, *shape.kernel)
    total = np.zeros((groups * outputs, rows.stop - rows.start, columns), np.float32)
    for r in range(shape.kernel[0]):
        for s in range(shape.kernel[1]):
            met = _tap(picture, shape, rows, columns, (r, s))
            met = met if outputs == 1 else np.repeat(met, outputs, axis=0)
            total += met * taps[:, r, s, None, None]
    return total


def _by_packages(picture: Singles, rows: slice, columns: int, kernel: ConvKernel) -> Sums:
    """Saturating after every partial sum of 64 channels, as the accumulator does."""
    shape = kernel.geometry
    groups, outputs, products = kernel.matrices.shape
    channels = products // (shape.kernel[0] * shape.kernel[1])
    weights = kernel.matrices.reshape(groups, outputs, channels, *shape.kernel)
    total = np.zeros((groups, outputs, (rows.stop - rows.start) * columns), np.int64)
    pictures = picture.reshape(groups, channels, *picture.shape[1:])
    for first in range(0, channels, accumulator.BLOCK_CHANNELS):
        block = slice(first, first + accumulator.BLOCK_CHANNELS)
        part = pictures[:, block].reshape(-1, *picture.shape[1:])
        for r, s in np.ndindex(*shape.kernel):
            met = _tap(part, shape, rows, columns, (r, s))
            partial = weights[:, :, block, r, s] @ met.reshape(groups, met.shape[0] // groups, -1)
            total = accumulator.add(total, partial.astype(np.int64))
    return total.reshape(groups * outputs, -1, columns).astype(np.float64)


def _overlay(
    spread: NDArray[np.float64], shape: Geometry, output_padding: tuple[int, int]
) -> NDArray[np.float64]:
    """Add up what each input position spreads over the output, and cut the padding off."""
    batch, outputs, _, height, width = spread.shape
    (taps_y, taps_x), (sy, sx), (dy, dx) = shape.kernel, shape.strides, shape.dilations
    top, left, bottom, right = shape.pads
    full_y = (height - 1) * sy + (taps_y - 1) * dy + 1 + output_padding[0]
    full_x = (width - 1) * sx + (taps_x - 1) * dx + 1 + output_padding[1]
    total = np.zeros((batch, outputs, full_y, full_x))
    for r in range(taps_y):
        for s in range(taps_x):
            down = slice(r * dy, r * dy + (height - 1) * sy + 1, sy)
            right_on = slice(s * dx, s * dx + (width - 1) * sx + 1, sx)
            total[:, :, down, right_on] += spread[:, :, r * taps_x + s]
    return total[:, :, top : full_y - bottom, left : full_x - right]
