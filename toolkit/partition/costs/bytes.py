"""Sizes of tensors, and bytes of tensors and kernels at the precision of an engine."""

from device.engine.manifest import Dim, Precision
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


def moved_bytes(
    kernel: FusedKernel, precision: Precision, *, int4: bool = False
) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, with weights.

    `int4`: it reads weights of 4 bits as they are, else as floating point.

    A Concat copies only the inputs that cannot be written in place. Unknown shapes count 0.
    """
    if kernel.kind == "free":
        return 0, 0

    def total(tensors: tuple[TensorView, ...]) -> int:
        return sum(tensor_bytes(tensor, precision) or 0 for tensor in tensors)

    read = total(kernel.reads)
    if kernel.kind == "copy":
        return read, read
    packed = [c.packed_bytes if int4 else None for c in kernel.constants]
    plain = tuple(c for c, size in zip(kernel.constants, packed, strict=True) if size is None)
    return read + total(plain) + sum(size or 0 for size in packed), total(kernel.writes)


def known_shape(shape: tuple[Dim, ...] | None) -> tuple[int, ...] | None:
    """Return a shape with a dynamic leading dimension as 1, None if another is unknown."""
    if shape is None:
        return None
    sizes = [1 if i == 0 and not isinstance(dim, int) else dim for i, dim in enumerate(shape)]
    static = tuple(dim for dim in sizes if isinstance(dim, int))
    return static if len(static) == len(sizes) else None
