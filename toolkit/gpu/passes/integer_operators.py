"""Operators on integers -> the operators on real numbers that ONNX defines them by, with Q/DQ.

    QLinearConv, QLinearMatMul   = QuantizeLinear(f(DequantizeLinear(x), DequantizeLinear(w), ...))
    ConvInteger, MatMulInteger   = Cast(f(Cast(x) - zero point, Cast(w) - zero point))

Sums of float32 are exact up to 2**24: 260 products of UINT8, or 1040 of INT8, and more
of usual ones.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from toolkit.gpu.ir.network import Network, Operation, Shape
from toolkit.gpu.ir.rewriting import Rewriting

_FLOAT, _INT32 = int(onnx.TensorProto.FLOAT), int(onnx.TensorProto.INT32)


def without_integer_operators(network: Network) -> Network:
    """Return the network with what this module's table expands."""
    if not any(op.kind in _EXPANSIONS for op in network.operations):
        return network
    made = Rewriting(network)
    for op in network.operations:
        expand = _EXPANSIONS.get(op.kind)
        if expand is None:
            made.operations.append(op)
        else:
            expand(made, op)
    return made.network()


def _qlinear_conv(made: Rewriting, op: Operation) -> None:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = op.inputs[:8]
    operands = [
        _dequantized(made, op, (x, x_scale, x_zero), 1),
        _dequantized(made, op, (w, w_scale, w_zero), 0),
    ]
    if op.input(8):
        scale = _product(made, op, x_scale, w_scale)
        operands.append(_dequantized(made, op, (op.inputs[8], scale, ""), 0))
    output = op.outputs[0]
    real = made.tensor(f"{output} (unrounded)", made.shapes[output], "float32")
    made.add(op, "Conv", operands, real, op.attributes)
    made.add(op, "QuantizeLinear", (real, y_scale, y_zero), output)


def _qlinear_matmul(made: Rewriting, op: Operation) -> None:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = op.inputs[:8]
    output = op.outputs[0]
    operands = [
        _dequantized(made, op, (a, a_scale, a_zero), -2),
        _dequantized(made, op, (b, b_scale, b_zero), -1),
    ]
    real = made.tensor(f"{output} (unrounded)", made.shapes[output], "float32")
    made.add(op, "MatMul", operands, real)
    made.add(op, "QuantizeLinear", (real, y_scale, y_zero), output)


def _conv_integer(made: Rewriting, op: Operation) -> None:
    operands = (_from_zero(made, op, 0, 1), _from_zero(made, op, 1, 0))
    _whole(made, op, "Conv", operands)


def _matmul_integer(made: Rewriting, op: Operation) -> None:
    operands = (_from_zero(made, op, 0, -2), _from_zero(made, op, 1, -1))
    _whole(made, op, "MatMul", operands)


_EXPANSIONS: Mapping[str, Callable[[Rewriting, Operation], None]] = {
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
}


def _whole(made: Rewriting, op: Operation, kind: str, operands: tuple[str, ...]) -> None:
    output = op.outputs[0]
    real = made.tensor(f"{output} (real)", made.shapes[output], "float32")
    made.add(op, kind, operands, real, op.attributes)
    made.add(op, "Cast", (real,), output, {"to": _INT32})


def _dequantized(made: Rewriting, op: Operation, given: tuple[str, ...], axis: int) -> str:
    """Dequantize (integers, scale, zero point or "")."""
    shape = _shape(made, given[0])
    real = made.tensor(f"{given[0]} (dequantized)", shape, "float32")
    return made.add(op, "DequantizeLinear", given, real, {"axis": axis % len(shape)})


def _product(made: Rewriting, op: Operation, left: str, right: str) -> str:
    """The product of two scales, of which the left is one number."""
    if left in made.constants and right in made.constants:
        values = made.constants[left].reshape(()) * made.constants[right]
        return made.constant(f"{left} * {right}", np.asarray(values))
    shape = _shape(made, right) or _shape(made, left)
    return made.add(op, "Mul", (left, right), made.tensor(f"{left} * {right}", shape, "float32"))


def _from_zero(made: Rewriting, op: Operation, at: int, axis: int) -> str:
    """Return an operand of integers as real numbers, without its zero point."""
    name, zero, shape = op.inputs[at], op.input(2 + at), _shape(made, op.inputs[at])
    if not zero:
        real = made.tensor(f"{name} (real)", shape, "float32")
        return made.add(op, "Cast", (name,), real, {"to": _FLOAT})
    one = made.constant(f"{name} (one)", np.ones((), np.float32))
    return _dequantized(made, op, (name, one, zero), axis)


def _shape(made: Rewriting, name: str) -> Shape:
    return made.constants[name].shape if name in made.constants else made.shapes[name]
