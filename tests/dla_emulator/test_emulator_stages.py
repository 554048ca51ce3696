"""The DLA's stages against Python integers of unlimited width, halves and limits included."""

from collections.abc import Callable

import numpy as np
import pytest
from emulator_stages_fixtures import rha, sat
from emulator_vectors_fixtures import WRONG
from hypothesis import given
from hypothesis import strategies as st

from device.dla_emulator.arithmetic import (
    accumulator,
    convert,
    lookup,
    output_stages,
    pooling,
    rounding,
    scales,
)
from device.dla_emulator.arithmetic.convert import Converter
from device.dla_emulator.arithmetic.output_stages import StageX, StageY


def signed(bits: int) -> st.SearchStrategy[int]:
    """Numbers of so many bits; the limits and powers of two more often than by chance."""
    top = 2 ** (bits - 1)
    edges = [-top, 1 - top, -1, 0, 1, top - 1, *(2**i for i in range(bits - 1))]
    return st.one_of(st.sampled_from(edges), st.integers(-top, top - 1))


SHIFTS = st.integers(0, 63)
OPERATIONS = {"max": max, "min": min, "sum": lambda a, b: a + b}


@given(signed(63), st.integers(0, 80))
def test_a_shift_rounds_half_away_from_zero(value: int, shift: int) -> None:
    assert int(rounding.shift_right(value, shift)) == rha(value, shift)


@given(st.integers(-(2**40), 2**40), st.integers(1, 20))
def test_an_exact_half_goes_away_from_zero(whole: int, shift: int) -> None:
    value = (2 * whole + 1) << (shift - 1)
    expected = whole + 1 if whole >= 0 else whole
    assert int(rounding.shift_right(value, shift)) == expected
    assert rounding.half_away(np.float64(whole + 0.5)) == expected


@given(signed(32), signed(32), signed(16), SHIFTS)
def test_the_output_converter(x: int, offset: int, scale: int, shift: int) -> None:
    registers = Converter(offset, scale, shift)
    value = sat(rha((x - offset) * scale, shift), 17)
    assert int(convert.convert_output(x, registers)) == sat(value, 8)
    assert int(convert.convert_output_int16(x, registers)) == sat(value, 16)


@given(signed(16), signed(16), signed(16), SHIFTS)
def test_the_input_converter(x: int, offset: int, scale: int, shift: int) -> None:
    value = sat(sat(rha((x - offset) * scale, shift), 17), 8)
    assert int(convert.convert_input(x, Converter(offset, scale, shift))) == value


@given(signed(16), signed(32), signed(16), SHIFTS)
def test_the_operand_converter(x: int, offset: int, scale: int, shift: int) -> None:
    value = sat(rha((x - offset) * scale, shift), 32)
    assert int(convert.convert_operand(x, Converter(offset, scale, shift))) == value


@given(signed(34), signed(22))
def test_the_accumulator_saturates_at_34_bits(total: int, partial: int) -> None:
    assert int(accumulator.add(total, partial)) == sat(total + partial, 34)


@given(signed(34), st.integers(0, 31))
def test_the_accumulator_delivers_with_16_bits_of_fraction(total: int, clip: int) -> None:
    clipped = (total << 16) >> clip
    assert int(accumulator.deliver(total, clip)) == sat(rha(clipped, 16), 32)


@given(signed(34), st.integers(0, 16))
def test_up_to_clip_16_the_accumulator_rounds_once(total: int, clip: int) -> None:
    assert int(accumulator.deliver(total, clip)) == sat(rha(total, clip), 32)


@given(
    x=signed(32),
    operation=st.sampled_from([None, *OPERATIONS]),
    operand=signed(16),
    left_shift=SHIFTS,
    multiplier=st.one_of(st.none(), signed(16)),
    shift=SHIFTS,
    relu=st.booleans(),
)
def test_stage_x(
    x: int,
    operation: str | None,
    operand: int,
    left_shift: int,
    multiplier: int | None,
    shift: int,
    relu: bool,
) -> None:
    value = x if operation is None else OPERATIONS[operation](x, sat(operand << left_shift, 32))
    value = sat(rha(value * (1 if multiplier is None else multiplier), shift), 32)
    stage = StageX(operation, operand, left_shift, multiplier, shift, relu=relu)
    assert int(output_stages.run_x(x, stage)) == (max(0, value) if relu else value)


@given(signed(32), signed(16), SHIFTS)
def test_a_prelu_in_stage_x_leaves_positive_numbers_alone(x: int, slope: int, shift: int) -> None:
    expected = x if x > 0 else sat(rha(x * slope, shift), 32)
    stage = StageX(multiplier=slope, shift=shift, prelu=True)
    assert int(output_stages.run_x(x, stage)) == expected


@given(
    x=signed(32),
    operation=st.sampled_from([None, *OPERATIONS]),
    operand=signed(32),
    multiplier=signed(32),
    shift=st.integers(0, 1023),
)
def test_stage_y_multiplies_before_it_adds(
    x: int, operation: str | None, operand: int, multiplier: int, shift: int
) -> None:
    value = sat(rha(x * multiplier, shift), 32)
    value = value if operation is None else sat(OPERATIONS[operation](value, operand), 32)
    stage = StageY(operation, operand, multiplier, shift)
    assert int(output_stages.run_y(x, stage)) == value


@given(st.integers(0, 2**35 - 1), signed(16), signed(16))
def test_a_lookup_interpolates_with_35_bits(fraction: int, y0: int, y1: int) -> None:
    expected = sat(rha(y0 * (2**35 - fraction) + y1 * fraction, 35), 32)
    assert int(lookup.interpolate(fraction, y0, y1)) == expected


@given(signed(32), signed(34), signed(16), signed(16), st.integers(-16, 15))
def test_beyond_a_table_its_slope_goes_on(
    x: int, edge: int, y_edge: int, slope: int, shift: int
) -> None:
    distance = (x - edge) * slope
    step = sat(rha(distance, shift) if shift >= 0 else distance << -shift, 32)
    assert int(lookup.extend(x, edge, y_edge, slope, shift)) == sat(step + y_edge, 32)


@given(signed(14), st.integers(1, 8), st.integers(1, 8))
def test_an_average_is_rounded_along_the_width_then_along_the_height(
    total: int, width: int, height: int
) -> None:
    expected = rha(rha(total * (65536 // width), 16) * (65536 // height), 16)
    result = pooling.average_of(total, pooling.reciprocal(width), pooling.reciprocal(height))
    assert int(result) == expected


@given(st.floats(2.0**-40, 2.0**14))
def test_a_factor_keeps_15_bits_and_is_never_too_large(factor: float) -> None:
    result = scales.multiplier_of(factor)
    assert 2**14 <= int(result.scale) < 2**15
    assert 0 <= factor - int(result.scale) / 2**result.shift < factor / 2**14


def test_a_factor_becomes_the_registers_that_the_compiler_sets() -> None:
    result = scales.multiplier_of(0.00781 * 0.00456103 / 0.0213)
    assert (int(result.scale), result.shift) == (28057, 24)


def test_channels_share_the_shift_of_the_largest_factor() -> None:
    result = scales.multiplier_of(np.array([0.5, 0.001, 0.0]))
    assert result.shift == 15
    assert result.scale.tolist() == [16384, 32, 0]


@pytest.mark.parametrize("factor", [2.0**15, np.inf, np.nan])
def test_a_factor_of_16_bits_and_more_is_refused(factor: float) -> None:
    with pytest.raises(scales.ScaleError, match=r"not below 2\^15"):
        scales.multiplier_of(factor)
    assert scales.multiplier_of(np.nextafter(2.0**15, 0)).shift == 0


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8))
def test_a_bias_keeps_16_bits_cut_downwards(values: list[int]) -> None:
    result = scales.bias_operand(np.array(values))
    assert all(-(2**15) <= int(one) < 2**15 for one in result.operand)
    assert result.operand.tolist() == [value >> result.shift for value in values]
    largest = max(abs(value) for value in values)
    # One bit fewer would not hold it, but for a power of two, which is -2^15 on one side only.
    assert result.shift == 0 or largest >> (result.shift - 1) >= 2**15


TIES = np.array([1, 3, 5, 7, -1, -3, -5, -7]) * 8
EXPECTED = np.array([rha(int(value), 4) for value in TIES])
# Each stage that rounds, given values that all lie halfway.
HALVES: dict[str, Callable[[], np.ndarray]] = {
    "input converter": lambda: convert.convert_input(TIES, Converter(0, 1, 4)),
    "operand converter": lambda: convert.convert_operand(TIES, Converter(0, 1, 4)),
    "output converter": lambda: convert.convert_output(TIES, Converter(0, 1, 4)),
    "accumulator": lambda: accumulator.deliver(TIES, 4),
    "stage X": lambda: output_stages.run_x(TIES, StageX(shift=4)),
    "stage Y": lambda: output_stages.run_y(TIES, StageY(multiplier=1, shift=4)),
    "lookup inside": lambda: lookup.interpolate(2**34, 0, TIES // 8),
    "lookup outside": lambda: lookup.extend(TIES, 0, 0, 1, 4),
    "average along the width": lambda: pooling.average_of(TIES // 8, 2**15, 2**16),
    "average along the height": lambda: pooling.average_of(TIES // 8, 2**16, 2**15),
}


@pytest.mark.parametrize("stage", HALVES)
def test_every_stage_rounds_halves_away_from_zero(stage: str) -> None:
    assert HALVES[stage]().tolist() == EXPECTED.tolist()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("stage", HALVES)
def test_with_another_rounding_no_stage_does(
    stage: str, wrong: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "shift_right", wrong)
    assert HALVES[stage]().tolist() != EXPECTED.tolist()
