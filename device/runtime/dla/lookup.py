"""Stage Y's two tables of INT16 entries: LE (65 entries) and LO (257 entries, finer).

Index of x in a table that starts at `start`, with d = x - start:

    linear       i = floor(d / 2^select),          fraction = d / 2^select - i
    exponential  e = floor(log2 d), i = e - offset, fraction = d / 2^e - 1        (LE only)

x <= start, or i < 0, is an underflow; i >= entries - 1 is an overflow; else a hit. If exactly one
table hits, it answers. If both hit, or one underflows where the other overflows, the hybrid
priority chooses; both under or both over: the underflow or the overflow priority.

    hit   y = sat32(rha(y_i (2^35 - f) + y_(i+1) f, 35))             f: fraction in 35 bits
    miss  y = sat32(y_edge + sat32(rha((x - (edge + bias)) slope16, shift5)))

The edge is the table's start or end, with slope and shift of its own on each side; a negative shift
goes left. The bias is 2^offset where an exponential table underflows, else 0.

Source: nvdla/hw cmod/hls/sdp/sdp_y_idx.cpp, sdp_y_inp.cpp; vmod SDP_CORE_Y_lut.v. In int64: d has
33 bits, an interpolation 16 + 35, a slope times a distance 35 + 15.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from device.runtime.dla import rounding
from device.runtime.dla.rounding import IntLike, Ints

Bools = npt.NDArray[np.bool_]
TableName = Literal["le", "lo"]

LE_ENTRIES = 65
LO_ENTRIES = 257
FRACTION_BITS = 35
_FAR = 1 << 40  # shifted left by any amount it still saturates to 32 bits, as all beyond it do


@dataclass(frozen=True, slots=True)
class Addressing:
    """How one table turns a number into an index; `exponential` holds for LE alone.

    `select`: log2 of the distance between entries of a linear table; `offset`: log2 of the distance
    from `start` to the first entry of an exponential one.
    """

    start: int
    select: int = 0
    exponential: bool = False
    offset: int = 0


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


@dataclass(frozen=True, slots=True)
class Table:
    """One table: INT16 entries, addressing, its last point and the lines beyond both edges."""

    entries: Ints
    addressing: Addressing
    end: int
    below: Slope = Slope()
    above: Slope = Slope()


@dataclass(frozen=True, slots=True)
class Tables:
    """Both tables and who answers."""

    le: Table
    lo: Table
    priority: Priority


def run_lookup(x: IntLike, tables: Tables) -> Ints:
    """Return what the tables make of 32-bit numbers, in 32 bits."""
    number = np.asarray(x, np.int64)
    index = find(number, tables.le.addressing, tables.lo.addressing, tables.priority)
    return np.where(
        index.in_lo, _read(number, index, tables.lo), _read(number, index, tables.le)
    ).astype(np.int64)


def find(x: IntLike, le: Addressing, lo: Addressing, priority: Priority) -> Index:
    """Return where 32-bit numbers fall in the two tables."""
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
    """Return the number between two neighbouring entries."""
    share = np.asarray(fraction, np.int64)
    total = np.asarray(y0, np.int64) * ((1 << FRACTION_BITS) - share) + share * y1
    return rounding.saturate(rounding.shift_right(total, FRACTION_BITS), 32)


def extend(x: IntLike, edge: IntLike, y_edge: IntLike, slope: IntLike, shift: IntLike) -> Ints:
    """Return the number on the line beyond a table; `edge` already holds the bias."""
    distance = (np.asarray(x, np.int64) - edge) * slope
    bits = np.asarray(shift, np.int64)
    shifted_right = rounding.shift_right(distance, np.maximum(bits, 0))
    shifted_left = np.clip(distance, -_FAR, _FAR) << np.maximum(-bits, 0)
    step = rounding.saturate(np.where(bits < 0, shifted_left, shifted_right), 32)
    return rounding.saturate(step + y_edge, 32)


def _locate(x: Ints, how: Addressing, entries: int) -> tuple[Ints, Ints, Bools, Bools]:
    """Return entry, fraction, underflow and overflow of numbers in one table."""
    distance = x - how.start
    inside = np.maximum(distance, 1)
    if how.exponential:
        places = np.frexp(inside.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2^53
        index = places - how.offset
        rest = inside - (np.int64(1) << places)
    else:
        places = np.full_like(inside, how.select)
        index = inside >> places
        rest = inside - (index << places)
    under = (distance <= 0) | (index < 0)
    over = ~under & (index >= entries - 1)
    fraction = np.where(under | over, 0, rest << (FRACTION_BITS - places))
    entry = np.where(under, 0, np.where(over, entries - 1, index))
    return entry, fraction, under, over


def _read(x: Ints, index: Index, table: Table) -> Ints:
    last = len(table.entries) - 1
    entry = np.clip(index.entry, 0, last)
    how = table.addressing
    bias = 1 << how.offset if how.exponential else 0
    low, high = int(table.entries[0]), int(table.entries[last])
    below = extend(x, how.start + bias, low, table.below.scale, table.below.shift)
    above = extend(x, table.end, high, table.above.scale, table.above.shift)
    y0, y1 = table.entries[entry], table.entries[np.minimum(entry + 1, last)]
    hit = interpolate(index.fraction, y0, y1)
    return np.where(index.underflow, below, np.where(index.overflow, above, hit))
