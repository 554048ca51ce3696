"""The DLA's integer arithmetic in software, stage by stage, on numpy arrays alone.

In the order of the data:

    convert         pixels to INT8 on the way in, 32 bits to INT8 or INT16 on the way out
    accumulator     34-bit (INT16: 48-bit) saturating sums of products, and what leaves them
    convolution     the products: exact through BLAS where no partial sum leaves its exact range
    output_stages   the per-channel stages X and the element-wise stage Y: add, multiply, rectify
    lookup          two tables with interpolation: sigmoid, tanh and normalization
    pooling         maximum, minimum and the average that rounds twice
    normalization   LRN: sums of squares across channels, looked up
    scales          real factors as a 16-bit multiplier and a shift
    layers          whole layers, as a compiler sets the stages up

`rounding` holds the one rule of rounding that all of them share, `checks` what they refuse. As a
library, `from device import dla`: the names below, shown in examples/dla_arithmetic.py. Registers
are frozen dataclasses that raise DlaError for what the hardware's cannot hold.

The rules are those of the open NVDLA, the ancestor of Xavier's DLA (hardware sources:
github.com/nvdla/hw, branches nvdlav1 and master; compiler: github.com/nvdla/sw). Silicon of Xavier
and Orin may differ: see docs/EMULATOR.md.
"""

from device.dla.convert import (
    Converter,
    convert_input,
    convert_operand,
    convert_output,
    convert_output_int16,
)
from device.dla.convolution import Geometry, convolve_whole, deconvolve, make_kernel
from device.dla.layers import Activation, Sums, finish, make_path, tables_of
from device.dla.lookup import Addressing, Priority, Slope, Table, Tables, run_lookup
from device.dla.normalization import Lrn, Normalization, lrn_registers, normalize
from device.dla.output_stages import StageX, StageY, run_x, run_y
from device.dla.pooling import Window, average, extreme
from device.dla.rounding import half_away, saturate, shift_right
from device.dla.scales import Bias, Multiplier, bias_integers, bias_operand, multiplier_of
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
