"""Local response normalization across channels (CDP), in INT8 and INT16.

    z   = sat9 (rha((x - offset8 ) scale16, shift5))      17 bits, offset of 16, for INT16
    sum = sum of z^2 over 3, 5, 7 or 9 channels around each; 0 beyond the first and the last
    t   = the tables' answer to `sum`, 16 bits (`lookup.NORMALIZATION`)
    y   = sat8 (rha((t z - offset25) scale16, shift6))    sat16, offset of 32 bits, for INT16

Either the squares or the product can be bypassed: then the tables see z, or y is made of t alone.
In int64 all is exact: z^2 has 34 bits, nine of them 38; t z has 33 bits, times the scale 49.

Source: nvdla/hw cmod/cdp/NV_NVDLA_cdp.cpp (lookup_lut_int8, lookup_lut), cmod/hls/cdp_libs
(cdp_icvt.cpp, cdp_ocvt.cpp), vmod/nvdla/cdp/NV_NVDLA_CDP_DP_INTP_unit.v. INT16 is in nv_full, the
ancestor of Xavier's DLA, alone. `lrn_registers` is inferred: the open compiler has no LRN in INT8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic import checks, lookup, rounding, scales
from device.dla_emulator.arithmetic.convert import Converter
from device.dla_emulator.arithmetic.rounding import Floats, Ints

WINDOWS = (3, 5, 7, 9)
Whole = TypeVar("Whole", np.int8, np.int16)
_ENTRY_BITS = 15
_LARGEST = 128
_WIDEST_SELECT = 11  # 256 entries 2^11 apart reach over nine squares of INT8
_EVERY, _APART = 2048, 61  # sums at which a placement is judged: all of the small ones, then some


@dataclass(frozen=True, slots=True)
class Normalization:
    """The registers of one layer: channels of a sum, both converters, and the tables."""

    window: int
    input: Converter
    tables: lookup.Tables
    output: Converter
    squares_bypassed: bool = False
    product_bypassed: bool = False

    def __post_init__(self) -> None:
        """Raise DlaError: a window that the hardware does not have."""
        checks.one_of("the window of a normalization", self.window, WINDOWS)


@dataclass(frozen=True, slots=True)
class Lrn:
    """ONNX's LRN: y = x / (bias + alpha / size sum(x^2)) ^ beta."""

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0


def normalize(x: NDArray[Whole], registers: Normalization) -> NDArray[Whole]:
    """Return the normalized numbers; x is INT8 or INT16, (batch, channels, height, width).

    Raises DlaError: another type or shape.
    """
    checks.images("the input of a normalization", x, (np.int8, np.int16))
    bits = x.dtype.itemsize * 8
    z = _converted(x.astype(np.int64), registers.input, bits + 1)
    looked_up = z if registers.squares_bypassed else window_sums(z * z, registers.window)
    t = lookup.run_lookup(looked_up, registers.tables, lookup.NORMALIZATION)
    y = _converted(t if registers.product_bypassed else t * z, registers.output, bits)
    return y.astype(x.dtype)


def real(x: NDArray[Whole], lrn: Lrn, step_in: float) -> Floats:
    """Return ONNX's LRN of numbers with the scale `step_in`, in real units and float64."""
    numbers = x.astype(np.int64)
    sums = window_sums(numbers * numbers, lrn.size).astype(np.float64)
    result: Floats = numbers * step_in * _of_sums(lrn, step_in, sums)
    return result


def window_sums(x: Ints, window: int) -> Ints:
    """Return sums over `window` channels around each of (batch, channels, h, w); 0 outside."""
    reach = window // 2
    padded = np.pad(x, ((0, 0), (reach, reach), (0, 0), (0, 0)))
    total: Ints = padded[:, : x.shape[1]].copy()
    for first in range(1, window):
        total += padded[:, first : first + x.shape[1]]
    return total


def lrn_registers(lrn: Lrn, step_in: float, step_out: float) -> Normalization:
    """Return registers for ONNX's LRN of INT8 numbers with the scales `step_in` and `step_out`.

    z is x itself. The tables hold (bias + alpha / size step_in^2 sum)^-beta with as many fraction
    bits as 16 leave; of the ways to place them, the one with the smallest largest error is taken.
    Raises DlaError: a window that the hardware does not have, ScaleError: a factor too large.
    """
    checks.one_of("the window of a normalization", lrn.size, WINDOWS)
    largest = lrn.size * _LARGEST**2
    sums = np.unique(np.concatenate([np.arange(_EVERY), np.arange(_EVERY, largest, _APART)]))
    exact = _of_sums(lrn, step_in, sums.astype(np.float64))
    fraction_bits = _ENTRY_BITS - int(np.frexp(exact.max() * (1 + 2.0**-_ENTRY_BITS))[1])
    weight = np.minimum(np.sqrt(sums), _LARGEST)  # no x is larger than its own sum allows

    def error(tables: lookup.Tables) -> float:
        factors = lookup.run_lookup(sums, tables, lookup.NORMALIZATION)
        return float(np.max(weight * np.abs(np.ldexp(factors, -fraction_bits) - exact)))

    tables = min(_placements(lrn, step_in, fraction_bits), key=error)
    factor = scales.multiplier_of(step_in / step_out * 2.0**-fraction_bits)
    output = Converter(0, int(factor.scale), factor.shift)
    return Normalization(lrn.size, Converter(0, 1, 0), tables, output)


def _placements(lrn: Lrn, step_in: float, fraction_bits: int) -> Sequence[lookup.Tables]:
    """Return both tables for each distance of LO's entries, LE exponential behind it or before."""

    def table(entries: int, how: lookup.Addressing) -> lookup.Table:
        places = np.arange(entries, dtype=np.float64)
        apart = np.exp2(places + how.offset) if how.exponential else places * 2.0**how.select
        points = np.minimum(apart + how.start, 2.0**36)
        real = np.ldexp(_of_sums(lrn, step_in, points), fraction_bits)
        stored = rounding.saturate(rounding.half_away(real).astype(np.int64), 16)
        return lookup.Table(stored, how, int(points[-1]))

    le = table(lookup.LE_ENTRIES, lookup.Addressing(-1, exponential=True))
    chosen = []
    for select in range(_WIDEST_SELECT + 1):
        for first in (-1, 1 << select):  # LO answers from the start, or where LE gets coarser
            lo = table(lookup.LO_ENTRIES, lookup.Addressing(first, select))
            chosen.append(lookup.Tables(le, lo, lookup.Priority("lo", "le", "lo")))
    return chosen


def _of_sums(lrn: Lrn, step_in: float, sums: Floats) -> Floats:
    """Return the factor on x for sums of squares in units of step_in^2."""
    squares = np.maximum(sums, 0.0) * step_in**2
    result: Floats = (lrn.bias + lrn.alpha / lrn.size * squares) ** -lrn.beta
    return result


def _converted(x: Ints, registers: Converter, bits: int) -> Ints:
    scaled = rounding.shift_right((x - registers.offset) * registers.scale, registers.shift)
    return rounding.saturate(scaled, bits)
