"""Bytes of tensors and kernels at the precision of an engine."""

from device.engine.manifest import Precision
from toolkit.graph.node_view import TensorView
from toolkit.partition.costs.fusion import FusedKernel

WIDTH: dict[Precision, int] = {"fp32": 4, "fp16": 2, "int8": 1}
DTYPE_BYTES = {"int64": 8, "float64": 8, "uint64": 8, "int32": 4, "uint32": 4, "int16": 2}


def tensor_bytes(tensor: TensorView, precision: Precision) -> int | None:
    """Return the bytes of a tensor at the precision of the engine, None if unknown."""
    if tensor.elements is None:
        return None
    width = WIDTH[precision] if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 1)
    return tensor.elements * width


def moved_bytes(kernel: FusedKernel, precision: Precision) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, with weights.

    A Concat copies only the inputs that cannot be written in place. Unknown shapes count 0.
    """
    if kernel.kind == "free":
        return 0, 0

    def total(tensors: tuple[TensorView, ...]) -> int:
        return sum(tensor_bytes(tensor, precision) or 0 for tensor in tensors)

    read = total(kernel.reads)
    if kernel.kind == "copy":
        return read, read
    return read + total(kernel.constants), total(kernel.writes)
