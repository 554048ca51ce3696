"""Tensor types: those that may enter, leave or cross a segment, and those of kernels alone."""

from collections.abc import Mapping

import onnx_ir as ir

# Those that NumPy has.
IO_DTYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT16: "float16",
    ir.DataType.FLOAT: "float32",
    ir.DataType.DOUBLE: "float64",
    ir.DataType.INT8: "int8",
    ir.DataType.INT16: "int16",
    ir.DataType.INT32: "int32",
    ir.DataType.INT64: "int64",
    ir.DataType.UINT8: "uint8",
    ir.DataType.UINT16: "uint16",
    ir.DataType.UINT32: "uint32",
    ir.DataType.UINT64: "uint64",
    ir.DataType.BOOL: "bool",
}

# FP8 (E4M3).
FLOAT8 = "float8_e4m3fn"
LARGEST_FLOAT8 = 448.0
FIRST_SM_WITH_FLOAT8 = 89  # tensor cores multiply E4M3 (PTX ISA, mma and wgmma)
FIRST_OPSET_WITH_FLOAT8 = 19
MIN_CHANNELS = 16  # of a convolution: its operands are loaded in vectors of 16 bytes

# BF16. Neither onnxruntime's CPU kernels nor the tensors of an engine have it: models in BF16 are
# read as float32, which holds their numbers (`toolkit.graph.widen`); GPU kernels alone store it.
BFLOAT16 = "bfloat16"
LARGEST_BFLOAT16 = 2.0**128 - 2.0**120
FIRST_SM_WITH_BFLOAT16 = 80  # tensor cores multiply it (PTX ISA, mma)
