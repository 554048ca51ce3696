"""The DLA's converters: a subtraction, a 16-bit multiplication, one rounding shift, saturation.

    input   y = sat8 (sat17(rha((x - offset16) scale16, shift6)))   cmod/hls/cdma_libs/cdma_cvt
    operand y = sat32(      rha((x - offset32) scale16, shift6))    cmod/hls/sdp/sdp_y_cvt.cpp
    output  y = sat8 (sat17(rha((x - offset32) scale16, shift6)))   cmod/hls/sdp/sdp_c.cpp;
            sat16 in the last place for INT16 out                   vmod NV_NVDLA_SDP_HLS_C_int.v

A convolution in INT16 reads sat16 instead of sat8. Each rounds once. In int64 all is exact: x and
an offset have at most 32 bits, their difference 33, the product 33 + 15 = 48.
"""

from dataclasses import dataclass

from device.dla_emulator.arithmetic import checks, rounding
from device.dla_emulator.arithmetic.rounding import IntLike, Ints


@dataclass(frozen=True, slots=True)
class Converter:
    """The registers of a converter: offset (16 or 32 bits), scale (16 bits), right shift 0..63."""

    offset: IntLike
    scale: IntLike
    shift: IntLike

    def __post_init__(self) -> None:
        """Raise DlaError for what the registers cannot hold."""
        checks.signed("the offset of a converter", self.offset, 32)
        checks.signed("the scale of a converter", self.scale, 16)
        checks.within("the shift of a converter", self.shift, 0, 63)


def convert_input(x: IntLike, registers: Converter) -> Ints:
    """Return pixels or INT8 of at most 16 bits as the INT8 that a convolution reads (CDMA)."""
    number = checks.signed("an input", x, 17)  # pixels may be unsigned
    return rounding.saturate(rounding.saturate(_scaled(number, registers), 17), 8)


def convert_operand(x: IntLike, registers: Converter) -> Ints:
    """Return an operand of 16 bits as the 32 bits that stage Y takes."""
    number = checks.signed("an operand of stage Y", x, 16)
    return rounding.saturate(_scaled(number, registers), 32)


def convert_output(x: IntLike, registers: Converter) -> Ints:
    """Return 32 bits of the last output stage as INT8, down to -128."""
    number = checks.signed("a result of the output stages", x, 32)
    return rounding.saturate(rounding.saturate(_scaled(number, registers), 17), 8)


def convert_output_int16(x: IntLike, registers: Converter) -> Ints:
    """Return 32 bits of the last output stage as INT16."""
    number = checks.signed("a result of the output stages", x, 32)
    return rounding.saturate(rounding.saturate(_scaled(number, registers), 17), 16)


def _scaled(x: IntLike, registers: Converter) -> Ints:
    return rounding.shift_right((x - registers.offset) * registers.scale, registers.shift)
