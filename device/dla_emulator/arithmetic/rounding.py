"""The DLA's rounding and saturation, for integers and for the exact floating-point route.

    rha(v, s) = sign(v) floor(|v| / 2^s + 1/2)        half away from zero
    sat_n(v)  = min(max(v, -2^(n-1)), 2^(n-1) - 1)    no symmetric -127

Source: ac_fixed with AC_RND_INF and AC_SAT in nvdla/hw cmod/hls/include (nvdla_common.h,
nvdla_int.h: IntShiftRight), and vmod/vlibs/NV_NVDLA_HLS_shiftrightsu.v: a floor shift plus the
guard bit where the number is positive or a bit below the guard is set. hw/v1/ias/precision.rst says
the same in words. Callers take these functions through the module, so that tests can put wrong
roundings in their place.
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
IntLike = Ints | int


def shift_right(value: IntLike, shift: IntLike) -> Ints:
    """Return rha(value, shift) of int64 numbers, exact for |value| <= 2^62 and any shift >= 0.

    For s >= 1, rha(v, s) = (((v - [v < 0]) >> (s - 1)) + 1) >> 1 with floor shifts: v >= 0 adds the
    half and drops the rest; v < 0 does so one below, so that an exact half falls to the far side.
    No term exceeds |v| + 1. From shift 64 on the result is 0.
    """
    number = np.asarray(value, np.int64)
    places = np.asarray(shift, np.int64)
    below = number + (number >> 63)
    rounded = ((below >> (np.clip(places, 1, 64) - 1)) + 1) >> 1
    result: Ints = np.where(places == 0, number, rounded)
    return result


def half_away(value: Floats) -> Floats:
    """Return float64 numbers rounded to whole ones, halves away from zero.

    Exact for any float64 of which value + 1/2 is one too: all multiples of 2^-52 below 1, and
    generally where the last bit of `value` is worth no less than one of `value + 1/2`.
    """
    result: Floats = np.trunc(value + np.copysign(0.5, value))
    return result


def saturate(value: IntLike, bits: int) -> Ints:
    """Return sat_bits(value): clamped to what `bits` bits hold in two's complement."""
    top = 1 << (bits - 1)
    result: Ints = np.clip(np.asarray(value, np.int64), -top, top - 1)
    return result
