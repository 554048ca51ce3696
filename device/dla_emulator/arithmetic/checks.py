"""What the stages refuse: arrays of another type or shape, and values that no register holds.

A register of n bits in two's complement holds -2^(n-1) to 2^(n-1) - 1. Numbers beyond it would be
cut off by the hardware and give plausible nonsense here, so that they are refused by name. Widths:
nvdla/hw spec/manual (NVDLA_SDP.rdl, NVDLA_PDP.rdl, NVDLA_CDP.rdl) and cmod/hls.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike, NDArray

from device.errors import DlaError


def signed(name: str, value: ArrayLike, bits: int) -> NDArray[np.int64]:
    """Return whole numbers as int64; raises DlaError: not whole, or not in so many bits."""
    top = 1 << (bits - 1)
    return within(name, value, -top, top - 1)


def within(name: str, value: ArrayLike, low: int, high: int) -> NDArray[np.int64]:
    """Return whole numbers of low..high as int64; raises DlaError naming the first that is not."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise DlaError(
            f"{name} has the type {array.dtype}, the DLA takes whole numbers; quantize it first"
        )
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        first = array[(array < low) | (array > high)].reshape(-1)[0] if array.ndim else array
        raise DlaError(
            f"{name} holds {int(first)}, the hardware {low} to {high}; scale it to that range"
        )
    return array.astype(np.int64)


def images(name: str, x: NDArray[np.generic], types: Collection[type[np.generic]]) -> None:
    """Raise DlaError unless x is (batch, channels, height, width) of one of the types."""
    if x.ndim != 4:
        raise DlaError(
            f"{name} has the shape {list(x.shape)}, the DLA takes (batch, channels, height, "
            "width); reshape it"
        )
    if x.dtype.type not in types:
        taken = " or ".join(sorted(np.dtype(one).name for one in types))
        raise DlaError(f"{name} holds {x.dtype}, this takes {taken}; quantize it first")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise DlaError unless a setting is one that the hardware has."""
    if value not in allowed:
        choices = ", ".join(map(str, allowed))
        raise DlaError(f"{name} is {value!r}, the hardware has {choices}; choose one of them")
