"""The accumulator behind the multipliers (CACC): 34 bits that saturate at every addition.

    add      a' = sat34(a + p)      p: 22-bit sum of up to 64 products of INT8
             a' = sat48(a + p)      p: 38-bit sum of up to 64 products of INT16
    deliver  y  = sat32(rha(floor(a 2^16 / 2^clip), 16))

Up to clip 16 deliver is sat32(rha(a, clip)). Beyond it the hardware keeps 16 bits of the fraction
and drops those below, so that it no longer sees that a negative number lies just above a half: such
a number rounds away from zero. The open compiler always sets clip 0.

Source: nvdla/hw nvdlav1 vmod/nvdla/cacc/NV_NVDLA_CACC_CALC_int8.v, simulated (the C model keeps 48
bits instead of 34), and NV_NVDLA_CACC_CALC_int16.v, read. Order of the additions, from the outer
loop to the inner: blocks of 64 channels, kernel rows, kernel columns (nvdlav1
vmod/nvdla/csc/NV_NVDLA_CSC_sg.v).
"""

import numpy as np

from device.dla_emulator.arithmetic import checks, rounding
from device.dla_emulator.arithmetic.rounding import IntLike, Ints

ACCUMULATOR_BITS = 34
ACCUMULATOR_BITS_INT16 = 48
DELIVERED_BITS = 32
BLOCK_CHANNELS = 64  # input channels of one partial sum: the depth of a multiplier cell
_FRACTION_BITS = 16


def add(accumulator: IntLike, partial_sum: IntLike, bits: int = ACCUMULATOR_BITS) -> Ints:
    """Return the running sum after one more partial sum; both exact in int64."""
    return rounding.saturate(np.add(accumulator, partial_sum, dtype=np.int64), bits)


def deliver(accumulator: IntLike, clip: IntLike = 0) -> Ints:
    """Return the 32 bits that leave the accumulator; `clip` is the register's shift, 0..31.

    48 + 16 bits before the shift at most: exact in int64. Raises DlaError: more than 48 bits, or
    no such shift.
    """
    checks.signed("an accumulator", accumulator, ACCUMULATOR_BITS_INT16)
    checks.within("the shift behind the accumulator", clip, 0, 31)
    clipped = (np.asarray(accumulator, np.int64) << _FRACTION_BITS) >> np.asarray(clip, np.int64)
    return rounding.saturate(rounding.shift_right(clipped, _FRACTION_BITS), DELIVERED_BITS)
