"""The DLA's lookup tables, written from their description."""

import numpy as np

from device.dla_emulator.arithmetic import lookup
from device.dla_emulator.arithmetic.lookup import Addressing, Priority, Slope, Table, Tables, Unit

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
