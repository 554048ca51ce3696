"""What the DLA's stages refuse, each at its limit and one beyond; and INT16 where it exists."""

from collections.abc import Callable

import numpy as np
import pytest
from emulator_convolution_fixtures import convolved
from emulator_stages_fixtures import rha, sat

from device.dla_emulator.arithmetic import accumulator, convert, convolution, pooling
from device.dla_emulator.arithmetic.convert import Converter
from device.dla_emulator.arithmetic.convolution import Geometry
from device.dla_emulator.arithmetic.output_stages import StageX, StageY, run_x, run_y
from device.dla_emulator.arithmetic.pooling import Window
from device.errors import DlaError, TandemError

TOP16, TOP32 = 2**15 - 1, 2**31 - 1
# What is checked -> the call with the last number that the hardware holds; one more is refused.
LIMITS: dict[str, tuple[Callable[[int], object], int]] = {
    "offset of a converter": (lambda v: Converter(v, 1, 0), TOP32),
    "scale of a converter": (lambda v: Converter(0, v, 0), TOP16),
    "shift of a converter": (lambda v: Converter(0, 1, v), 63),
    "operand of a stage X": (lambda v: StageX("sum", v), TOP16),
    "shift of a stage X's operand": (lambda v: StageX("sum", 1, v), 63),
    "multiplier of a stage X": (lambda v: StageX(multiplier=v), TOP16),
    "shift of a stage X": (lambda v: StageX(shift=v), 255),
    "operand of a stage Y": (lambda v: StageY("sum", v), TOP32),
    "multiplier of a stage Y": (lambda v: StageY(multiplier=v), TOP32),
    "shift of a stage Y": (lambda v: StageY(shift=v), 1023),
    "input of a stage X": (lambda v: run_x(v, StageX()), TOP32),
    "input of a stage Y": (lambda v: run_y(v, StageY()), TOP32),
    "operand": (lambda v: convert.convert_operand(v, Converter(0, 1, 0)), TOP16),
    "input": (lambda v: convert.convert_input(v, Converter(0, 1, 0)), 2**16 - 1),
    "result of the output stages": (
        lambda v: convert.convert_output(v, Converter(0, 1, 0)),
        TOP32,
    ),
    "accumulator": (accumulator.deliver, 2**47 - 1),
    "shift behind the accumulator": (lambda v: accumulator.deliver(1, v), 31),
    "side of a window": (
        lambda v: pooling.average(np.zeros((1, 1, 9, 9), np.int8), Window((v, 1))),
        8,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_last_number_passes_and_the_next_is_refused(name: str) -> None:
    call, limit = LIMITS[name]
    call(limit)
    with pytest.raises(DlaError, match=rf"{name}.* holds {limit + 1}, the hardware"):
        call(limit + 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run_x(np.array([0.5]), StageX()), "has the type float64"),
        (lambda: StageX("eql", 1), "is 'eql', the hardware has None, max, min, sum"),
        (lambda: pooling.extreme(np.zeros((2, 2), np.int8), Window((1, 1)), "max"), r"\[2, 2\]"),
        (lambda: pooling.average(np.zeros((1, 1, 2, 2)), Window((1, 1))), "holds float64"),
        (
            lambda: convolution.make_kernel(np.zeros((2, 1, 3, 3), np.int8), Geometry((3, 1))),
            "kernel of 3x1",
        ),
        (
            lambda: convolution.convolve_whole(
                np.zeros((1, 3, 4, 4), np.int8),
                convolution.make_kernel(np.zeros((2, 4, 1, 1), np.int8), Geometry((1, 1))),
            ),
            "has 3 channels, the kernel 4",
        ),
        (
            lambda: convolution.convolve_whole(
                np.zeros((1, 4, 4, 4), np.int16),
                convolution.make_kernel(np.zeros((2, 4, 1, 1), np.int8), Geometry((1, 1))),
            ),
            "is INT16, its weights are not",
        ),
    ],
)
def test_other_types_and_shapes_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TandemError, match=message):
        call()


def int16s(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**15), 2**15, shape).astype(np.int16)


@pytest.mark.parametrize("groups", [1, 2, 4], ids="{} groups".format)
def test_a_convolution_in_int16_adds_up_every_product(groups: int) -> None:
    rng = np.random.default_rng()
    shape = Geometry((3, 2), strides=(2, 1), pads=(1, 0, 1, 1), groups=groups)
    x, weight = int16s(rng, 2, 4, 7, 6), int16s(rng, 8, 4 // groups, 3, 2)
    result = convolution.convolve_whole(x, convolution.make_kernel(weight, shape))
    assert (result == convolved(x, weight, shape)).all()


def test_int16_weights_that_could_overflow_48_bits_are_refused() -> None:
    weight = np.full((1, 2**17, 1, 1), -(2**15), np.int16)
    weight[0, -1, 0, 0] = 0
    convolution.make_kernel(weight, Geometry((1, 1)))
    weight[0, -1, 0, 0] = -(2**15)
    with pytest.raises(DlaError, match="split the input channels"):
        convolution.make_kernel(weight, Geometry((1, 1)))


def test_sums_of_48_bits_saturate() -> None:
    assert int(accumulator.add(2**47 - 2, 5, 48)) == 2**47 - 1
    assert int(accumulator.deliver(-(2**47), 31)) == -(2**16)


def test_pooling_in_int16_is_that_of_python_integers() -> None:
    rng = np.random.default_rng()
    x = int16s(rng, 1, 2, 6, 6)
    result = pooling.average(x, Window((3, 2), (3, 2)))
    for c, p, q in np.ndindex(2, 2, 3):
        total = int(x[0, c, 3 * p : 3 * p + 3, 2 * q : 2 * q + 2].sum(dtype=np.int64))
        twice = rha(rha(total * (65536 // 2), 16) * (65536 // 3), 16)
        assert result[0, c, p, q] == sat(twice, 16)
    padded = pooling.extreme(x, Window((2, 2), pads=(1, 1, 0, 0)), "max")
    assert padded.dtype == np.int16
    assert padded[0, 0, 0, 0] == x[0, 0, 0, 0]
