"""General QuantizeLinear and DequantizeLinear, in the operators that ONNX defines them by.

    QuantizeLinear(x)   = Cast(Clip(Round(x / scale) + zero point, least, largest))
    DequantizeLinear(i) = (Cast(i) - zero point) * scale

Scale and zero point are single numbers, one for each index along an axis, or one for each block of
indices along it.
"""

import numpy as np
import onnx

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Array, Operation, Shape

_FLOAT = int(onnx.TensorProto.FLOAT)


def add_dequantize(builder: NetworkBuilder, op: Operation) -> None:
    """Add the operations of a DequantizeLinear."""
    source, output = op.inputs[0], op.outputs[0]
    shape = builder.shapes[source]
    real = builder.add_new(op, "Cast", (source,), shape, "float32", attributes={"to": _FLOAT})
    if op.input(2):
        zero = _broadcast(builder, op, op.inputs[2], shape)
        real = builder.add_new(op, "Sub", (real, zero), shape, "float32")
    scale = _broadcast(builder, op, op.inputs[1], shape)
    builder.add(op, "Mul", (real, scale), output)


def quantize_constant(builder: NetworkBuilder, op: Operation) -> None:
    """Fold a QuantizeLinear of a constant, as exporters leave weights."""
    values, limits = builder.constants[op.inputs[0]], np.iinfo(builder.dtypes[op.outputs[0]])
    scale = along(builder, op, op.inputs[1], values.shape)
    zero = along(builder, op, op.input(2), values.shape)
    whole = np.rint(values / scale) + zero.astype(np.float32)
    builder.to_constant(op.outputs[0], np.clip(whole, limits.min, limits.max).astype(limits.dtype))


def add_quantize(builder: NetworkBuilder, op: Operation) -> None:
    """Add the operations of a QuantizeLinear."""
    source, output = op.inputs[0], op.outputs[0]
    shape, limits = builder.shapes[source], np.iinfo(builder.dtypes[op.outputs[0]])
    scale = _broadcast(builder, op, op.inputs[1], shape)
    steps = builder.add_new(op, "Div", (source, scale), shape, "float32")
    real = builder.add_new(op, "Round", (steps,), shape, "float32")
    if op.input(2):
        zero = _broadcast(builder, op, op.inputs[2], shape)
        real = builder.add_new(op, "Add", (real, zero), shape, "float32")
    bounds = [
        builder.constant(f"{output} ({what})", np.array(value, np.float32))
        for what, value in (("least", limits.min), ("largest", limits.max))
    ]
    clipped = builder.add_new(op, "Clip", (real, *bounds), shape, "float32")
    target = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(builder.dtypes[output]))
    builder.add(op, "Cast", (clipped,), output, {"to": int(target)})


def along(builder: NetworkBuilder, op: Operation, name: str, shape: Shape) -> Array:
    """Return a constant scale or zero point ("": 0) so that it broadcasts to `shape`."""
    if not name:
        return np.zeros((), np.float32)
    if name not in builder.constants:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) reads a constant, but its scale or zero point {name!r} "
            "is none"
        )
    values = builder.constants[name]
    axis, block = op.integer("axis", 1), op.integer("block_size", 0)
    if values.size == 1:
        return values.reshape(())
    if block:
        return np.repeat(values, block, axis).take(np.arange(shape[axis]), axis)
    return values.reshape([-1 if at == axis % len(shape) else 1 for at in range(len(shape))])


def _broadcast(builder: NetworkBuilder, op: Operation, name: str, shape: Shape) -> str:
    """Return a float32 tensor or constant of a scale or a zero point that broadcasts to `shape`."""
    if name in builder.constants:
        values = along(builder, op, name, shape).astype(np.float32)
        return builder.constant(f"{name} (along {op.outputs[0]})", values)
    own, axis = builder.shapes[name], op.integer("axis", 1) % max(len(shape), 1)
    if builder.dtypes[name] != "float32":
        name = builder.add_new(op, "Cast", (name,), own, "float32", attributes={"to": _FLOAT})
    if len(own) == 0 or own == (1,):
        return name
    along_axis = tuple(own[0] if at == axis else 1 for at in range(len(shape)))
    sizes = builder.constant(f"{name} (shape)", np.array(along_axis, np.int64))
    return builder.add_new(op, "Reshape", (name, sizes), along_axis, "float32")
