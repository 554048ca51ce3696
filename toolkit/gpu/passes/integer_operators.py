"""Operators on integers -> the operators on real numbers that ONNX defines them by.

    QLinearConv, QLinearMatMul   = QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...))
    ConvInteger, MatMulInteger   = Cast(f(Cast(x) - zero point, Cast(w) - zero point))
    QuantizeLinear(x)            = Cast(Clip(Round(x / scale) + zero point, least, largest))
    DequantizeLinear(i)          = (Cast(i) - zero point) * scale

Sums of float32 are exact up to 2**24: 260 products of UINT8, or 1040 of INT8, and more
of usual ones. Scale and zero point are single numbers, one for each index along an axis, or one for
each block of indices along it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Array, Network, Operation, Shape

_FLOAT, _INT32 = int(onnx.TensorProto.FLOAT), int(onnx.TensorProto.INT32)


def without_integer_operators(network: Network) -> Network:
    """Return the network with what this module's table expands."""
    if not any(op.kind in _EXPANSIONS for op in network.operations):
        return network
    builder = NetworkBuilder(network)
    for op in network.operations:
        if op.kind in _EXPANSIONS:
            _in_floats(builder, op)
        else:
            builder.operations.append(op)
    return builder.network()


def _in_floats(builder: NetworkBuilder, op: Operation) -> None:
    """Add the operation on real numbers, with Q/DQ or with casts around it."""
    row = _EXPANSIONS[op.kind]
    if row.casts:
        operands = [_from_zero(builder, op, at, axis) for at, axis in enumerate(row.axes)]
    else:
        pairs = (op.inputs[:3], op.inputs[3:6])
        operands = [
            _dequantized(builder, op, operand, axis)
            for operand, axis in zip(pairs, row.axes, strict=True)
        ]
    if op.kind == "QLinearConv" and op.input(8):
        scale = _product(builder, op, op.inputs[1], op.inputs[4])
        operands.append(_dequantized(builder, op, (op.inputs[8], scale, ""), 0))
    shape, output = builder.shapes[op.outputs[0]], op.outputs[0]
    real = builder.add_new(op, row.kind, operands, shape, "float32", attributes=op.attributes)
    if row.casts:
        builder.add(op, "Cast", (real,), output, {"to": _INT32})
    else:
        builder.add(op, "QuantizeLinear", (real, *op.inputs[6:8]), output)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """The operator on real numbers, and the dimension of each operand that has its own scales."""

    kind: str
    axes: tuple[int, int]
    casts: bool = False


_EXPANSIONS: Mapping[str, _Expansion] = {
    "QLinearConv": _Expansion("Conv", (1, 0)),
    "QLinearMatMul": _Expansion("MatMul", (-2, -1)),
    "ConvInteger": _Expansion("Conv", (1, 0), casts=True),
    "MatMulInteger": _Expansion("MatMul", (-2, -1), casts=True),
}


def _dequantized(
    builder: NetworkBuilder, op: Operation, operand: tuple[str, ...], axis: int
) -> str:
    """Dequantize an operand (integers, scale, zero point or "")."""
    shape = builder.shape_of(operand[0])
    along = {"axis": axis % len(shape)}
    return builder.add_new(op, "DequantizeLinear", operand, shape, "float32", attributes=along)


def _product(builder: NetworkBuilder, op: Operation, scale: str, scales: str) -> str:
    """The product of two scales, of which the left is one number."""
    if scale in builder.constants and scales in builder.constants:
        values = builder.constants[scale].reshape(()) * builder.constants[scales]
        return builder.constant(f"{scale} * {scales}", np.asarray(values))
    shape = builder.shape_of(scales) or builder.shape_of(scale)
    return builder.add_new(op, "Mul", (scale, scales), shape, "float32")


def _from_zero(builder: NetworkBuilder, op: Operation, at: int, axis: int) -> str:
    """Return an operand of integers as real numbers, without its zero point."""
    name, zero, shape = op.inputs[at], op.input(2 + at), builder.shape_of(op.inputs[at])
    if not zero:
        return builder.add_new(op, "Cast", (name,), shape, "float32", attributes={"to": _FLOAT})
    unit_scale = builder.constant(f"{name} (one)", np.ones((), np.float32))
    return _dequantized(builder, op, (name, unit_scale, zero), axis)


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
    scale_shape, axis = builder.shapes[name], op.integer("axis", 1) % max(len(shape), 1)
    if builder.dtypes[name] != "float32":
        name = builder.add_new(
            op, "Cast", (name,), scale_shape, "float32", attributes={"to": _FLOAT}
        )
    if len(scale_shape) == 0 or scale_shape == (1,):
        return name
    along_axis = tuple(scale_shape[0] if at == axis else 1 for at in range(len(shape)))
    sizes = builder.constant(f"{name} (shape)", np.array(along_axis, np.int64))
    return builder.add_new(op, "Reshape", (name, sizes), along_axis, "float32")
