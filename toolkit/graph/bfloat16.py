"""BF16: the range of FP32 in 16 bits, of which 8 are significant; which GPUs compute it.

Neither onnxruntime's CPU kernels nor the tensors of an engine have the type. So models in BF16 are
read as float32, which holds their numbers (`toolkit.graph.widen`), and GPU kernels alone store it.
"""

BFLOAT16 = "bfloat16"
LARGEST_BFLOAT16 = 2.0**128 - 2.0**120
FIRST_SM_WITH_BFLOAT16 = 80  # tensor cores multiply it (PTX ISA, mma)
