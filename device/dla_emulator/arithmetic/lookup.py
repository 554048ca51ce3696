"""Two tables of INT16 entries: LE (65 entries) and LO (257 entries, finer).

Index of x in a table that starts at `start`, with d = x - start:

    linear       i = floor(d / 2^select),          fraction = d / 2^select - i
    exponential  e = floor(log2 d), i = e - offset, fraction = d / 2^e - 1        (LE only)

A negative select goes left: i = d 2^-select, and the fraction is 0. x <= start, or i < 0, is an
underflow; i >= entries - 1 is an overflow; else a hit. If exactly one table hits, it answers. If
both hit, or one underflows where the other overflows, the hybrid priority chooses; both under or
both over: the underflow or the overflow priority.

Stage Y of the SDP (`STAGE_Y`) has 32-bit numbers, 35 bits of fraction f and results of 32 bits; the
normalization of the CDP (`NORMALIZATION`) has 38-bit sums, 16 bits of fraction, results of 16 bits:

    hit   stage Y        y = sat32(rha(y_i (2^35 - f) + y_(i+1) f, 35))
          normalization  y = sat16(y_i + rha((y_(i+1) - y_i) f, 16))
    miss  both           y = sat(y_edge + rha((x - (edge + bias)) slope16, shift5))

The edge is the table's start or end, with slope and shift of its own on each side; a negative shift
goes left. The bias is 2^offset where an exponential table underflows and 0 <= offset, else 0; in
stage Y it has 32 bits, so that it is 0 from offset 32 on.

Source: nvdla/hw cmod/hls/sdp/sdp_y_idx.cpp, sdp_y_inp.cpp; vmod NV_NVDLA_SDP_HLS_lut_expn.v,
NV_NVDLA_SDP_HLS_lut_line.v, NV_NVDLA_HLS_shiftrightusz.v, NV_NVDLA_SDP_CORE_Y_lut.v (the bias);
cmod/cdp/NV_NVDLA_cdp.cpp, vmod NV_NVDLA_CDP_DP_intp.v, NV_NVDLA_CDP_DP_INTP_unit.v. In int64: d has
39 bits, an interpolation 16 + 35, a slope times a distance 40 + 15.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from device.dla_emulator.arithmetic import checks, rounding
from device.dla_emulator.arithmetic.rounding import IntLike, Ints
from device.errors import DlaError

Bools = npt.NDArray[np.bool_]
TableName = Literal["le", "lo"]

LE_ENTRIES = 65
LO_ENTRIES = 257
FRACTION_BITS = 35
_FAR = 1 << 40  # shifted left by any amount it still saturates to 32 bits, as all beyond it do
_PAST_ALL = 9  # a distance of 1 shifted left by so much is past the last entry of both tables


@dataclass(frozen=True, slots=True)
class Unit:
    """What the two units with tables do differently: bits of numbers, fraction, result and bias."""

    number_bits: int
    fraction_bits: int
    result_bits: int
    bias_bits: int


STAGE_Y = Unit(number_bits=32, fraction_bits=FRACTION_BITS, result_bits=32, bias_bits=32)
NORMALIZATION = Unit(number_bits=38, fraction_bits=16, result_bits=16, bias_bits=38)


@dataclass(frozen=True, slots=True)
class Addressing:
    """How one table turns a number into an index; `exponential` holds for LE alone.

    `select`: log2 of the distance between entries of a linear table; `offset`: log2 of the distance
    from `start` to the first entry of an exponential one. Both are registers of 8 bits with a sign.
    """

    start: int
    select: int = 0
    exponential: bool = False
    offset: int = 0

    def __post_init__(self) -> None:
        """Raise DlaError for what the registers cannot hold."""
        checks.signed("the start of a table", self.start, NORMALIZATION.number_bits)
        checks.signed("the select of a table", self.select, 8)
        checks.signed("the index offset of a table", self.offset, 8)


@dataclass(frozen=True, slots=True)
class Priority:
    """Which table answers where the tables do not decide it."""

    underflow: TableName = "le"
    overflow: TableName = "le"
    hybrid: TableName = "le"


@dataclass(frozen=True, slots=True)
class Index:
    """Where numbers fall: which table, its entry, 35 bits of fraction, and whether it missed."""

    in_lo: Bools
    entry: Ints
    fraction: Ints
    underflow: Bools
    overflow: Bools


@dataclass(frozen=True, slots=True)
class Slope:
    """A line beyond an edge of a table: 16-bit slope, and its right shift of -16..15."""

    scale: int = 0
    shift: int = 0

    def __post_init__(self) -> None:
        """Raise DlaError for what the registers cannot hold."""
        checks.signed("the slope beyond a table", self.scale, 16)
        checks.signed("the shift of a slope beyond a table", self.shift, 5)


@dataclass(frozen=True, slots=True)
class Table:
    """One table: INT16 entries, addressing, its last point and the lines beyond both edges."""

    entries: Ints
    addressing: Addressing
    end: int
    below: Slope = Slope()
    above: Slope = Slope()

    def __post_init__(self) -> None:
        """Raise DlaError: entries that are not 16 bits, or not as many as a table has."""
        checks.signed("an entry of a table", self.entries, 16)
        checks.signed("the end of a table", self.end, NORMALIZATION.number_bits)
        if self.entries.shape not in ((LE_ENTRIES,), (LO_ENTRIES,)):
            raise DlaError(
                f"a table has the shape {list(self.entries.shape)}, the hardware's have "
                f"{LE_ENTRIES} (LE) and {LO_ENTRIES} (LO) entries; fill it up"
            )


@dataclass(frozen=True, slots=True)
class Tables:
    """Both tables and who answers."""

    le: Table
    lo: Table
    priority: Priority

    def __post_init__(self) -> None:
        """Raise DlaError: the tables are swapped, or LO is exponential, which it cannot be."""
        counts = len(self.le.entries), len(self.lo.entries)
        if counts != (LE_ENTRIES, LO_ENTRIES):
            raise DlaError(
                f"LE has {counts[0]} entries and LO {counts[1]}, the hardware {LE_ENTRIES} and "
                f"{LO_ENTRIES}; swap or fill them"
            )
        if self.lo.addressing.exponential:
            raise DlaError("LO is exponential, but only LE can be; make LO linear")


def run_lookup(x: IntLike, tables: Tables, unit: Unit = STAGE_Y) -> Ints:
    """Return what a unit's tables make of its numbers. Raises DlaError: they have too many bits."""
    number = checks.signed("a number that is looked up", x, unit.number_bits)
    index = find(number, tables.le.addressing, tables.lo.addressing, tables.priority)
    return np.where(
        index.in_lo, _read(number, index, tables.lo, unit), _read(number, index, tables.le, unit)
    ).astype(np.int64)


def find(x: IntLike, le: Addressing, lo: Addressing, priority: Priority) -> Index:
    """Return where numbers of at most 38 bits fall in the two tables."""
    number = np.asarray(x, np.int64)
    le_entry, le_fraction, le_under, le_over = _locate(number, le, LE_ENTRIES)
    lo_entry, lo_fraction, lo_under, lo_over = _locate(number, lo, LO_ENTRIES)
    le_hit, lo_hit = ~(le_under | le_over), ~(lo_under | lo_over)
    undecided = np.full_like(lo_hit, priority.hybrid == "lo")
    in_lo = np.where(le_under & lo_under, priority.underflow == "lo", undecided)
    in_lo = np.where(le_over & lo_over, priority.overflow == "lo", in_lo)
    in_lo = np.where(le_hit ^ lo_hit, lo_hit, in_lo)
    return Index(
        in_lo,
        np.where(in_lo, lo_entry, le_entry),
        np.where(in_lo, lo_fraction, le_fraction),
        np.where(in_lo, lo_under, le_under),
        np.where(in_lo, lo_over, le_over),
    )


def interpolate(fraction: IntLike, y0: IntLike, y1: IntLike) -> Ints:
    """Return stage Y's number between two neighbouring entries; `fraction` has 35 bits."""
    share = np.asarray(fraction, np.int64)
    total = np.asarray(y0, np.int64) * ((1 << FRACTION_BITS) - share) + share * y1
    return rounding.saturate(rounding.shift_right(total, FRACTION_BITS), 32)


def interpolate_difference(fraction: IntLike, y0: IntLike, y1: IntLike) -> Ints:
    """Return the normalization's number between two entries; `fraction` has 16 bits."""
    bits = NORMALIZATION.fraction_bits
    step = rounding.shift_right((np.asarray(y1, np.int64) - y0) * np.asarray(fraction), bits)
    return rounding.saturate(step + y0, NORMALIZATION.result_bits)


def extend(
    x: IntLike, edge: IntLike, y_edge: IntLike, slope: IntLike, shift: IntLike, *, bits: int = 32
) -> Ints:
    """Return the number on the line beyond a table, in `bits`; `edge` already holds the bias."""
    distance = (np.asarray(x, np.int64) - edge) * slope
    places = np.asarray(shift, np.int64)
    shifted_right = rounding.shift_right(distance, np.maximum(places, 0))
    shifted_left = np.clip(distance, -_FAR, _FAR) << np.maximum(-places, 0)
    step = rounding.saturate(np.where(places < 0, shifted_left, shifted_right), 32)
    return rounding.saturate(step + y_edge, bits)


def bias_of(how: Addressing, unit: Unit = STAGE_Y) -> int:
    """Return how far beyond its start an exponential table's first entry lies; else 0."""
    fits = how.exponential and 0 <= how.offset < unit.bias_bits
    return 1 << how.offset if fits else 0


def _locate(x: Ints, how: Addressing, entries: int) -> tuple[Ints, Ints, Bools, Bools]:
    """Return entry, fraction, underflow and overflow of numbers in one table."""
    distance = x - how.start
    inside = np.maximum(distance, 1)
    if how.exponential:
        places = np.frexp(inside.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2^53
        index = places - how.offset
        rest = inside - (np.int64(1) << places)
    elif how.select < 0:
        places = np.zeros_like(inside)
        index = inside << min(-how.select, _PAST_ALL)
        rest = np.zeros_like(inside)
    else:
        places = np.full_like(inside, how.select)
        index = inside >> min(how.select, 63)
        rest = inside if how.select > 62 else inside - (index << how.select)
    under = (distance <= 0) | (index < 0)
    over = ~under & (index >= entries - 1)
    shift = FRACTION_BITS - places
    shifted = np.where(
        shift >= 0, rest << np.maximum(shift, 0), rest >> np.minimum(np.maximum(-shift, 0), 63)
    )
    fraction = np.where(under | over, 0, shifted)
    entry = np.where(under, 0, np.where(over, entries - 1, index))
    return entry, fraction, under, over


def _read(x: Ints, index: Index, table: Table, unit: Unit) -> Ints:
    last = len(table.entries) - 1
    entry = np.clip(index.entry, 0, last)
    how, bits = table.addressing, unit.result_bits
    low, high = int(table.entries[0]), int(table.entries[last])
    start = how.start + bias_of(how, unit)
    below = extend(x, start, low, table.below.scale, table.below.shift, bits=bits)
    above = extend(x, table.end, high, table.above.scale, table.above.shift, bits=bits)
    y0, y1 = table.entries[entry], table.entries[np.minimum(entry + 1, last)]
    if unit is NORMALIZATION:
        fraction = index.fraction >> (FRACTION_BITS - unit.fraction_bits)
        hit = interpolate_difference(fraction, y0, y1)
    else:
        hit = interpolate(index.fraction, y0, y1)
    return np.where(index.underflow, below, np.where(index.overflow, above, hit))
