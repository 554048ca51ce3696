"""A rule of `toolkit.gpu.ir.patterns` for pyramids: a small picture repeated beside a large one.

Detectors repeat each pixel of a deep picture, join it with one of twice the size, and multiply both
by a 1x1 convolution. Such a product can read the small picture itself.
"""

from toolkit.gpu.ir.network import Network, Operation, Shape
from toolkit.gpu.ir.parameters import floats_of, scales_input
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.shapes.sizes import fixed

CONV_UPSCALED = "ConvUpsampleConcat"  # of (small picture, weights, bias or "", large picture)
CHANNELS = 64  # that must divide those of both pictures: what a step multiplies
# Coordinates and rounding with which pixel i of the result comes from floor(i / factor).
_WHOLE_PIXELS = {("asymmetric", "floor"), ("half_pixel", "round")}


def repeats_pixels(network: Network, op: Operation, shape: Shape, result: Shape) -> bool:
    """Whether a Resize or Upsample repeats each pixel of (N, C, H, W) whole times."""
    old = op.kind == "Upsample"
    if op.text("mode", "nearest") != "nearest" or len(shape) != 4 or result[:2] != shape[:2]:
        return False
    coordinates = op.text("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    nearest = op.text("nearest_mode", "floor" if old else "round_prefer_floor")
    if (coordinates, nearest.split("_")[0]) not in _WHOLE_PIXELS:
        return False
    if not _has_whole_scales(network, op):
        return False
    return all(r // s * s == r and r >= s for r, s in zip(result[2:], shape[2:], strict=True))


def _has_whole_scales(network: Network, op: Operation) -> bool:
    """Whether scales, where an operation is given them and no sizes, are whole numbers.

    One of 2.4 makes 4 rows of 2, too, but three of the first and one of the second.
    """
    at = scales_input(op)
    if op.input(at) and op.input(at) not in network.constants:
        return False
    return all(scale == int(scale) for scale in floats_of(network, op, at, "scales") or ())


def product_of_upscaled(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv(Concat(Resize(x), z)) of 1x1 -> ConvUpscaled(x, z)."""
    join = graph.sole_producer(op.inputs[0], "Concat") if op.kind == "Conv" else None
    pair = join is not None and len(join.inputs) == len(set(join.inputs)) == 2
    if join is None or not pair or join.integer("axis", 0) not in (1, -3):
        return None
    if any(name and name not in rewriter.constants for name in op.inputs[1:]):
        return None
    resize, large = graph.sole_producer(join.inputs[0], "Resize", "Upsample"), join.inputs[1]
    if resize is None or not {resize.inputs[0], large} <= rewriter.shapes.keys():
        return None
    small = resize.inputs[0]
    shapes = [rewriter.shapes[name] for name in (small, join.inputs[0], large)]
    known = all(fixed(size) for shape in shapes for size in shape[1:])
    repeats = known and repeats_pixels(graph.network, resize, *shapes[:2])
    if not repeats or not _is_product(op, rewriter):
        return None
    scales = {rewriter.scales.get(name) for name in (small, *join.inputs, op.inputs[0])}
    if len(scales) > 1 or any(shape[1] % CHANNELS for shape in shapes):
        return None
    inputs = (small, op.inputs[1], op.input(2), large)
    rewriter.add(op, CONV_UPSCALED, inputs, op.outputs[0], op.attributes)
    return rewriter.replacement(resize, join)


def _is_product(op: Operation, rewriter: NetworkRewriter) -> bool:
    """Whether a convolution looks at each pixel alone, in one group."""
    weights = rewriter.constants[op.inputs[1]]
    alone = weights.shape[2:] == (1, 1) and op.integers("strides", (1, 1)) == (1, 1)
    return alone and op.integer("group", 1) == 1 and not any(op.integers("pads", ()))


UPSAMPLE_CONCAT_RULES: tuple[Rule, ...] = (product_of_upscaled,)
