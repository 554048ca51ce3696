"""Rules of `toolkit.gpu.ir.patterns` that simplify work with constants.

Exporters of windowed attention add the bias of positions and the mask of windows one after the
other, between reshapes; as one constant both join the kernel of attention.
"""

import math

import numpy as np

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, UseDefGraph

MAX_CONSTANT_ELEMENTS = 2**22  # elements of a constant that a rule adds: 8 MiB in FP16


def pad_nothing(_: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Pad(x) by nothing -> x."""
    if op.input(1) not in rewriter.constants or rewriter.constants[op.inputs[1]].any():
        return None
    return rewriter.replaced_by(op, "Identity", op.inputs[:1])


def added_between_reshapes(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """x reshaped, plus a constant, and reshaped back -> x plus the constant in x's shape."""
    add = graph.sole_producer(op.inputs[0], "Add")
    if add is None:
        return None
    shape = rewriter.shapes[op.outputs[0]]
    for operand, constant in (add.inputs, add.inputs[::-1]):
        first, values = graph.sole_producer(operand, "Reshape"), rewriter.constants.get(constant)
        inside = rewriter.shapes[add.outputs[0]]
        if first is None or values is None or math.prod(shape) > MAX_CONSTANT_ELEMENTS:
            continue
        if rewriter.shapes.get(first.inputs[0]) != shape or rewriter.shapes[operand] != inside:
            continue
        whole = np.broadcast_to(values, inside).reshape(shape)
        for axis in range(whole.ndim):  # what repeats is kept once
            if (whole == whole.take([0], axis)).all():
                whole = whole.take([0], axis)
        name = rewriter.constant(f"{constant} (reshaped)", np.ascontiguousarray(whole))
        return rewriter.replaced_by(op, "Add", (first.inputs[0], name), also=(first, add))
    return None


def added_twice(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """x plus a constant plus a constant -> x plus their sum."""
    shape = rewriter.shapes[op.outputs[0]]
    for summand, constant in (op.inputs, op.inputs[::-1]):
        add, second = graph.sole_producer(summand, "Add"), rewriter.constants.get(constant)
        if add is None or second is None or rewriter.shapes[summand] != shape:
            continue
        for x, name in (add.inputs, add.inputs[::-1]):
            first = rewriter.constants.get(name)
            if first is None or x in rewriter.constants or rewriter.shapes[x] != shape:
                continue
            if math.prod(np.broadcast_shapes(first.shape, second.shape)) > MAX_CONSTANT_ELEMENTS:
                continue
            total = rewriter.constant(f"{name} (sum)", first + second)
            return rewriter.replaced_by(op, "Add", (x, total), also=(add,))
    return None
