"""Q/DQ of FP8 (E4M3) -> tensors that lie as FP8, and products of them.

With one float32 scale s of an activation, and with the operators that this module adds,

    QuantizeLinear(x) = ToFloat8(x) = e4m3(clip(fl(x fl(1/s)), -448, 448))
    DequantizeLinear(q) = FromFloat8(q) = fl(q s)

where e4m3 rounds to the nearest number of E4M3, halves to even, and fl to float32. ONNX divides by
s; where x / s is next to a half, q may be the neighbour.

A product of FromFloat8(q) and a constant of FP8 reads both as they are stored; its attribute
`x_scale` is s. All others read FromFloat8(q), in the precision of the build.
"""

from dataclasses import replace

import numpy as np

from toolkit.gpu.ir.builder import NetworkBuilder
from toolkit.gpu.ir.elementwise_ops import reciprocal
from toolkit.gpu.ir.network import RESHAPES, IntegerConstant, Network, Operation, live
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph, apply_rules
from toolkit.gpu.passes.integer_operators import along
from toolkit.graph.dtypes import FLOAT8, LARGEST_FLOAT8, MIN_CHANNELS

X_SCALE = "x_scale"
"""The attribute of a product whose operands are FP8."""

_TO, _FROM = "ToFloat8", "FromFloat8"


def read_float8(network: Network) -> Network:
    """Return the network without Q/DQ of FP8, but the DequantizeLinear of constants."""
    types = [network.dtypes.get(op.outputs[0]) for op in network.operations]
    if FLOAT8 not in types:
        return network
    builder = NetworkBuilder(network)
    same: dict[str, str] = {}
    rounded: dict[tuple[str, ...], str] = {}  # real numbers and scale -> FP8
    for old in network.operations:
        op = replace(old, inputs=tuple(same.get(name, name) for name in old.inputs))
        source, output = op.input(0), op.outputs[0]
        stored = {"QuantizeLinear": output, "DequantizeLinear": source}.get(op.kind, "")
        if builder.dtypes.get(stored) != FLOAT8:
            builder.operations.append(op)
        elif source in builder.constants:
            _round_constant(builder, op)
        elif op.kind == "DequantizeLinear":
            builder.add(op, _FROM, (source,), output, _scale(builder, op))
        elif rounded.setdefault(op.inputs[:2], output) == output:
            builder.add(op, _TO, (source,), output, _scale(builder, op))
        else:
            same[output] = rounded[op.inputs[:2]]
    return builder.network()


def _scale(builder: NetworkBuilder, op: Operation) -> dict[str, float]:
    return {"scale": float(np.float32(builder.constants[op.inputs[1]].reshape(())))}


def _round_constant(builder: NetworkBuilder, op: Operation) -> None:
    """Fold a QuantizeLinear of a constant, as exporters leave weights."""
    values = builder.constants[op.inputs[0]]
    scale = along(builder, op, op.inputs[1], values.shape)
    steps = values.astype(np.float32) / scale.astype(np.float32)
    clipped = np.clip(steps, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    builder.to_constant(op.outputs[0], clipped.astype(FLOAT8))


def usable_scale(scale: float) -> bool:
    """Whether FP8 may have a scale: it is positive, and has a reciprocal in float32."""
    with np.errstate(all="ignore"):
        return bool(scale > 0 and np.isfinite(reciprocal(scale)))


def with_float8_products(network: Network) -> Network:
    """Return the network with products of FP8 where both operands are given so."""
    if not any(op.kind == _TO for op in network.operations):
        return network
    while True:
        moved = apply_rules(network, _QUANTIZED_EARLY)
        if moved.operations == network.operations:
            break
        network = moved
    return live(apply_rules(network, _PRODUCTS), {_FROM})


def _quantized_early(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """ToFloat8(reshaped x) -> reshaped ToFloat8(x): the kernel that computes x rounds it."""
    move = graph.sole_producer(op.inputs[0], "Transpose", *RESHAPES)
    if move is None or move.inputs[0] not in rewriter.shapes:
        return None
    source = move.inputs[0]
    rounded = rewriter.add_new(
        op, _TO, (source,), rewriter.shapes[source], FLOAT8, attributes=op.attributes
    )
    operands = (rounded, *move.inputs[1:])
    return rewriter.replaced_by(op, move.kind, operands, move.attributes, also=(move,))


def _float8_product(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """A product of FromFloat8(q) and FP8 weights -> the product of q and these."""
    source = graph.producer(op.inputs[0], _FROM)
    weights = graph.network.integers.get(op.inputs[1])
    if source is None or weights is None or weights.values.dtype.name != FLOAT8:
        return None
    constant_bias = not op.input(2) or op.inputs[2] in graph.network.constants
    factors = weights.scale * np.float32(source.number("scale", 1.0))
    usable = all(map(usable_scale, factors.tolist()))
    if not (constant_bias and usable and _PRODUCT_CHECKS[op.kind](op, weights, graph.network)):
        return None
    attributes = {**op.attributes, X_SCALE: source.number("scale", 1.0)}
    operands = (source.inputs[0], *op.inputs[1:])
    return rewriter.replaced_by(op, op.kind, operands, attributes)


def _convolves(op: Operation, weights: IntegerConstant, network: Network) -> bool:
    """Whether it is a dense 2-D convolution whose scales are those of its filters."""
    values = weights.values
    dense = values.ndim == 4 and op.integer("group", 1) == 1
    return dense and values.shape[1] >= MIN_CHANNELS and weights.axis in (None, 0)


def _multiplies(op: Operation, weights: IntegerConstant, network: Network) -> bool:
    """Whether it is a product with a matrix whose scales are those of its columns."""
    columns = 0 if op.integer("transB", 0) else 1
    matrix = weights.values.ndim == 2 and not op.integer("transA", 0)
    return matrix and weights.axis in (None, columns) and len(network.shapes[op.outputs[0]]) > 1


_PRODUCT_CHECKS = {"Conv": _convolves, "Gemm": _multiplies, "MatMul": _multiplies}
_QUANTIZED_EARLY = (Rule(_TO, _quantized_early),)
_PRODUCTS = (Rule(" ".join(_PRODUCT_CHECKS), _float8_product),)
