"""Kernels between the GPU's tensors and the formats in which a DLA reads and writes them.

    chw16, chw32   [N, ceil(C / v), H, W, v], v = 32 bytes / element: 16 float16 or 32 int8

They are element-wise copies, which quantize and dequantize where the types differ. Channels beyond
C are not written: they stay 0 from the start.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from device.engine.manifest import TensorInfo
from device.engine.tensorrt_check import VECTOR_BYTES
from device.engine.tensorrt_manifest import Port
from toolkit.gpu.compile_segment import GpuSegment
from toolkit.gpu.emit.elementwise_launch import elementwise_launch
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.lower import KernelProgram, fit_program
from toolkit.gpu.segments import GpuBackend
from toolkit.gpu.target import GpuTarget

Direction = Literal["enter", "leave"]
PortCompiler = Callable[[str, Port, TensorInfo, Direction], GpuSegment]
"""Gets a name for the entries, a port, its tensor and the direction; returns the kernels."""


def compile_port(
    backend: GpuBackend, name: str, port: Port, tensor: TensorInfo, direction: Direction
) -> GpuSegment:
    """Compile the kernels of a port. Raises CompileError: one does not compile."""
    program = port_program(port, tensor, direction, backend.gpu)
    return backend.compiler(name, program, gpu=backend.gpu)


def port_program(port: Port, tensor: TensorInfo, end: Direction, gpu: GpuTarget) -> KernelProgram:
    """Return the copies of a tensor of fixed shape, in C order, into a port's format or back."""
    n, c, h, w = _four(tensor.shape)
    vector = VECTOR_BYTES // (1 if port.dtype == "int8" else 2)
    blocks, whole = -(-c // vector), c // vector
    name = port.tensor
    scale = tensor.scale if tensor.dtype == "int8" else None
    plain = View(name, tensor.dtype, (n, c, h, w), row_major((n, c, h, w)), scale=scale)
    shape = (n, blocks, h, w, vector)
    packed = View(f"{name} packed", port.dtype, shape, row_major(shape), scale=port.scale)
    ops: list[TunableOp] = []
    for first, (count, channels), channel_strides in (
        (0, (whole, vector), (vector, 1)),
        (whole, (1, c - whole * vector), (0, 1)),
    ):
        if 0 in (count, channels):
            continue
        shape, offset = (n, count, h, w, channels), first * vector * h * w
        outer, inner = (stride * h * w for stride in channel_strides)
        rows = replace(plain, shape=shape, strides=(c * h * w, outer, w, 1, inner), offset=offset)
        vectors = replace(packed, shape=shape, offset=offset)
        source, target = (rows, vectors) if end == "enter" else (vectors, rows)
        ops.append(TunableOp((), ((elementwise_launch(target, [source], (), gpu.sm_count),),)))
    source, target = (plain, packed) if end == "enter" else (packed, plain)
    sizes = {view.base: view.nbytes for view in (plain, packed)}
    return fit_program(ops, sizes, {name: source}, {name: target})


def _four(shape: tuple[object, ...]) -> Shape:
    """Return a shape with four dimensions, as the DLA has it: 1 for those that are missing."""
    n, c, h, w = (*(dim for dim in shape if isinstance(dim, int)), 1, 1, 1, 1)[:4]
    return n, c, h, w
