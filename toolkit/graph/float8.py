"""FP8 (E4M3): its numbers, and which products kernels multiply in it."""

FLOAT8 = "float8_e4m3fn"
LARGEST_FLOAT8 = 448.0
FIRST_SM_WITH_FLOAT8 = 89  # tensor cores multiply E4M3 (PTX ISA, mma and wgmma)
FIRST_OPSET_WITH_FLOAT8 = 19
MIN_CHANNELS = 16  # of a convolution: its operands are loaded in vectors of 16 bytes
