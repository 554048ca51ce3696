"""Rewrite rules that recover a GroupNormalization.

Exporters write one as an InstanceNormalization of groups, between two Reshapes that would move
every element of a channels-last (NHWC) tensor; its factors follow as a Mul and an Add.
"""

import numpy as np

from toolkit.gpu.ir.network import Array, Operation, Shape
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, UseDefGraph


def group_normalization(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Instances of (N, groups, ...), reshaped from x and back -> GroupNormalization(x)."""
    norm = graph.sole_producer(op.inputs[0], "InstanceNormalization")
    first = norm and graph.sole_producer(norm.inputs[0], "Reshape")
    if norm is None or first is None:
        return None
    x, shape = first.inputs[0], rewriter.shapes[op.outputs[0]]
    inside = rewriter.shapes[norm.outputs[0]]
    factors = [rewriter.constants.get(name) for name in norm.inputs[1:3]]
    alike = rewriter.shapes.get(x) == shape and inside[0] == shape[0] and len(shape) > 2
    if not alike or any(factor is None for factor in factors) or shape[1] % inside[1]:
        return None
    gain, bias = (
        rewriter.constant(f"{op.name} (factors)", np.repeat(factor, shape[1] // inside[1]))
        for factor in factors
        if factor is not None
    )
    attributes = {"num_groups": inside[1], "epsilon": norm.number("epsilon", 1e-5)}
    return rewriter.replaced_by(
        op, "GroupNormalization", (x, gain, bias), attributes, also=(first, norm)
    )


def group_factor(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """GroupNormalization(x) times or plus a constant for each channel -> one with other factors."""
    shape = rewriter.shapes[op.outputs[0]]
    for operand, constant in (op.inputs, op.inputs[::-1]):
        norm = graph.sole_producer(operand, "GroupNormalization")
        values = _of_channels(rewriter.constants.get(constant), shape)
        if norm is None or values is None or rewriter.shapes[operand] != shape:
            continue
        gain, bias = (rewriter.constants.get(name) for name in norm.inputs[1:3])
        if gain is None or bias is None or gain.shape != values.shape:
            continue
        changed = (gain * values, bias * values) if op.kind == "Mul" else (gain, bias + values)
        names = (rewriter.constant(f"{op.name} (factors)", array) for array in changed)
        inputs = (norm.inputs[0], *names)
        return rewriter.replaced_by(op, "GroupNormalization", inputs, norm.attributes, also=(norm,))
    return None


def _of_channels(values: Array | None, shape: Shape) -> Array | None:
    """Return a constant that has one number for each channel of (N, C, ...)."""
    if values is None or values.ndim > len(shape):
        return None
    sizes = (1,) * (len(shape) - values.ndim) + values.shape
    per_channel = tuple(shape[1] if at == 1 else 1 for at in range(len(shape)))
    return values.reshape(-1) if sizes == per_channel else None
