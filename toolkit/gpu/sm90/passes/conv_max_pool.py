"""Fuse a first convolution, monotonic operators and the max pooling after them.

Max pooling commutes with functions that never decrease: max f(x) = f(max x). So ConvMaxPool takes
the maximum of accumulators, and its epilogue runs once for each pooled pixel, to the same bits.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.passes.space_to_depth import SIDE, SPACE_TO_DEPTH_STEM, pads_before
from toolkit.gpu.shapes.sizes import fixed

CONV_MAX_POOL = "ConvMaxPool"
_MAX_TAP_ROWS = 4  # of the convolution
# Operators that never decrease, in floating point too, which an approximated exponential might;
# `_is_monotonic` looks at attributes.
MONOTONIC = ("Relu", "RoundInt8", "Clip", "LeakyRelu", "HardSigmoid")
_Replaced = tuple[Operation, ...] | None


def conv_max_pool(around: Surroundings, op: Operation, rewriting: Rewriting) -> _Replaced:
    """MaxPool(f(Conv(SpaceToDepthStem(x)))) -> f(ConvMaxPool(SpaceToDepthStem(x))), f monotonic."""
    if op.kind != "MaxPool" or len(op.outputs) > 1 or not is_fusible_pooling(op, rewriting):
        return None
    monotonic: list[Operation] = []
    source = op.inputs[0]
    while (each := around.own(source, *MONOTONIC)) is not None and _is_monotonic(rewriting, each):
        monotonic.append(each)
        source = each.inputs[0]
    conv = around.own(source, "Conv")
    if conv is None or not _reads_blocks(around, conv):
        return None
    if rewriting.constants[conv.inputs[1]].shape[2] > _MAX_TAP_ROWS:
        return None
    shape, dtype = rewriting.shapes[op.outputs[0]], rewriting.dtypes[op.outputs[0]]
    size = rewriting.shapes[source][2:]
    attributes = {"before": pads_before(op, (3, 3), size, shape[2:])}
    names = [
        rewriting.tensor(f"{name} (pooled)", shape, dtype)
        for name in (source, *_results(monotonic))
    ]
    names[-1] = op.outputs[0]
    rewriting.add(op, CONV_MAX_POOL, conv.inputs, names[0], {**attributes, "size": size})
    for each, before, after in zip(reversed(monotonic), names, names[1:], strict=False):
        rewriting.add(each, each.kind, (before, *each.inputs[1:]), after, each.attributes)
        if each.kind == "RoundInt8":
            rewriting.scales[after] = each.number("scale", 1.0)
    return (conv, *monotonic)


def requantize_once(around: Surroundings, op: Operation, rewriting: Rewriting) -> _Replaced:
    """RoundInt8(RoundInt8(x)) with one scale -> RoundInt8(x): max pooling was between them."""
    first = around.own(op.inputs[0], "RoundInt8") if op.kind == "RoundInt8" else None
    if first is None or first.attributes["scale"] != op.attributes["scale"]:
        return None
    rewriting.add(op, op.kind, first.inputs, op.outputs[0], op.attributes)
    return (first,)


def _results(monotonic: list[Operation]) -> list[str]:
    """Return the results of monotonic operations, the first computed first."""
    return [each.outputs[0] for each in reversed(monotonic)]


def is_fusible_pooling(op: Operation, rewriting: Rewriting) -> bool:
    """Whether the window is 3x3 with stride 2, and none is all padding."""
    shape, result = rewriting.shapes[op.inputs[0]], rewriting.shapes[op.outputs[0]]
    if len(shape) != 4 or not all(map(fixed, (*shape[1:], *result[1:]))):
        return False
    window = op.integers("kernel_shape", ()), op.integers("strides", (1, 1))
    if window != ((3, 3), (SIDE, SIDE)) or op.integers("dilations", (1, 1)) != (1, 1):
        return False
    before = pads_before(op, (3, 3), shape[2:], result[2:])
    starts = [(r - 1) * SIDE - b for r, b in zip(result[2:], before, strict=True)]
    return max(before) < SIDE and all(s < n for s, n in zip(starts, shape[2:], strict=True))


def _reads_blocks(around: Surroundings, conv: Operation) -> bool:
    rounding = around.maker(conv.inputs[0], "RoundInt8")
    source = conv.inputs[0] if rounding is None else rounding.inputs[0]
    return around.maker(source, SPACE_TO_DEPTH_STEM) is not None


def _is_monotonic(rewriting: Rewriting, op: Operation) -> bool:
    """Whether an operation of `MONOTONIC` never decreases, and reads each tensor."""
    if op.kind in ("HardSigmoid", "LeakyRelu") and op.number("alpha", 0.0) < 0:
        return False
    return all(not name or name in rewriting.constants for name in op.inputs[1:])


CONV_MAX_POOL_RULES: tuple[Rule, ...] = (conv_max_pool, requantize_once)
