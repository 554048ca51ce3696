"""The tables of stage Y and of the normalization against Python integers of unlimited width."""

from collections.abc import Callable

import numpy as np
import pytest
from emulator_lookup_fixtures import drawn, expected, rha, sat
from hypothesis import given
from hypothesis import strategies as st

from device.dla_emulator.arithmetic import lookup
from device.dla_emulator.arithmetic.lookup import Addressing, Priority, Slope, Table, Tables, Unit
from device.errors import DlaError

UNITS = {"stage Y": lookup.STAGE_Y, "normalization": lookup.NORMALIZATION}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("exponential", [False, True], ids=["linear", "exponential"])
def test_every_select_and_offset_of_the_registers(exponential: bool, unit: Unit) -> None:
    """All 256 values of the 8-bit register, of which 64 and more, and below -8, are edges too."""
    rng = np.random.default_rng()
    for shift in range(-128, 128):
        tables = drawn(rng, exponential, shift, unit)
        start, top = tables.le.addressing.start, 2 ** (unit.number_bits - 1)
        near = start + rng.integers(-3, 600, 6)
        x = [*near.tolist(), start, start + 1, -top, top - 1, int(rng.integers(-top, top))]
        result = lookup.run_lookup(np.array(x), tables, unit).tolist()
        assert result == [expected(one, tables, unit) for one in x], shift


@given(
    st.integers(0, 2**35 - 1), st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1)
)
def test_the_normalization_interpolates_the_difference(fraction: int, y0: int, y1: int) -> None:
    high_bits = fraction >> 19
    step = rha((y1 - y0) * high_bits, 16)
    assert int(lookup.interpolate_difference(high_bits, y0, y1)) == sat(y0 + step, 16)


LE, LO = np.zeros(65, np.int64), np.zeros(257, np.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Addressing(0, select=128), "the select of a table holds 128"),
        (lambda: Addressing(0, exponential=True, offset=-129), "index offset of a table holds"),
        (lambda: Addressing(2**37), "the start of a table holds"),
        (lambda: Slope(32768), "slope beyond a table holds 32768, the hardware -32768 to 32767"),
        (lambda: Slope(0, 16), "shift of a slope beyond a table holds 16"),
        (lambda: Table(LE + 2**15, Addressing(0), 0), "an entry of a table holds 32768"),
        (lambda: Table(LE[1:], Addressing(0), 0), r"shape \[64\]"),
        (lambda: Table(np.full(65, 0.5), Addressing(0), 0), "type float64"),
        (
            lambda: Tables(Table(LO, Addressing(0), 0), Table(LE, Addressing(0), 0), Priority()),
            "LE has 257 entries and LO 65",
        ),
        (
            lambda: Tables(
                Table(LE, Addressing(0), 0),
                Table(LO, Addressing(0, exponential=True), 0),
                Priority(),
            ),
            "only LE can be",
        ),
    ],
)
def test_what_no_register_holds_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(DlaError, match=message):
        make()


@pytest.mark.parametrize(("unit", "bits"), [(lookup.STAGE_Y, 32), (lookup.NORMALIZATION, 38)])
def test_numbers_of_the_full_width_are_looked_up_and_wider_ones_refused(
    unit: Unit, bits: int
) -> None:
    table = Tables(Table(LE, Addressing(0), 64), Table(LO, Addressing(0), 256), Priority())
    edges = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1])
    assert lookup.run_lookup(edges, table, unit).tolist() == [0, 0]
    with pytest.raises(DlaError, match="a number that is looked up holds"):
        lookup.run_lookup(edges + np.array([0, 1]), table, unit)
