"""A rule of `toolkit.gpu.ir.patterns` for first convolutions with few numbers under a window.

27 numbers, three channels under 3x3 taps, fit the registers of a thread, which reads them from the
picture as it is given and rounds them itself. Nothing is written before the convolution then. Where
a pooling follows, the rules of `stem_rules` save more.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.passes.space_to_depth import (
    CHANNELS,
    RISING,
    is_pooled_by_kernel,
    kept_integers,
)
from toolkit.gpu.shapes.sizes import fixed

CONV_PICTURE = "DirectConv"
ROUNDED = "rounded"  # its attribute: the scale of the grid to which it rounds what it reads
MOST_NUMBERS = 32  # under a window: one step of tensor cores for INT8, two for FP16
MOST_FILTERS = 64  # sums of a pixel, in one block


def convolution_of_picture(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv(x) or Conv(RoundInt8(x)) of few numbers -> ConvPicture(x)."""
    if op.kind != "Conv" or any(n and n not in rewriter.constants for n in op.inputs[1:]):
        return None
    weights, source = rewriter.constants[op.inputs[1]], op.inputs[0]
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return None
    few = weights[0].size <= MOST_NUMBERS and weights.shape[0] <= MOST_FILTERS
    known = all(map(fixed, rewriter.shapes[source][2:]))
    if not few or not known or min(weights.shape[2:]) == 1 or not kept_integers(rewriter, op):
        return None
    if _is_pooled(graph, op.outputs[0], rewriter):
        return None
    rounding = graph.sole_producer(source, "RoundInt8")
    if rounding is None:
        rewriter.add(op, CONV_PICTURE, op.inputs, op.outputs[0], op.attributes)
        return rewriter.replacement()
    attributes = {**op.attributes, ROUNDED: rounding.number("scale", 1.0)}
    inputs = (*rounding.inputs, *op.inputs[1:])
    rewriter.add(op, CONV_PICTURE, inputs, op.outputs[0], attributes)
    return rewriter.replacement(rounding)


def _is_pooled(graph: UseDefGraph, name: str, rewriter: NetworkRewriter) -> bool:
    """Whether nothing but a pooling of its kernel reads a tensor, after rising operators."""
    reading = [op for op in graph.network.operations if name in op.inputs]
    while len(reading) == 1 and reading[0].kind in RISING:
        name = reading[0].outputs[0]
        reading = [op for op in graph.network.operations if name in op.inputs]
    last = reading[0] if len(reading) == 1 else None
    return last is not None and last.kind == "MaxPool" and is_pooled_by_kernel(last, rewriter)


DIRECT_CONV_RULES: tuple[Rule, ...] = (convolution_of_picture,)
