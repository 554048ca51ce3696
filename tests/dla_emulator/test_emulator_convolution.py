"""Convolution and pooling of the DLA against sums of Python integers, number by number."""

import itertools

import numpy as np
import pytest
from emulator_convolution_fixtures import convolved

from device.dla_emulator.arithmetic import convolution, pooling
from device.dla_emulator.arithmetic.convolution import Geometry
from device.dla_emulator.arithmetic.pooling import Window


def int8s(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


GEOMETRIES = (
    Geometry((1, 1)),
    Geometry((3, 3), pads=(1, 1, 1, 1)),
    Geometry((3, 3), strides=(2, 2), pads=(0, 0, 1, 1)),
    Geometry((3, 2), strides=(1, 3), pads=(2, 1, 0, 0), dilations=(2, 1)),
    Geometry((1, 1), strides=(2, 2)),
    Geometry((3, 3), pads=(1, 1, 1, 1), groups=2),
    Geometry((3, 3), strides=(2, 1), pads=(1, 1, 1, 1), dilations=(1, 2), groups=4),
)


@pytest.mark.parametrize("shape", GEOMETRIES, ids=str)
def test_a_convolution_adds_up_every_product(shape: Geometry) -> None:
    rng = np.random.default_rng()
    x = int8s(rng, 2, 4, 7, 9)
    weight = int8s(rng, 8, 4 // shape.groups, *shape.kernel)
    kernel = convolution.make_kernel(weight, shape)
    assert (convolution.convolve_whole(x, kernel) == convolved(x, weight, shape)).all()


def test_blocks_of_rows_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng()
    shape = Geometry((3, 3), strides=(2, 1), pads=(1, 1, 1, 1))
    x, weight = int8s(rng, 1, 3, 11, 8), int8s(rng, 5, 3, 3, 3)
    monkeypatch.setattr(convolution, "_BLOCK_NUMBERS", (27 + 5) * 10 * 2)  # rows
    kernel = convolution.make_kernel(weight, shape)
    assert len(list(convolution.convolve(x, kernel))) == 3
    assert (convolution.convolve_whole(x, kernel) == convolved(x, weight, shape)).all()


@pytest.mark.parametrize("size", [(16, 17), (15, 16), (17, 31)], ids=str)
def test_three_by_three_kernels_by_tiles_give_the_same_sums(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng()
    shape = Geometry((3, 3), pads=(1, 0, 2, 1))
    x, weight = int8s(rng, 2, 16, *size), int8s(rng, 18, 16, 3, 3)
    monkeypatch.setattr(convolution, "_BLOCK_NUMBERS", 1 << 14)  # several blocks
    kernel = convolution.make_kernel(weight, shape)
    assert kernel.tiled is not None
    assert (convolution.convolve_whole(x, kernel) == convolved(x, weight, shape)).all()


def test_tiles_are_taken_only_where_float32_holds_every_sum_in_quarters() -> None:
    """Equal weights: the middle sums over both axes are 512 x 9/4 |w| a channel, at most 2^22."""
    rng = np.random.default_rng()
    shape = Geometry((3, 3))

    def weight(size: int) -> np.ndarray:
        whole = np.full((16, 32, 3, 3), size, np.int8)
        whole[:, 1::2] *= -1
        return whole

    largest = 2**22 * 4 // (512 * 9 * 32)
    assert convolution.make_kernel(weight(largest + 1), shape).tiled is None
    kernel = convolution.make_kernel(weight(largest), shape)
    assert kernel.tiled is not None
    x = np.full((1, 32, 18, 18), -128, np.int8)
    x[:, 1::2] = 127
    x[:, :, 5:9] = int8s(rng, 1, 32, 4, 18)
    result = convolution.convolve_whole(x, kernel)
    assert (result == convolved(x, weight(largest), shape)).all()


def test_the_largest_sums_are_exact() -> None:
    """-128 x -128 all over: beyond what float32 holds, and odd by one product."""
    channels = 2500
    x = np.full((1, channels, 1, 1), -128, np.int8)
    weight = np.full((1, channels, 1, 1), -128, np.int8)
    weight[0, 0], x[0, 0] = -127, -127
    kernel = convolution.make_kernel(weight, Geometry((1, 1)))
    assert kernel.cuts is not None
    assert len(kernel.cuts) > 2
    assert int(convolution.convolve_whole(x, kernel)[0, 0, 0, 0]) == 2499 * 128**2 + 127**2


def test_one_product_of_matrices_is_taken_up_to_2_to_the_24() -> None:
    def cuts(size: int) -> int:
        weight = np.full((2, size, 1, 1), 64, np.int8)
        kernel = convolution.make_kernel(weight, Geometry((1, 1)))
        assert kernel.cuts is not None
        return len(kernel.cuts) - 1

    assert (cuts(2048), cuts(2049)) == (1, 2)


def test_where_34_bits_could_overflow_every_partial_sum_saturates() -> None:
    """Nine blocks of channels go up: the sum sticks at the top; the tenth goes down from there."""
    rng = np.random.default_rng()
    shape = Geometry((32, 32))
    channels = 640
    x = np.full((1, channels, 32, 32), -128, np.int8)
    weight = np.full((1, channels, 32, 32), -128, np.int8)
    weight[:, 576:] = 127
    weight[:, :, 31, 31] = rng.integers(-128, 128, channels)
    kernel = convolution.make_kernel(weight, shape)
    assert kernel.cuts is None
    expected, top = 0, 2**33 - 1
    for first, r, s in itertools.product(range(0, channels, 64), range(32), range(32)):
        block = slice(first, first + 64)
        partial = int(x[0, block, r, s].astype(int) @ weight[0, block, r, s].astype(int))
        expected = max(-top - 1, min(top, expected + partial))
    plain = int((x.astype(np.int64) * weight.astype(np.int64)).sum())
    assert plain != expected
    assert int(convolution.convolve_whole(x, kernel)[0, 0, 0, 0]) == expected


@pytest.mark.parametrize(
    ("shape", "more"),
    [
        (Geometry((2, 2), strides=(2, 2)), (0, 0)),
        (Geometry((3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), (1, 1)),
        (Geometry((3, 4), strides=(3, 1), pads=(0, 1, 1, 2), dilations=(1, 2)), (0, 0)),
        (Geometry((3, 3), strides=(2, 1), groups=2), (0, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [np.int8, np.int16])
def test_a_deconvolution_spreads_every_product(
    shape: Geometry, more: tuple[int, int], kind: type[np.signedinteger]
) -> None:
    rng = np.random.default_rng()
    limits, per_group, outputs = np.iinfo(kind), 4 // shape.groups, 6

    def numbers(*sizes: int) -> np.ndarray:
        return rng.integers(limits.min, limits.max, sizes, kind, endpoint=True)

    x, weight = numbers(2, 4, 3, 5), numbers(outputs, per_group, *shape.kernel)
    (ky, kx), (sy, sx), (dy, dx) = shape.kernel, shape.strides, shape.dilations
    top, left, bottom, right = shape.pads
    full = np.zeros(
        (2, outputs, 2 * sy + (ky - 1) * dy + 1 + more[0], 4 * sx + (kx - 1) * dx + 1 + more[1]),
        np.int64,
    )
    for i, j, r, s, k in itertools.product(
        range(3), range(5), range(ky), range(kx), range(outputs)
    ):
        group = k // (outputs // shape.groups)
        part = x[:, group * per_group : (group + 1) * per_group, i, j].astype(np.int64)
        full[:, k, i * sy + r * dy, j * sx + s * dx] += part @ weight[k, :, r, s].astype(np.int64)
    expected = full[:, :, top : full.shape[2] - bottom, left : full.shape[3] - right]
    kernel = convolution.make_kernel(weight, shape)
    assert (convolution.deconvolve(x, kernel, more) == expected).all()


def test_a_deconvolution_that_could_saturate_is_refused() -> None:
    weight = np.full((1, 600, 32, 32), -128, np.int8)
    kernel = convolution.make_kernel(weight, Geometry((32, 32)))
    with pytest.raises(ValueError, match="8589934591"):
        convolution.deconvolve(np.zeros((1, 600, 1, 1), np.int8), kernel)


def rha(value: int, shift: int) -> int:
    size = (2 * abs(value) + 2**shift) // 2 ** (shift + 1)
    return size if value >= 0 else -size


WINDOWS = (
    Window((2, 2), strides=(2, 2)),
    Window((3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
    Window((3, 2), strides=(1, 2), pads=(0, 1, 2, 0)),
    Window((3, 3), strides=(2, 2), ceil_mode=True),
    Window((8, 7)),
)


@pytest.mark.parametrize("counted", [True, False], ids=["padding counts", "padding left out"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pooling_sees_each_window(window: Window, counted: bool) -> None:
    rng = np.random.default_rng()
    x = int8s(rng, 2, 3, 8, 10)
    rows, columns = window.positions(8, 10)
    means = pooling.average(x, window, count_padding=counted)
    largest, least = pooling.extreme(x, window, "max"), pooling.extreme(x, window, "min")
    assert means.shape == largest.shape == least.shape == (2, 3, rows, columns)
    for n, c, p, q in itertools.product(range(2), range(3), range(rows), range(columns)):
        top, left = p * window.strides[0] - window.pads[0], q * window.strides[1] - window.pads[1]
        ys = [y for y in range(top, top + window.size[0]) if 0 <= y < 8]
        zs = [z for z in range(left, left + window.size[1]) if 0 <= z < 10]
        seen = [int(x[n, c, y, z]) for y in ys for z in zs]
        height, width = window.size if counted else (len(ys), len(zs))
        mean = rha(rha(sum(seen) * (65536 // width), 16) * (65536 // height), 16)
        assert (means[n, c, p, q], largest[n, c, p, q], least[n, c, p, q]) == (
            mean,
            max(seen),
            min(seen),
        )


@pytest.mark.parametrize(
    ("size", "share"),
    [(2, 0.25), (4, 0.125), (3, 0.0), (5, 0.0), (7, 0.0)],
)
def test_rounding_an_average_twice_costs_what_was_published(size: int, share: float) -> None:
    """Share of window sums for which it differs from rounding sum / N once."""
    sums = np.arange(-128 * size**2, 127 * size**2 + 1)
    twice = pooling.average_of(sums, pooling.reciprocal(size), pooling.reciprocal(size))
    once = np.sign(sums) * ((2 * np.abs(sums) + size**2) // (2 * size**2))
    assert (twice != once).mean() == pytest.approx(share, abs=0.005)


def test_a_pad_value_counts_in_the_average() -> None:
    x = np.zeros((1, 1, 1, 1), np.int8)
    window = Window((2, 2), pads=(1, 1, 0, 0))
    assert pooling.average(x, window, pad_value=4).tolist() == [[[[3]]]]
