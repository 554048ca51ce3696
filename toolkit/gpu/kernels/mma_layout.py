"""The MMA layout of sm_90 for kernels of all GPUs; None without `toolkit.gpu.sm90`.

Kernels use these functions only with MMA_WARPS, which nothing but sm_90's schedules sets.
"""

from toolkit.gpu.generations import parts

_LAYOUT = next(parts("kernels.mma_layout"), None)

load_mma_residual = getattr(_LAYOUT, "load_mma_residual", None)
mma_columns = getattr(_LAYOUT, "mma_columns", None)
mma_rows = getattr(_LAYOUT, "mma_rows", None)
store_mma = getattr(_LAYOUT, "store_mma", None)
