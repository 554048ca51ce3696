"""The tables of stage Y and of the normalization against Python integers of unlimited width."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device.dla import lookup
from device.dla.lookup import Addressing, Priority, Slope, Table, Tables, Unit
from device.errors import DlaError

UNITS = {"stage Y": lookup.STAGE_Y, "normalization": lookup.NORMALIZATION}
PRIORITIES = [Priority(u, o, h) for u in ("le", "lo") for o in ("le", "lo") for h in ("le", "lo")]


def rha(value: int, shift: int) -> int:
    size = (2 * abs(value) + (1 << shift)) >> (shift + 1)
    return size if value >= 0 else -size


def sat(value: int, bits: int) -> int:
    return max(-(1 << (bits - 1)), min((1 << (bits - 1)) - 1, value))


def place(x: int, how: Addressing, entries: int) -> tuple[str, int, int]:
    """Return miss or hit, entry and 35 bits of fraction, as the RTL's shifts give them."""
    distance = x - how.start
    if distance <= 0:
        return "under", 0, 0
    if how.exponential:
        log2 = distance.bit_length() - 1
        index, fraction = log2 - how.offset, ((distance - 2**log2) << 35) >> log2
    elif how.select < 0:
        index, fraction = distance << -how.select, 0
    else:
        index = distance >> how.select
        fraction = ((distance << 35) >> how.select) & (2**35 - 1)
    if index < 0:
        return "under", 0, 0
    return ("over", entries - 1, 0) if index >= entries - 1 else ("hit", index, fraction)


def answer(x: int, table: Table, entries: int, unit: Unit) -> int:
    kind, index, fraction = place(x, table.addressing, entries)
    y, how = [int(one) for one in table.entries], table.addressing
    if kind == "hit" and unit is lookup.STAGE_Y:
        return sat(rha(y[index] * (2**35 - fraction) + y[index + 1] * fraction, 35), 32)
    if kind == "hit":
        return sat(y[index] + rha((y[index + 1] - y[index]) * (fraction >> 19), 16), 16)
    slope = table.below if kind == "under" else table.above
    edge = table.end
    if kind == "under":
        bias = how.exponential and how.offset >= 0
        edge = how.start + ((1 << how.offset) % 2**unit.bias_bits if bias else 0)
    distance = (x - edge) * slope.scale
    shifted = rha(distance, slope.shift) if slope.shift >= 0 else distance << -slope.shift
    return sat(sat(shifted, 32) + y[0 if kind == "under" else entries - 1], unit.result_bits)


def expected(x: int, tables: Tables, unit: Unit) -> int:
    le = place(x, tables.le.addressing, 65)[0]
    lo = place(x, tables.lo.addressing, 257)[0]
    which = tables.priority.hybrid
    if le == lo == "under":
        which = tables.priority.underflow
    elif le == lo == "over":
        which = tables.priority.overflow
    elif (le == "hit") != (lo == "hit"):
        which = "le" if le == "hit" else "lo"
    table, entries = (tables.le, 65) if which == "le" else (tables.lo, 257)
    return answer(x, table, entries, unit)


def drawn(rng: np.random.Generator, exponential: bool, shift: int, unit: Unit) -> Tables:
    start = int(rng.integers(-(2**20), 2**20))

    def slope() -> Slope:
        return Slope(int(rng.integers(-(2**15), 2**15)), int(rng.integers(-16, 16)))

    def entries(count: int) -> np.ndarray:
        return rng.integers(-(2**15), 2**15, count)

    le = Addressing(start, 0 if exponential else shift, exponential, shift if exponential else 0)
    lo = Addressing(start + int(rng.integers(-99, 99)), int(rng.integers(-12, 12)))
    end = int(rng.integers(-(2**24), 2**24))
    return Tables(
        Table(entries(65), le, end, slope(), slope()),
        Table(entries(257), lo, end + 5, slope(), slope()),
        PRIORITIES[int(rng.integers(8))],
    )


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
        found = lookup.run_lookup(np.array(x), tables, unit).tolist()
        assert found == [expected(one, tables, unit) for one in x], shift


@given(
    st.integers(0, 2**35 - 1), st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1)
)
def test_the_normalization_interpolates_the_difference(fraction: int, y0: int, y1: int) -> None:
    kept = fraction >> 19
    step = rha((y1 - y0) * kept, 16)
    assert int(lookup.interpolate_difference(kept, y0, y1)) == sat(y0 + step, 16)


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
