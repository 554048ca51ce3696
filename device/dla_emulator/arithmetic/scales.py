"""Real factors as the DLA holds them: a 16-bit multiplier and a right shift; and integer biases.

One factor r (Si Sw / So of a layer with one weight scale):

    shift = 15 - (floor(log2 r) + 1),  scale = trunc(r 2^shift)        16384 <= scale <= 32767

A factor for each channel shares the shift of the largest, so small factors keep fewer bits. What
trunc drops makes a result up to 6e-5 too small for one factor.

    b32 = floor(b / (Si Sw) + 1/2),  left = max(0, ceil(log2 max|b32|) + 1 - 16)
    b16 = floor(b32 / 2^left),       the adder takes b16 2^left

Source: nvdla/sw umd/core/src/compiler LowPrecision.h (Impl2) and BiasOp.cpp. `left` grows by one
where a power of two would not fit 16 bits, of which the source says nothing.
"""

from dataclasses import dataclass

import numpy as np

from device.dla_emulator.arithmetic.rounding import Floats, Ints
from device.errors import DlaError

MULTIPLIER_BITS = 15  # and a sign
LARGEST_SHIFT = 63  # the registers have 6 bits; the compiler itself warns beyond 31


class ScaleError(DlaError):
    """A factor that a 16-bit multiplier and a shift cannot hold; says which and the limit."""


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Factors scale / 2^shift: int64 numbers of 16 bits, in a shape of the caller's, one shift."""

    scale: Ints
    shift: int


@dataclass(frozen=True, slots=True)
class Bias:
    """An operand of the adder: 16-bit numbers (int64), shifted left by `shift`."""

    operand: Ints
    shift: int


def multiplier_of(factor: Floats | float) -> Multiplier:
    """Return factors as 16-bit multipliers with one shift, that of the largest magnitude.

    Factors below 2^-48 keep the largest shift: they take any accumulator to 0 either way. Raises
    ScaleError for factors that are not finite, or 2^15 and more.
    """
    factors = np.asarray(factor, np.float64)
    largest = float(np.max(np.abs(factors), initial=0.0))
    if not largest < 1 << MULTIPLIER_BITS:
        raise ScaleError(
            f"a factor of {largest:g} is not below 2^{MULTIPLIER_BITS}, the limit of a 16-bit "
            "multiplier; calibrate again"
        )
    exponent = int(np.frexp(largest)[1])  # largest = m 2^exponent, 1/2 <= m < 1
    shift = min(MULTIPLIER_BITS - exponent, LARGEST_SHIFT)
    scale = np.asarray(np.trunc(np.ldexp(factors, shift)), np.int64)
    return Multiplier(scale, shift)


def bias_integers(bias: Floats, step: Floats | float) -> Ints:
    """Return real biases in units of `step` (Si Sw), rounded half up: b32."""
    return np.floor(np.asarray(bias, np.float64) / step + 0.5).astype(np.int64)


def bias_operand(bias: Ints) -> Bias:
    """Return 32-bit biases as 16 bits and one left shift; the low bits of large ones are lost."""
    largest = int(np.max(np.abs(bias), initial=0))
    ceil_log2 = max(largest - 1, 0).bit_length()
    shift = max(0, ceil_log2 + 1 - 16)
    if int(np.max(bias, initial=0)) >> shift > 32767:
        shift += 1
    return Bias(np.asarray(bias, np.int64) >> shift, shift)
