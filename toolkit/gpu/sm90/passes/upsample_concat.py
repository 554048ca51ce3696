"""Fuse nearest-neighbor upsampling, concatenation and a 1x1 convolution, as detectors have them.

The convolution reads the small tensor itself, so neither the upsampled tensor nor the concatenation
is stored.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.passes.upsampling import repeats_pixels
from toolkit.gpu.shapes.sizes import fixed

CONV_UPSAMPLE_CONCAT = "ConvUpsampleConcat"  # of (small, weights, bias or "", large)
CHANNELS = 64  # that must divide those of both inputs: a step of the main loop


def conv_of_upsampled(
    around: Surroundings, op: Operation, rewriting: Rewriting
) -> tuple[Operation, ...] | None:
    """Conv(Concat(Resize(x), z)) of 1x1 -> ConvUpsampleConcat(x, z)."""
    join = around.own(op.inputs[0], "Concat") if op.kind == "Conv" else None
    pair = join is not None and len(join.inputs) == len(set(join.inputs)) == 2
    if join is None or not pair or join.integer("axis", 0) not in (1, -3):
        return None
    if any(name and name not in rewriting.constants for name in op.inputs[1:]):
        return None
    resize, large = around.own(join.inputs[0], "Resize", "Upsample"), join.inputs[1]
    if resize is None or not {resize.inputs[0], large} <= rewriting.shapes.keys():
        return None
    small = resize.inputs[0]
    shapes = [rewriting.shapes[name] for name in (small, join.inputs[0], large)]
    known = all(fixed(size) for shape in shapes for size in shape[1:])
    repeats = known and repeats_pixels(around.network, resize, *shapes[:2])
    if not repeats or not _is_product(op, rewriting):
        return None
    scales = {rewriting.scales.get(name) for name in (small, *join.inputs, op.inputs[0])}
    if len(scales) > 1 or any(shape[1] % CHANNELS for shape in shapes):
        return None
    inputs = (small, op.inputs[1], op.input(2), large)
    rewriting.add(op, CONV_UPSAMPLE_CONCAT, inputs, op.outputs[0], op.attributes)
    return resize, join


def _is_product(op: Operation, rewriting: Rewriting) -> bool:
    """Whether a convolution looks at each pixel alone, in one group."""
    weights = rewriting.constants[op.inputs[1]]
    alone = weights.shape[2:] == (1, 1) and op.integers("strides", (1, 1)) == (1, 1)
    return alone and op.integer("group", 1) == 1 and not any(op.integers("pads", ()))


UPSAMPLE_CONCAT_RULES: tuple[Rule, ...] = (conv_of_upsampled,)
