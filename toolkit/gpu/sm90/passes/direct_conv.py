"""Lower first convolutions with small windows to direct convolutions.

27 elements, three channels under 3x3 taps, fit the registers of a thread, which reads them from the
tensor as it is stored and quantizes them itself. Nothing is stored before the convolution then.
Where max pooling follows, `conv_max_pool` saves more.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.passes.space_to_depth import CHANNELS, reads_stored
from toolkit.gpu.shapes.sizes import fixed
from toolkit.gpu.sm90.passes.conv_max_pool import MONOTONIC, is_fusible_pooling

DIRECT_CONV = "DirectConv"
ROUNDING_SCALE = "rounded"  # its attribute: the INT8 scale to which it quantizes what it reads
WINDOW_ELEMENTS = 32  # at most: one MMA step for INT8, two for FP16
MAX_FILTERS = 64  # of one block


def direct_convolution(
    around: Surroundings, op: Operation, rewriting: Rewriting
) -> tuple[Operation, ...] | None:
    """Conv(x) or Conv(RoundInt8(x)) with a small window -> DirectConv(x)."""
    if op.kind != "Conv" or any(n and n not in rewriting.constants for n in op.inputs[1:]):
        return None
    weights, source = rewriting.constants[op.inputs[1]], op.inputs[0]
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return None
    few = weights[0].size <= WINDOW_ELEMENTS and weights.shape[0] <= MAX_FILTERS
    known = all(map(fixed, rewriting.shapes[source][2:]))
    if not few or not known or min(weights.shape[2:]) == 1 or not reads_stored(rewriting, op):
        return None
    if _is_pooled(around, op.outputs[0], rewriting):
        return None
    rounding = around.own(source, "RoundInt8")
    if rounding is None:
        rewriting.add(op, DIRECT_CONV, op.inputs, op.outputs[0], op.attributes)
        return ()
    attributes = {**op.attributes, ROUNDING_SCALE: rounding.number("scale", 1.0)}
    inputs = (*rounding.inputs, *op.inputs[1:])
    rewriting.add(op, DIRECT_CONV, inputs, op.outputs[0], attributes)
    return (rounding,)


def _is_pooled(around: Surroundings, name: str, rewriting: Rewriting) -> bool:
    """Whether only a max pooling that `conv_max_pool` fuses reads a tensor."""
    reading = [op for op in around.network.operations if name in op.inputs]
    while len(reading) == 1 and reading[0].kind in MONOTONIC:
        name = reading[0].outputs[0]
        reading = [op for op in around.network.operations if name in op.inputs]
    last = reading[0] if len(reading) == 1 else None
    return last is not None and last.kind == "MaxPool" and is_fusible_pooling(last, rewriting)


DIRECT_CONV_RULES: tuple[Rule, ...] = (direct_convolution,)
