"""Operators on integers -> the operators on real numbers that ONNX defines them by, with Q/DQ.

    QLinearConv, QLinearMatMul   = QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...))
    ConvInteger, MatMulInteger   = Cast(f(Cast(x) - zero point, Cast(w) - zero point))

Sums of float32 are exact up to 2**24: 260 products of UINT8, or 1040 of INT8, and more
of usual ones.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Network, Operation, Shape

_FLOAT, _INT32 = int(onnx.TensorProto.FLOAT), int(onnx.TensorProto.INT32)


def without_integer_operators(network: Network) -> Network:
    """Return the network with what this module's table expands."""
    if not any(op.kind in _EXPANSIONS for op in network.operations):
        return network
    builder = NetworkBuilder(network)
    for op in network.operations:
        expand = _EXPANSIONS.get(op.kind)
        if expand is None:
            builder.operations.append(op)
        else:
            expand(builder, op)
    return builder.network()


def _qlinear_conv(builder: NetworkBuilder, op: Operation) -> None:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = op.inputs[:8]
    operands = [
        _dequantized(builder, op, (x, x_scale, x_zero), 1),
        _dequantized(builder, op, (w, w_scale, w_zero), 0),
    ]
    if op.input(8):
        scale = _product(builder, op, x_scale, w_scale)
        operands.append(_dequantized(builder, op, (op.inputs[8], scale, ""), 0))
    output = op.outputs[0]
    real = builder.tensor(f"{output} (unrounded)", builder.shapes[output], "float32")
    builder.add(op, "Conv", operands, real, op.attributes)
    builder.add(op, "QuantizeLinear", (real, y_scale, y_zero), output)


def _qlinear_matmul(builder: NetworkBuilder, op: Operation) -> None:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = op.inputs[:8]
    output = op.outputs[0]
    operands = [
        _dequantized(builder, op, (a, a_scale, a_zero), -2),
        _dequantized(builder, op, (b, b_scale, b_zero), -1),
    ]
    real = builder.tensor(f"{output} (unrounded)", builder.shapes[output], "float32")
    builder.add(op, "MatMul", operands, real)
    builder.add(op, "QuantizeLinear", (real, y_scale, y_zero), output)


def _conv_integer(builder: NetworkBuilder, op: Operation) -> None:
    operands = (_from_zero(builder, op, 0, 1), _from_zero(builder, op, 1, 0))
    _whole(builder, op, "Conv", operands)


def _matmul_integer(builder: NetworkBuilder, op: Operation) -> None:
    operands = (_from_zero(builder, op, 0, -2), _from_zero(builder, op, 1, -1))
    _whole(builder, op, "MatMul", operands)


_EXPANSIONS: Mapping[str, Callable[[NetworkBuilder, Operation], None]] = {
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
}


def _whole(builder: NetworkBuilder, op: Operation, kind: str, operands: tuple[str, ...]) -> None:
    output = op.outputs[0]
    real = builder.tensor(f"{output} (real)", builder.shapes[output], "float32")
    builder.add(op, kind, operands, real, op.attributes)
    builder.add(op, "Cast", (real,), output, {"to": _INT32})


def _dequantized(
    builder: NetworkBuilder, op: Operation, operand: tuple[str, ...], axis: int
) -> str:
    """Dequantize an operand (integers, scale, zero point or "")."""
    shape = _shape(builder, operand[0])
    real = builder.tensor(f"{operand[0]} (dequantized)", shape, "float32")
    return builder.add(op, "DequantizeLinear", operand, real, {"axis": axis % len(shape)})


def _product(builder: NetworkBuilder, op: Operation, left: str, right: str) -> str:
    """The product of two scales, of which the left is one number."""
    if left in builder.constants and right in builder.constants:
        values = builder.constants[left].reshape(()) * builder.constants[right]
        return builder.constant(f"{left} * {right}", np.asarray(values))
    shape = _shape(builder, right) or _shape(builder, left)
    return builder.add(
        op, "Mul", (left, right), builder.tensor(f"{left} * {right}", shape, "float32")
    )


def _from_zero(builder: NetworkBuilder, op: Operation, at: int, axis: int) -> str:
    """Return an operand of integers as real numbers, without its zero point."""
    name, zero, shape = op.inputs[at], op.input(2 + at), _shape(builder, op.inputs[at])
    if not zero:
        real = builder.tensor(f"{name} (real)", shape, "float32")
        return builder.add(op, "Cast", (name,), real, {"to": _FLOAT})
    unit_scale = builder.constant(f"{name} (one)", np.ones((), np.float32))
    return _dequantized(builder, op, (name, unit_scale, zero), axis)


def _shape(builder: NetworkBuilder, name: str) -> Shape:
    return builder.constants[name].shape if name in builder.constants else builder.shapes[name]
