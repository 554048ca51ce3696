"""How executors start the kernels of a GPU segment: the one place that says what a launch costs.

A CUDA graph is one launch for the whole segment; the kernels in it still take a share of an empty
one (`gpu.graph_share`). TensorRT's enqueue and an operator of ONNX Runtime launch every kernel.
"""

from collections.abc import Mapping
from typing import Literal

Launch = Literal["graph", "each"]  # one launch for all kernels, or one for each
ExecutorName = Literal["cuda", "tensorrt", "portable"]

# By the names in `device.runtime.executors.table`.
LAUNCH_OF: Mapping[ExecutorName, Launch] = {
    "cuda": "graph",  # `device/runtime/executors/cuda.py` captures a segment into one graph
    "tensorrt": "each",  # enqueueV3, as TensorRT's runtime and trtexec without --useCudaGraph do
    "portable": "each",
}
PLANNED: ExecutorName = "cuda"  # what an engine's GPU segments run with
