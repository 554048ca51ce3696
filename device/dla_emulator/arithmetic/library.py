"""The arithmetic as a library: `from device.dla_emulator.arithmetic import library as dla`."""

from device.dla_emulator.arithmetic.convert import (
    Converter,
    convert_input,
    convert_operand,
    convert_output,
    convert_output_int16,
)
from device.dla_emulator.arithmetic.convolution import (
    Geometry,
    convolve_whole,
    deconvolve,
    make_kernel,
)
from device.dla_emulator.arithmetic.layers import Activation, Sums, finish, make_path, tables_of
from device.dla_emulator.arithmetic.lookup import (
    Addressing,
    Priority,
    Slope,
    Table,
    Tables,
    run_lookup,
)
from device.dla_emulator.arithmetic.normalization import (
    Lrn,
    Normalization,
    lrn_registers,
    normalize,
)
from device.dla_emulator.arithmetic.output_stages import StageX, StageY, run_x, run_y
from device.dla_emulator.arithmetic.pooling import Window, average, extreme
from device.dla_emulator.arithmetic.rounding import half_away, saturate, shift_right
from device.dla_emulator.arithmetic.scales import (
    Bias,
    Multiplier,
    bias_integers,
    bias_operand,
    multiplier_of,
)
from device.errors import DlaError

__all__ = [
    "Activation",
    "Addressing",
    "Bias",
    "Converter",
    "DlaError",
    "Geometry",
    "Lrn",
    "Multiplier",
    "Normalization",
    "Priority",
    "Slope",
    "StageX",
    "StageY",
    "Sums",
    "Table",
    "Tables",
    "Window",
    "average",
    "bias_integers",
    "bias_operand",
    "convert_input",
    "convert_operand",
    "convert_output",
    "convert_output_int16",
    "convolve_whole",
    "deconvolve",
    "extreme",
    "finish",
    "half_away",
    "lrn_registers",
    "make_kernel",
    "make_path",
    "multiplier_of",
    "normalize",
    "run_lookup",
    "run_x",
    "run_y",
    "saturate",
    "shift_right",
    "tables_of",
]
