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
from toolkit.gpu.compile import GpuSegment
from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.ir.network import Network
from toolkit.gpu.ir.view import Shape, View, row_major
from toolkit.gpu.lower import KernelProgram
from toolkit.gpu.schedule.workspace import fit_workspace
from toolkit.gpu.segments import GpuBackend
from toolkit.gpu.target import GpuTarget

Way = Literal["enter", "leave"]
PortCompiler = Callable[[str, Port, TensorInfo, Way], GpuSegment]
"""Gets a name for the entries, a port, its tensor and the way; returns the kernels."""

_NOTHING = Network((), (), (), {}, {}, {})


def compile_port(
    backend: GpuBackend, name: str, port: Port, tensor: TensorInfo, way: Way
) -> GpuSegment:
    """Compile the kernels of a port. Raises CompileError: one does not compile."""
    return backend.compiler(
        name,
        port_program(port, tensor, way, backend.gpu),
        gpu=backend.gpu,
        dims=(),
        tactics=None,
        on_progress=None,
    )


def port_program(port: Port, tensor: TensorInfo, way: Way, gpu: GpuTarget) -> KernelProgram:
    """Return the copies of a tensor of fixed shape, in C order, into a port's format or back."""
    ctx = LoweringContext(_NOTHING, gpu, "float16")
    n, c, h, w = _four(tensor.shape)
    vector = VECTOR_BYTES // (1 if port.dtype == "int8" else 2)
    blocks, whole = -(-c // vector), c // vector
    plain = ctx.allocate(port.tensor, tensor.dtype, (n, c, h, w), row_major((n, c, h, w)))
    packed_shape = (n, blocks, h, w, vector)
    packed = ctx.allocate(
        f"{port.tensor} packed", port.dtype, packed_shape, row_major(packed_shape)
    )
    plain = replace(plain, scale=tensor.scale if tensor.dtype == "int8" else None)
    packed = replace(packed, scale=port.scale)
    for first, shape, channel_strides in (
        (0, (n, whole, vector), (vector, 1)),
        (whole, (n, 1, c - whole * vector), (0, 1)),
    ):
        if 0 in shape:
            continue
        rows = replace(
            plain,
            shape=(*shape[:2], h, w, shape[2]),
            strides=(c * h * w, channel_strides[0] * h * w, w, 1, h * w),
            offset=first * vector * h * w,
        )
        vectors = replace(packed, shape=(*shape[:2], h, w, shape[2]), offset=first * vector * h * w)
        source, target = (rows, vectors) if way == "enter" else (vectors, rows)
        ctx.add_elementwise(target, [source], (), ())
    return _program(ctx, port.tensor, *((plain, packed) if way == "enter" else (packed, plain)))


def _program(ctx: LoweringContext, name: str, source: View, target: View) -> KernelProgram:
    plan = fit_workspace(ctx.ops, ctx.allocations, [source.base], [target.base])
    return KernelProgram(
        ops=plan.ops,
        sizes=dict(ctx.allocations),
        offsets=plan.offsets,
        workspace_bytes=plan.workspace_bytes,
        largest_live_bytes=plan.largest_live_bytes,
        weights=bytes(ctx.weights),
        inputs={name: source},
        outputs={name: target},
    )


def _four(shape: tuple[object, ...]) -> Shape:
    """Return a shape with four dimensions, as the DLA has it: 1 for those that are missing."""
    n, c, h, w = (*(dim for dim in shape if isinstance(dim, int)), 1, 1, 1, 1)[:4]
    return n, c, h, w
