"""BF16: the range of FP32 in 16 bits, with 8 significant ones; which GPUs compute it, and rounding.

Neither onnxruntime nor an engine's tensors have the type: models in BF16 are read as float32, which
holds their numbers, and kernels alone store BF16.
"""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BFLOAT16 = "bfloat16"
LARGEST_BFLOAT16 = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
FIRST_SM_WITH_BFLOAT16 = 80  # tensor cores multiply it (PTX ISA, mma)


def round_bfloat16(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return float32 rounded to the nearest BF16, ties to even; other types as they are."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(ml_dtypes.bfloat16).astype(np.float32)
