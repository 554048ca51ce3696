"""Q/DQ graphs -> real numbers stored as INT8.

Quantization here is symmetric with one float32 scale s: real numbers -128 s, ..., 127 s. In ONNX
that is INT8 with the zero point 0 or UINT8 with 128. With the operators that this module adds,

    RoundInt8(x)   = q s,  q = clip(rte(fl(x fl(1/s))), -128, 127)
    ToIntegers(x)  = q + zero point            FromIntegers(i) = fl((i - zero point) s)

where rte rounds to the nearest integer, halves to even, and fl to float32, a pair becomes

    QuantizeLinear(x) = ToIntegers(RoundInt8(x))      DequantizeLinear(i) = FromIntegers(i)

and FromIntegers(ToIntegers(x)) of one scale is x, so nothing but RoundInt8 is left inside a
segment. All other operators go on computing with real numbers. A quantized tensor is stored as q,
and its view carries s: reading it costs a factor. ONNX divides by s where RoundInt8 multiplies by
fl(1/s); where x / s is next to a half, q may differ by one.

RoundInt8 moves up through operators that only move numbers, to the kernel that computes them, and
down through a rectifier, as rounding is monotone and keeps 0. Of two of one scale the first is
enough.

Constants read through DequantizeLinear are real numbers, with their integers kept beside them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import IntegerConstant, Network, Operation, live
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph, apply_rules
from toolkit.gpu.passes.float8 import read_float8
from toolkit.gpu.passes.integer_operators import (
    add_dequantize,
    add_quantize,
    along,
    quantize_constant,
    without_integer_operators,
)

ROUND, TO_INTEGERS, FROM_INTEGERS = "RoundInt8", "ToIntegers", "FromIntegers"
SYMMETRIC_ZERO: Mapping[str, int] = {"int8": 0, "uint8": 128}
# Operators that make their result of the numbers of their first operand (Concat: of all).
_MOVES = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice"}
    | {"SpaceToDepth", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
_COPIES = frozenset({"Concat", "Resize"})  # moves whose kernels can requantize


class _QuantParams(NamedTuple):
    """Symmetric quantization parameters: `scale` is a float32, `zero_point` 0 or 128."""

    scale: float
    zero_point: int


def read_quantized(network: Network) -> Network:
    """Return the network without operators on integers, QuantizeLinear and DequantizeLinear.

    Raises NotCoveredError: blocks with scales of their own that are not constant.
    """
    network = read_float8(without_integer_operators(network))
    if not any(op.kind in ("QuantizeLinear", "DequantizeLinear") for op in network.operations):
        return network
    current = _lower_qdq(network)
    while True:
        simpler = _rounded_early(_rounded_once(apply_rules(live(current), _RECTIFIED_FIRST)))
        if simpler.operations == current.operations:
            return current
        current = simpler


def _lower_qdq(network: Network) -> Network:
    """Lower Q and DQ to the operators of this module, or to general arithmetic."""
    builder = NetworkBuilder(network)
    real: dict[tuple[str, _QuantParams], str] = {}  # (integers, parameters) -> real numbers
    same: dict[str, str] = {}
    for old in network.operations:
        op = replace(old, inputs=tuple(same.get(name, name) for name in old.inputs))
        source, output = op.input(0), op.outputs[0]
        if op.kind == "DequantizeLinear" and source in builder.constants:
            _add_constant(builder, op)
        elif op.kind == "QuantizeLinear" and source in builder.constants:
            quantize_constant(builder, op)
        elif op.kind == "DequantizeLinear":
            params = _quant_params(builder, op, builder.dtypes[source])
            if params is None:
                add_dequantize(builder, op)
                continue
            if (source, params) not in real:
                real[source, params] = _add_real(builder, op, FROM_INTEGERS, params)
            if output in network.outputs:
                builder.add(op, "Identity", (real[source, params],), output)
            else:
                same[output] = real[source, params]
        elif op.kind == "QuantizeLinear":
            params = _quant_params(builder, op, builder.dtypes[output])
            if params is None:
                add_quantize(builder, op)
                continue
            real[output, params] = _add_real(builder, op, ROUND, params)
            builder.add(op, TO_INTEGERS, (real[output, params],), output, params._asdict())
        else:
            builder.operations.append(op)
    return builder.network()


def _add_real(builder: NetworkBuilder, op: Operation, kind: str, params: _QuantParams) -> str:
    shape, attributes = builder.shapes[op.inputs[0]], params._asdict()
    return builder.add_new(
        op, kind, op.inputs[:1], shape, "float32", attributes=attributes, scale=params.scale
    )


def _add_constant(builder: NetworkBuilder, op: Operation) -> None:
    """Dequantize a constant, and keep its integers where its zero points are 0."""
    stored, output = builder.constants[op.inputs[0]], op.outputs[0]
    scale = along(builder, op, op.inputs[1], stored.shape)
    zero = along(builder, op, op.input(2), stored.shape)
    zero = zero.astype(np.float32)
    real = (stored.astype(np.float32) - zero) * scale.astype(np.float32)
    builder.to_constant(output, real.astype(builder.constants[op.inputs[1]].dtype))
    if not zero.any() and max(scale.shape, default=1) == scale.size:
        axis = int(np.argmax(scale.shape)) if scale.size > 1 else None
        values = scale.astype(np.float32).reshape(-1)
        builder.integers[output] = IntegerConstant(stored, values, axis)


def _quant_params(builder: NetworkBuilder, op: Operation, dtype: str) -> _QuantParams | None:
    """Return the parameters of a Q or DQ if they are constant and symmetric, with one scale."""
    if any(name and name not in builder.constants for name in op.inputs[1:]):
        return None
    scale = builder.constants[op.inputs[1]]
    zero = builder.constants[op.inputs[2]] if op.input(2) else np.zeros((), dtype)
    if scale.size != 1 or zero.size != 1 or dtype not in SYMMETRIC_ZERO:
        return None
    value, zero_point = np.float32(scale.reshape(())), int(zero.reshape(()))
    with np.errstate(all="ignore"):
        usable = value > 0 and np.isfinite(np.float32(1) / value)
    if not usable or zero_point != SYMMETRIC_ZERO[dtype]:
        return None
    return _QuantParams(float(value), zero_point)


def rectified_first(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Relu(RoundInt8(x)) -> RoundInt8(Relu(x)), where nothing else reads the operand."""
    rounding = graph.sole_producer(op.inputs[0], ROUND)
    if rounding is None:
        return None
    output = op.outputs[0]
    shape, dtype = rewriter.shapes[output], rewriter.dtypes[output]
    rectified = rewriter.add_new(op, "Relu", rounding.inputs, shape, dtype)
    rewriter.add(rounding, ROUND, (rectified,), output, rounding.attributes)
    rewriter.scales[output] = rounding.number("scale", 1.0)
    return rewriter.replacement(rounding)


_RECTIFIED_FIRST = (Rule("Relu", rectified_first),)


def _rounded_once(network: Network) -> Network:
    """Drop a RoundInt8 of what has that scale already, or is rounded to it elsewhere."""
    builder = NetworkBuilder(network)
    same: dict[str, str] = {}
    rounded: dict[tuple[str, float], str] = {}
    for old in network.operations:
        op = replace(old, inputs=tuple(same.get(name, name) for name in old.inputs))
        if op.kind != ROUND or op.outputs[0] in network.outputs:
            builder.operations.append(op)
            continue
        source, scale = op.inputs[0], op.number("scale", 0.0)
        if builder.scales.get(source) == scale:
            same[op.outputs[0]] = source
        elif (source, scale) in rounded:
            same[op.outputs[0]] = rounded[source, scale]
        else:
            rounded[source, scale] = op.outputs[0]
            builder.operations.append(op)
    return builder.network()


def _rounded_early(network: Network) -> Network:
    """RoundInt8(move(x, ...)) -> move(RoundInt8(x), ...), where nothing else reads the move."""
    builder, readers = NetworkBuilder(network), _reader_counts(network)
    producers = {name: op for op in network.operations for name in op.outputs}
    rounds: dict[str, Operation] = {}  # result of a move -> the RoundInt8 after it
    for op in network.operations:
        move = producers.get(op.inputs[0]) if op.kind == ROUND else None
        if move is None or not _only_moves(network, move) or readers[op.inputs[0]] != 1:
            continue
        # Copies that requantize round to the scale of the result: it must stay.
        requantizes = move.kind in _COPIES and op.inputs[0] in network.scales
        if requantizes and network.scales[op.inputs[0]] != op.number("scale", 0.0):
            continue
        if not any(name in network.constants for name in _moved(move)):
            rounds[op.inputs[0]] = op
    dropped = {op.outputs[0] for op in rounds.values()}
    quantized: dict[tuple[str, float], str] = {}
    for op in network.operations:
        if op.outputs[0] in dropped:
            continue
        after = rounds.get(op.outputs[0])
        if after is None:
            builder.operations.append(op)
            continue
        scale = after.number("scale", 0.0)
        for name in _moved(op):
            # What others read with another scale is requantized as it is copied.
            copied = op.kind in _COPIES and name in builder.scales and readers[name] > 1
            if not copied and (name, scale) not in quantized:
                quantized[name, scale] = _quantized_to(builder, after, name, scale)
        moved = [quantized.get((name, scale), name) for name in op.inputs]
        builder.operations.append(replace(op, inputs=tuple(moved), outputs=after.outputs))
    return builder.network()


def _quantized_to(builder: NetworkBuilder, after: Operation, name: str, scale: float) -> str:
    """Return the tensor rounded to a scale: itself, where it has that scale."""
    if builder.scales.get(name) == scale:
        return name
    shape, attributes = builder.shapes[name], after.attributes
    return builder.add_new(
        after, ROUND, (name,), shape, "float32", attributes=attributes, scale=scale
    )


def _only_moves(network: Network, op: Operation) -> bool:
    """Whether the result holds numbers of the operands, zeros, and no others."""
    if op.kind == "Pad":
        fill = network.constants.get(op.input(2))
        zero = not fill.any() if fill is not None else not op.input(2)
        return zero and op.number("value", 0.0) == 0
    nearest = op.kind == "Resize" and op.text("mode", "nearest") == "nearest"
    beyond = op.number("extrapolation_value", 0.0)  # 0 has any scale
    return op.kind in _MOVES or (nearest and beyond == 0)


def _moved(op: Operation) -> tuple[str, ...]:
    """The operands whose numbers are moved."""
    return op.inputs if op.kind == "Concat" else op.inputs[:1]


def _reader_counts(network: Network) -> Counter[str]:
    """How many operands each tensor is; that it leaves the segment counts as one."""
    read = (name for op in network.operations for name in op.inputs)
    return Counter([*read, *network.outputs])
