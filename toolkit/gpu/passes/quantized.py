"""Q/DQ graphs -> real numbers that lie in memory as INT8.

A grid has one scale s, a float32, and is symmetric: -128 s, ..., 127 s. In ONNX it is INT8 with the
zero point 0 or UINT8 with 128. With the operators that this module gives a network,

    RoundInt8(x)   = q s,  q = clip(rte(fl(x fl(1/s))), -128, 127)      the nearest of the grid
    ToIntegers(x)  = q + zero point            FromIntegers(i) = fl((i - zero point) s)

where rte rounds to the nearest integer, halves to even, and fl to float32, a pair becomes

    QuantizeLinear(x) = ToIntegers(RoundInt8(x))      DequantizeLinear(i) = FromIntegers(i)

and FromIntegers(ToIntegers(x)) of one grid is x, so nothing but RoundInt8 is left inside a segment.
All other operators go on computing with real numbers. What is on a grid is stored as q, and the
view that it lies in carries s: reading it costs a factor. ONNX divides by s where RoundInt8
multiplies by fl(1/s); where x / s is next to a half, q may differ by one.

RoundInt8 moves up through operators that only move numbers, to the kernel that makes them, and down
through a rectifier, as rounding is monotone and keeps 0. Of two on one grid the first is enough.

Constants read through DequantizeLinear are real numbers, with their integers kept beside them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.network import Attribute, IntegerConstant, Network, Operation
from toolkit.gpu.passes.integer_operators import without_integer_operators
from toolkit.gpu.passes.quantized_general import (
    add_dequantize,
    add_quantize,
    along,
    quantize_constant,
)

ROUND, TO_INTEGERS, FROM_INTEGERS = "RoundInt8", "ToIntegers", "FromIntegers"
SYMMETRIC_ZERO: Mapping[str, int] = {"int8": 0, "uint8": 128}
# Operators that make their result of the numbers of their first operand (Concat: of all).
_MOVES = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice"}
    | {"SpaceToDepth", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
)
_COPIES = frozenset({"Concat", "Resize"})  # moves whose kernels can change grids


@dataclass(frozen=True, slots=True)
class _Grid:
    """`scale` is a float32; `zero_point` as ONNX stores its integers."""

    scale: float
    zero_point: int


def read_quantized(network: Network) -> Network:
    """Return the network without operators on integers, QuantizeLinear and DequantizeLinear.

    Raises NotCoveredError: blocks with scales of their own that are not constant.
    """
    network = without_integer_operators(network)
    if not any(op.kind in ("QuantizeLinear", "DequantizeLinear") for op in network.operations):
        return network
    found = _on_grids(network)
    while True:
        simpler = _rounded_early(_rounded_once(_rectified_first(_live(found))))
        if simpler.operations == found.operations:
            return found
        found = simpler


def _on_grids(network: Network) -> Network:
    """Write Q and DQ as the operators of this module, or in general."""
    builder = NetworkBuilder(network)
    real: dict[tuple[str, _Grid], str] = {}  # integers on a grid -> the tensor of real numbers
    same: dict[str, str] = {}
    for old in network.operations:
        op = replace(old, inputs=tuple(same.get(name, name) for name in old.inputs))
        source, output = op.input(0), op.outputs[0]
        if op.kind == "DequantizeLinear" and source in builder.constants:
            _add_constant(builder, op)
        elif op.kind == "QuantizeLinear" and source in builder.constants:
            quantize_constant(builder, op)
        elif op.kind == "DequantizeLinear":
            grid = _grid(builder, op, builder.dtypes[source])
            if grid is None:
                add_dequantize(builder, op)
                continue
            if (source, grid) not in real:
                real[source, grid] = _add_real(builder, op, FROM_INTEGERS, output, grid)
            if output in network.outputs:
                builder.add(op, "Identity", (real[source, grid],), output)
            else:
                same[output] = real[source, grid]
        elif op.kind == "QuantizeLinear":
            grid = _grid(builder, op, builder.dtypes[output])
            if grid is None:
                add_quantize(builder, op)
                continue
            real[output, grid] = _add_real(builder, op, ROUND, output, grid)
            builder.add(op, TO_INTEGERS, (real[output, grid],), output, _attributes(grid))
        else:
            builder.operations.append(op)
    return builder.network()


def _add_real(builder: NetworkBuilder, op: Operation, kind: str, name: str, grid: _Grid) -> str:
    real = builder.tensor(f"{name} (real)", builder.shapes[op.inputs[0]], "float32", grid.scale)
    return builder.add(op, kind, op.inputs[:1], real, _attributes(grid))


def _attributes(grid: _Grid) -> dict[str, Attribute]:
    return {"scale": grid.scale, "zero_point": grid.zero_point}


def _add_constant(builder: NetworkBuilder, op: Operation) -> None:
    """Dequantize a constant, and keep its integers where its zero points are 0."""
    stored, output = builder.constants[op.inputs[0]], op.outputs[0]
    scale = along(builder, op, op.inputs[1], stored.shape)
    zero = along(builder, op, op.input(2), stored.shape)
    real = (stored.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    builder.to_constant(output, real.astype(builder.constants[op.inputs[1]].dtype))
    if not zero.any() and max(scale.shape, default=1) == scale.size:
        axis = int(np.argmax(scale.shape)) if scale.size > 1 else None
        values = scale.astype(np.float32).reshape(-1)
        builder.integers[output] = IntegerConstant(stored, values, axis)


def _grid(builder: NetworkBuilder, op: Operation, dtype: str) -> _Grid | None:
    """Return the symmetric grid of a Q or DQ with constant parameters, if it has one."""
    if any(name and name not in builder.constants for name in op.inputs[1:]):
        return None
    scale = builder.constants[op.inputs[1]]
    zero = builder.constants[op.inputs[2]] if op.input(2) else np.zeros((), dtype)
    if scale.size != 1 or zero.size != 1 or dtype not in SYMMETRIC_ZERO:
        return None
    value, zero_point = np.float32(scale.reshape(())), int(zero.reshape(()))
    with np.errstate(all="ignore"):
        usable = value > 0 and np.isfinite(np.float32(1) / value)
    return (
        _Grid(float(value), zero_point) if usable and zero_point == SYMMETRIC_ZERO[dtype] else None
    )


def _live(network: Network) -> Network:
    """Leave out operations whose results nobody reads."""
    wanted = set(network.outputs)
    kept: list[Operation] = []
    for op in reversed(network.operations):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(op.inputs)
            kept.append(op)
    return replace(network, operations=tuple(reversed(kept)))


def _rectified_first(network: Network) -> Network:
    """Relu(RoundInt8(x)) -> RoundInt8(Relu(x)), where nothing else reads the operand."""
    builder, makers, readers = NetworkBuilder(network), _makers(network), _reader_counts(network)
    swapped = {
        op.inputs[0]: op
        for op in network.operations
        if op.kind == "Relu"
        and readers[op.inputs[0]] == 1
        and op.inputs[0] in makers
        and makers[op.inputs[0]].kind == ROUND
    }
    for op in network.operations:
        if op.outputs[0] in swapped:
            continue
        inner = makers.get(op.inputs[0]) if op.inputs and op.inputs[0] in swapped else None
        if inner is None:
            builder.operations.append(op)
            continue
        name, shape = op.outputs[0], builder.shapes[op.outputs[0]]
        rectified = builder.tensor(f"{name} (unrounded)", shape, builder.dtypes[name])
        builder.add(op, "Relu", inner.inputs, rectified)
        builder.add(inner, ROUND, (rectified,), name, inner.attributes)
        builder.scales[name] = inner.number("scale", 1.0)
    return builder.network()


def _rounded_once(network: Network) -> Network:
    """Leave out RoundInt8 of what lies on that grid already, or is rounded to it elsewhere."""
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
    builder, makers, readers = NetworkBuilder(network), _makers(network), _reader_counts(network)
    rounds: dict[str, Operation] = {}  # result of a move -> the RoundInt8 after it
    for op in network.operations:
        move = makers.get(op.inputs[0]) if op.kind == ROUND else None
        if move is None or not _only_moves(network, move) or readers[op.inputs[0]] != 1:
            continue
        # Copies that change grids round on the grid of the result: it must stay.
        regrids = move.kind in _COPIES and op.inputs[0] in network.scales
        if regrids and network.scales[op.inputs[0]] != op.number("scale", 0.0):
            continue
        if not any(name in network.constants for name in _moved(move)):
            rounds[op.inputs[0]] = op
    dropped = {op.outputs[0] for op in rounds.values()}
    on_grid: dict[tuple[str, float], str] = {}
    for op in network.operations:
        if op.outputs[0] in dropped:
            continue
        after = rounds.get(op.outputs[0])
        if after is None:
            builder.operations.append(op)
            continue
        scale = after.number("scale", 0.0)
        for name in _moved(op):
            # What lies on another grid for others changes grids as it is copied.
            copied = op.kind in _COPIES and name in builder.scales and readers[name] > 1
            if not copied and (name, scale) not in on_grid:
                on_grid[name, scale] = _on_grid(builder, after, name, scale)
        moved = [on_grid.get((name, scale), name) for name in op.inputs]
        builder.operations.append(replace(op, inputs=tuple(moved), outputs=after.outputs))
    return builder.network()


def _on_grid(builder: NetworkBuilder, after: Operation, name: str, scale: float) -> str:
    """Return the tensor rounded to a grid: itself, where it lies on that grid."""
    if builder.scales.get(name) == scale:
        return name
    real = builder.tensor(f"{name} (real)", builder.shapes[name], "float32", scale)
    return builder.add(after, ROUND, (name,), real, after.attributes)


def _only_moves(network: Network, op: Operation) -> bool:
    """Whether the result holds numbers of the operands, zeros, and no others."""
    if op.kind == "Pad":
        given = network.constants.get(op.input(2))
        zero = not given.any() if given is not None else not op.input(2)
        return zero and op.number("value", 0.0) == 0
    nearest = op.kind == "Resize" and op.text("mode", "nearest") == "nearest"
    beyond = op.number("extrapolation_value", 0.0)  # lies on any grid where it is 0
    return op.kind in _MOVES or (nearest and beyond == 0)


def _moved(op: Operation) -> tuple[str, ...]:
    """The operands whose numbers are moved."""
    return op.inputs if op.kind == "Concat" else op.inputs[:1]


def _makers(network: Network) -> dict[str, Operation]:
    return {name: op for op in network.operations for name in op.outputs}


def _reader_counts(network: Network) -> Counter[str]:
    """How many operands each tensor is; that it leaves the segment counts as one."""
    read = (name for op in network.operations for name in op.inputs)
    return Counter([*read, *network.outputs])
