"""Space-to-depth for the first convolution of a network over images.

Its channels are too few for vectorized loads of 16 bytes. With stride 2 it is a
convolution of stride 1 over blocks of 2 x 2 pixels: for taps t = 2 u + d, with d = 0, 1 and 0 for
taps that are not there,

    sum_t w[t] x[2 p + t - pad] = sum_u sum_d w[2 u + d] b[p + u, d],   b[i, d] = x[2 i + d - pad]

in rows and in columns. SpaceToDepthStem makes b: 4 pixels of 4 channels, 0 outside the image.
"""

from math import prod

import numpy as np

from toolkit.gpu.ir.network import MAX_ELEMENTS, Array, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.shapes.sizes import fixed, upper_bound

SPACE_TO_DEPTH_STEM = "SpaceToDepthStem"
SIDE = 2  # pixels of a block, in rows and in columns: the stride
CHANNELS = 4  # of each of its pixels
BLOCK = SIDE * SIDE * CHANNELS


def space_to_depth(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv of few channels and stride 2 -> Conv of stride 1 over SpaceToDepthStem.

    One kernel quantizes the input, too, where it is quantized.
    """
    if op.inputs[1] not in rewriter.constants:
        return None
    source, weights = op.inputs[0], rewriter.constants[op.inputs[1]]
    shape, result = rewriter.shapes[source], rewriter.shapes[op.outputs[0]]
    if not _takes_blocks(op, weights, shape) or not reads_stored(rewriter, op):
        return None
    taps = tuple(-(-count // SIDE) for count in weights.shape[2:])
    blocks = (shape[0], BLOCK, result[2] + taps[0] - 1, result[3] + taps[1] - 1)
    if upper_bound(prod(blocks)) > MAX_ELEMENTS:
        return None
    rounding = graph.sole_producer(source, "RoundInt8")
    unquantized = source if rounding is None else rounding.inputs[0]
    attributes = {"before": pads_before(op, weights.shape[2:], shape[2:], result[2:])}
    dtype, scale = rewriter.dtypes[source], rewriter.scales.get(source)
    source_scale = scale if rounding is None else rewriter.scales.get(unquantized)
    image = rewriter.add_new(
        op,
        SPACE_TO_DEPTH_STEM,
        (unquantized,),
        blocks,
        dtype,
        attributes=attributes,
        scale=source_scale,
    )
    if rounding is not None:
        image = rewriter.add_again(rounding, image)
    inputs = (image, rewriter.repacked(op.inputs[1], _in_blocks), *op.inputs[2:])
    return rewriter.replaced_by(
        op, "Conv", inputs, {"kernel_shape": taps}, also=() if rounding is None else (rounding,)
    )


def _takes_blocks(op: Operation, weights: Array, shape: tuple[int, ...]) -> bool:
    """Whether a convolution has few channels, stride 2 and more than one tap each way."""
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return False
    twice = op.integers("strides", (1, 1)) == (SIDE, SIDE)
    plain = op.integers("dilations", (1, 1)) == (1, 1)
    return twice and plain and min(weights.shape[2:]) > 1 and all(map(fixed, shape[2:]))


def reads_stored(rewriter: NetworkRewriter, op: Operation) -> bool:
    """Whether a first convolution can read its input as it is stored: INT8 needs INT8 weights."""
    weights = rewriter.integers.get(op.inputs[1])
    if op.inputs[0] not in rewriter.scales:
        return True
    return weights is not None and weights.values.dtype == np.int8 and weights.axis in (None, 0)


def pads_before(
    op: Operation, taps: tuple[int, ...], size: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the padding above and to the left, with stride 2."""
    auto = op.text("auto_pad", "NOTSET")
    if not auto.startswith("SAME"):
        return op.integers("pads", (0, 0, 0, 0))[:2] if auto == "NOTSET" else (0, 0)
    totals = [max(0, (r - 1) * SIDE + t - n) for r, t, n in zip(result, taps, size, strict=True)]
    return tuple((total + (auto == "SAME_LOWER")) // 2 for total in totals)


def _in_blocks(weights: Array) -> Array:
    """Return w (filter, channel, row, column) as (filter, block, row, column) of blocks."""
    filters, channels, rows, columns = weights.shape
    taps = -(-rows // SIDE), -(-columns // SIDE)
    spread = np.zeros((filters, CHANNELS, taps[0] * SIDE, taps[1] * SIDE), weights.dtype)
    spread[:, :channels, :rows, :columns] = weights
    parts = spread.reshape(filters, CHANNELS, taps[0], SIDE, taps[1], SIDE)
    blocks: Array = parts.transpose(0, 3, 5, 1, 2, 4).reshape(filters, BLOCK, *taps)
    return blocks


SPACE_TO_DEPTH_RULES: tuple[Rule, ...] = (Rule("Conv", space_to_depth),)
