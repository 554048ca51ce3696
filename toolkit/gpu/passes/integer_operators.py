"""Operators on integers -> the operators on real numbers that ONNX defines them by, with Q/DQ.

    QLinearConv, QLinearMatMul   = QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...))
    ConvInteger, MatMulInteger   = Cast(f(Cast(x) - zero point, Cast(w) - zero point))

Sums of float32 are exact up to 2**24: 260 products of UINT8, or 1040 of INT8, and more
of usual ones.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Network, Operation

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
    real = _real(builder, op, "Conv", operands)
    builder.add(op, "QuantizeLinear", (real, y_scale, y_zero), op.outputs[0])


def _qlinear_matmul(builder: NetworkBuilder, op: Operation) -> None:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = op.inputs[:8]
    operands = [
        _dequantized(builder, op, (a, a_scale, a_zero), -2),
        _dequantized(builder, op, (b, b_scale, b_zero), -1),
    ]
    real = _real(builder, op, "MatMul", operands)
    builder.add(op, "QuantizeLinear", (real, y_scale, y_zero), op.outputs[0])


def _conv_integer(builder: NetworkBuilder, op: Operation) -> None:
    operands = (_from_zero(builder, op, 0, 1), _from_zero(builder, op, 1, 0))
    _whole(builder, op, _real(builder, op, "Conv", operands))


def _matmul_integer(builder: NetworkBuilder, op: Operation) -> None:
    operands = (_from_zero(builder, op, 0, -2), _from_zero(builder, op, 1, -1))
    _whole(builder, op, _real(builder, op, "MatMul", operands))


_EXPANSIONS: Mapping[str, Callable[[NetworkBuilder, Operation], None]] = {
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
}


def _real(builder: NetworkBuilder, op: Operation, kind: str, operands: Sequence[str]) -> str:
    """Add the operation on real numbers."""
    shape = builder.shapes[op.outputs[0]]
    return builder.add_new(op, kind, operands, shape, "float32", attributes=op.attributes)


def _whole(builder: NetworkBuilder, op: Operation, real: str) -> None:
    builder.add(op, "Cast", (real,), op.outputs[0], {"to": _INT32})


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
