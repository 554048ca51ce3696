"""How the DLA's arithmetic is emulated."""

from dataclasses import dataclass
from typing import Literal

from device.dla_emulator.arithmetic.layers import Arithmetic

Mode = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True)
class Emulation:
    """How to emulate.

    Mode `exact` computes in integers, through every stage that can change a number; `fast` takes
    one step in float64 wherever that is proven to give the same. Arithmetic `hardware` has scales
    of 16 bits and a shift, `ideal` exact ones.
    """

    mode: Mode = "fast"
    arithmetic: Arithmetic = "hardware"
