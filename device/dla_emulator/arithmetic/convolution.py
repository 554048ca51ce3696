"""Convolution in INT8 or INT16: exact sums of products, through BLAS where it is exact.

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

Kernels of 3x3 with stride 1 take fewer products for the same sums where those are exact too
(`tiles`). `planes` says how an image is laid out.

INT16 (in nv_full alone) has B = 2^15 max_k sum |w[k]| and an accumulator of 48 bits: one product of
matrices in float64. Weights with which it could saturate, 2^32 and more in sum, are refused.

Source: nvdla/hw vmod/nvdla/cmac, vmod/nvdla/cacc/NV_NVDLA_CACC_CALC_int8.v and _int16.v; the order
of the sums vmod/nvdla/csc/NV_NVDLA_CSC_sg.v. That deconvolution is the same sums is inferred.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic import accumulator, checks, tiles
from device.dla_emulator.arithmetic.planes import Planes, make_planes
from device.errors import DlaError
from device.padding import same_padding

Int8s = NDArray[np.int8]
Int16s = NDArray[np.int16]
Singles = NDArray[np.float32]
Sums = NDArray[np.float32] | NDArray[np.float64]

EXACT_SINGLE = 1 << 24
EXACT_ACCUMULATOR = (1 << (accumulator.ACCUMULATOR_BITS - 1)) - 1
_EXACT_ACCUMULATOR_INT16 = (1 << (accumulator.ACCUMULATOR_BITS_INT16 - 1)) - 1
_LARGEST_INPUT = 128
_LARGEST_INPUT_INT16 = 1 << 15
_TYPES = (np.int8, np.int16, np.float32)
_BLOCK_NUMBERS = 1 << 20  # of unrolled input and sums at a time: some megabytes, about a cache
_FINISH_NUMBERS = 6  # of 4 bytes that the output stages take for a sum
_FEWEST_TILES = 20  # with fewer, products of matrices are too small to be fast


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

    INT16 is in float64. `cuts` are the borders of the slices of the products that are exact in
    float32; None where the accumulator could saturate. `bound` is B. `tiled` holds the weights for
    `tiles`, None where those are not exact.
    """

    geometry: Geometry
    matrices: Sums  # (groups, outputs per group, products)
    bound: int
    cuts: tuple[int, ...] | None
    tiled: Singles | None = None


class SumsOf(Protocol):
    """Returns accumulators (groups, outputs, positions) of some rows; tiles have a side of 2."""

    def __call__(self, planes: Planes, *, rows: slice) -> Sums:
        """Return the accumulators of `rows`."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the accumulators of one image: `wide` (side, side, outputs, rows, pitch).

    With side 2, wide[y, x] holds every other row from y on and every other column from x on.
    Numbers behind the last column or row are no results: what works number by number is faster on
    whole memory, and `put` leaves them out afterwards.
    """

    batch: int
    rows: slice
    wide: Sums

    def put(self, into: NDArray[Any], finish: Callable[[Sums], NDArray[Any]] | None = None) -> None:
        """Copy what `finish` makes of each wide[y, x] to its place in (batch, outputs, ...).

        Numbers of a wider type are cut off towards zero.
        """
        side = len(self.wide)
        for down, right in product(range(side), repeat=2):
            rows = slice(self.rows.start + down, self.rows.stop, side)
            target = into[self.batch, :, rows, right::side]
            sums = self.wide[down, right]
            numbers = sums if finish is None else finish(sums)
            target[...] = numbers[:, : target.shape[1], : target.shape[2]]


def make_kernel(weight: Int8s | Int16s, geometry: Geometry) -> ConvKernel:
    """Return weights of the shape (outputs, channels per group, rows, columns) made ready.

    Raises DlaError: another type, or a shape that is not the geometry's; INT16 weights with which
    48 bits could overflow.
    """
    checks.images("a weight", weight, (np.int8, np.int16))
    if weight.shape[2:] != geometry.kernel or weight.shape[0] % geometry.groups:
        raise DlaError(
            f"a weight has the shape {list(weight.shape)}, but the geometry a kernel of "
            f"{geometry.kernel[0]}x{geometry.kernel[1]} and {geometry.groups} groups; make them fit"
        )
    matrices = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1)
    if weight.dtype == np.int16:
        return _make_wide(matrices.astype(np.int64), geometry)
    sizes = np.abs(matrices.astype(np.int64)) * _LARGEST_INPUT
    bound = int(sizes.sum(axis=2).max(initial=0))
    cuts = _cuts(sizes) if bound <= EXACT_ACCUMULATOR else None
    one_by_one = (geometry.strides, geometry.dilations, geometry.groups) == ((1, 1), (1, 1), 1)
    fits = one_by_one and geometry.kernel == tiles.KERNEL
    tiled = tiles.tile_weights(weight) if fits else None
    return ConvKernel(geometry, matrices.astype(np.float32), bound, cuts, tiled)


def _make_wide(matrices: NDArray[np.int64], geometry: Geometry) -> ConvKernel:
    sizes = np.abs(matrices) * _LARGEST_INPUT_INT16
    bound = int(sizes.sum(axis=2).max(initial=0))
    if bound > _EXACT_ACCUMULATOR_INT16:
        raise DlaError(
            f"INT16 weights may add up to {bound}, the accumulator holds "
            f"{_EXACT_ACCUMULATOR_INT16}; split the input channels"
        )
    return ConvKernel(geometry, matrices.astype(np.float64), bound, (0, matrices.shape[2]))


def float_kernel(weight: Singles, geometry: Geometry) -> ConvKernel:
    """Return weights in floating point made ready; nothing about them is exact."""
    matrices = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1)
    return ConvKernel(geometry, matrices, 0, (0, matrices.shape[2]))


def convolve(x: Int8s | Int16s | Singles, kernel: ConvKernel) -> Iterator[Block]:
    """Yield the accumulators of a convolution, block by block; x is (batch, channels, h, w).

    The sums are whole numbers, exact. They are only good until the next block. Raises DlaError: x
    has another type or shape, or channels that the kernel does not have.
    """
    _check_input(x, kernel)
    shape = kernel.geometry
    rows, columns = shape.positions(x.shape[2], x.shape[3])
    groups, outputs, products = kernel.matrices.shape
    strides, results, side = shape.strides, (rows, columns), 1
    reach = ((shape.kernel[0] - 1) * shape.dilations[0], (shape.kernel[1] - 1) * shape.dilations[1])
    numbers = groups * (products + outputs)  # at each position
    count = (-(-rows // tiles.SIDE), -(-columns // tiles.SIDE))
    if kernel.tiled is not None and x.dtype == np.int8 and count[0] * count[1] >= _FEWEST_TILES:
        strides, results, side, reach = (tiles.SIDE, tiles.SIDE), count, tiles.SIDE, (3, 3)
        numbers = 16 * (products // 9 + outputs)
        sums_of: SumsOf = partial(tiles.tile_sums, weights=kernel.tiled)
    elif groups > 1 and products == shape.kernel[0] * shape.kernel[1]:
        sums_of = partial(_depthwise, kernel=kernel)
    else:
        sums_of = partial(_by_packages if kernel.cuts is None else _by_matrices, kernel=kernel)
    numbers = max(numbers, _FINISH_NUMBERS * groups * outputs)
    for batch, image in enumerate(x):
        planes = make_planes(image, strides, shape.pads[:2], results=results, reach=reach)
        for part in _steps(results[0], numbers * planes.pitch):
            sums = sums_of(planes, rows=part)
            yield Block(
                batch,
                slice(side * part.start, min(side * part.stop, rows)),
                sums.reshape(side, side, groups * outputs, -1, planes.pitch),
            )


def convolve_whole(x: Int8s | Int16s | Singles, kernel: ConvKernel) -> Sums:
    """Return the accumulators of a convolution in one array (batch, outputs, rows, columns)."""
    _check_input(x, kernel)
    rows, columns = kernel.geometry.positions(x.shape[2], x.shape[3])
    outputs = kernel.matrices.shape[0] * kernel.matrices.shape[1]
    single = kernel.matrices.dtype == np.float32
    single = single and kernel.cuts is not None and len(kernel.cuts) == 2
    sums: Sums = np.empty(
        (x.shape[0], outputs, rows, columns), np.float32 if single else np.float64
    )
    for block in convolve(x, kernel):
        block.put(sums)
    return sums


def deconvolve(
    x: Int8s | Int16s, kernel: ConvKernel, output_padding: tuple[int, int] = (0, 0)
) -> Sums:
    """Return the accumulators of a deconvolution (batch, outputs, rows, columns), in float64.

    Output row p gets x[i] w[r] wherever p = i sy + r dy - top. `kernel` holds the weights as
    (outputs, channels per group, rows, columns), unflipped. Exact as long as the accumulator
    cannot saturate; raises DlaError if it could, or as `convolve`.
    """
    _check_input(x, kernel)
    wide = kernel.matrices.dtype == np.float64  # INT16, whose bound `make_kernel` has checked
    if not wide and kernel.bound > EXACT_ACCUMULATOR:
        raise DlaError(
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


def _check_input(x: Int8s | Int16s | Singles, kernel: ConvKernel) -> None:
    checks.images("the input of a convolution", x, _TYPES)
    groups, _, products = kernel.matrices.shape
    channels = groups * (products // (kernel.geometry.kernel[0] * kernel.geometry.kernel[1]))
    if x.shape[1] != channels:
        raise DlaError(
            f"the input of a convolution has {x.shape[1]} channels, the kernel {channels}; make "
            "them fit"
        )
    if x.dtype == np.int16 and kernel.matrices.dtype != np.float64:
        raise DlaError("the input of a convolution is INT16, its weights are not; use one type")


def _steps(rows: int, numbers: int) -> Iterator[slice]:
    """Yield as many rows at a time as make a block, with so many numbers a row."""
    step = max(1, _BLOCK_NUMBERS // max(1, numbers))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _taps(shape: Geometry) -> list[tuple[int, int]]:
    """Return the row and column of each position of the kernel, with its dilation."""
    (dy, dx), kernel = shape.dilations, shape.kernel
    return [(r * dy, s * dx) for r, s in np.ndindex(*kernel)]


def _by_matrices(planes: Planes, rows: slice, kernel: ConvKernel) -> Sums:
    """One product of matrices for each slice that is exact."""
    weights, cuts, taps = kernel.matrices, kernel.cuts, _taps(kernel.geometry)
    length = (rows.stop - rows.start) * planes.pitch
    unrolled = np.empty((planes.numbers.shape[2], len(taps), length), weights.dtype)
    for i, tap in enumerate(taps):
        unrolled[:, i] = planes.run(tap, rows.start, length)
    matrix = unrolled.reshape(len(weights), weights.shape[2], length)
    assert cuts is not None
    if len(cuts) == 2:
        return weights @ matrix
    total = np.zeros((*weights.shape[:2], length))
    for first, last in pairwise(cuts):
        total += weights[:, :, first:last] @ matrix[:, first:last]
    return total


def _depthwise(planes: Planes, rows: slice, kernel: ConvKernel) -> Sums:
    """One channel a group: at most 32 x 32 products of 2^14, so float32 is exact throughout.

    INT16 is in float64, for products of 2^30.
    """
    weights, length = kernel.matrices, (rows.stop - rows.start) * planes.pitch
    total: NDArray[Any] = np.zeros((*weights.shape[:2], length), weights.dtype)
    for i, tap in enumerate(_taps(kernel.geometry)):
        met: NDArray[Any] = planes.run(tap, rows.start, length).astype(weights.dtype)
        total += met[:, None] * weights[:, :, i, None]
    return total


def _by_packages(planes: Planes, rows: slice, kernel: ConvKernel) -> Sums:
    """Saturating after every partial sum of 64 channels, as the accumulator does."""
    taps, length = _taps(kernel.geometry), (rows.stop - rows.start) * planes.pitch
    groups, outputs, products = kernel.matrices.shape
    channels = products // len(taps)
    weights = kernel.matrices.reshape(groups, outputs, channels, len(taps))
    total = np.zeros((groups, outputs, length), np.int64)
    for first in range(0, channels, accumulator.BLOCK_CHANNELS):
        block = slice(first, first + accumulator.BLOCK_CHANNELS)
        for i, tap in enumerate(taps):
            met = planes.run(tap, rows.start, length).reshape(groups, channels, length)[:, block]
            partial_sum = weights[:, :, block, i] @ met.astype(weights.dtype)
            total = accumulator.add(total, partial_sum.astype(np.int64))
    return total.astype(np.float64)


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
