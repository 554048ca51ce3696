"""The first convolution of a network over images, whose channels are too few for loads of 16 bytes.

With stride 2 it is a convolution of stride 1 over blocks of 2 x 2 pixels: for taps t = 2 u + d,
with d = 0, 1 and 0 for taps that are not there,

    sum_t w[t] x[2 p + t - pad] = sum_u sum_d w[2 u + d] b[p + u, d],   b[i, d] = x[2 i + d - pad]

in rows and in columns. SpaceToDepthStem makes b: 4 pixels of 4 channels, 0 outside the image.

Where windows neither overlap nor leave a pixel out, each pixel is read once: the convolution is a
product of the patches, a view of the image with its dimensions split, and the filters as columns.
One kernel puts the patches in order, and rounds them; what follows reads rows of tokens.
"""

from math import prod

import numpy as np

from toolkit.gpu.ir.network import MAX_ELEMENTS, Array, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.ir.windows import read_window
from toolkit.gpu.shapes.sizes import fixed, upper_bound

SPACE_TO_DEPTH_STEM = "SpaceToDepthStem"
SIDE = 2  # pixels of a block, in rows and in columns: the stride
CHANNELS = 4  # of each of its pixels
BLOCK = SIDE * SIDE * CHANNELS
_MOVES = ("Flatten", "Reshape", "Transpose")
_MIN_PATCH_ELEMENTS = 128  # shorter patches are copied in pieces that are too small


def space_to_depth(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv of few channels and stride 2 -> Conv of stride 1 over SpaceToDepthStem.

    One kernel quantizes the input, too, where it is quantized.
    """
    if op.inputs[1] not in rewriter.constants:
        return None
    source, weights = op.inputs[0], rewriter.constants[op.inputs[1]]
    shape, result = rewriter.shapes[source], rewriter.shapes[op.outputs[0]]
    if not _is_first(rewriter, op) or not _takes_blocks(op, weights, shape):
        return None
    taps = tuple(-(-count // SIDE) for count in weights.shape[2:])
    blocks = (shape[0], BLOCK, result[2] + taps[0] - 1, result[3] + taps[1] - 1)
    if upper_bound(prod(blocks)) > MAX_ELEMENTS:
        return None
    rounding = graph.sole_producer(source, "RoundInt8")
    unquantized = source if rounding is None else rounding.inputs[0]
    attributes = {"before": read_window(op, weights.shape[2:], shape, result).before}
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
    """Whether a convolution of few channels has stride 2 and more than one tap each way."""
    twice = op.integers("strides", (1, 1)) == (SIDE, SIDE)
    return twice and min(weights.shape[2:]) > 1 and all(map(fixed, shape[2:]))


def _is_first(rewriter: NetworkRewriter, op: Operation) -> bool:
    """Whether a convolution has few channels, and reads its input as it is stored.

    INT8 needs INT8 weights.
    """
    shape = rewriter.constants[op.inputs[1]].shape
    plain = op.integer("group", 1) == 1 and op.integers("dilations", (1, 1)) == (1, 1)
    if len(shape) != 4 or shape[1] > CHANNELS or not plain:
        return False
    weights = rewriter.integers.get(op.inputs[1])
    if op.inputs[0] not in rewriter.scales:
        return True
    return weights is not None and weights.values.dtype == np.int8 and weights.axis in (None, 0)


def _in_blocks(weights: Array) -> Array:
    """Return w (filter, channel, row, column) as (filter, block, row, column) of blocks."""
    filters, channels, rows, columns = weights.shape
    taps = -(-rows // SIDE), -(-columns // SIDE)
    spread = np.zeros((filters, CHANNELS, taps[0] * SIDE, taps[1] * SIDE), weights.dtype)
    spread[:, :channels, :rows, :columns] = weights
    parts = spread.reshape(filters, CHANNELS, taps[0], SIDE, taps[1], SIDE)
    blocks: Array = parts.transpose(0, 3, 5, 1, 2, 4).reshape(filters, BLOCK, *taps)
    return blocks


def patches(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv with the taps as its strides -> MatMul of the patches, in the order of tokens."""
    if any(n and n not in rewriter.constants for n in op.inputs[1:]):
        return None
    source, weights = op.inputs[0], rewriter.constants[op.inputs[1]]
    if not _is_first(rewriter, op) or not _cuts(op, weights, rewriter.shapes[source]):
        return None
    readers = [user for user in graph.network.operations if op.outputs[0] in user.inputs]
    if not readers or any(reader.kind not in _MOVES for reader in readers):
        return None  # element-wise work would not meet the product that it ends
    rounding = graph.sole_producer(source, "RoundInt8")
    image = source if rounding is None else rounding.inputs[0]
    filters, channels, rows, columns = weights.shape
    batch, _, height, width = rewriter.shapes[image]
    dtype, scale = rewriter.dtypes[source], rewriter.scales.get(source)
    before = rewriter.scales.get(image)
    split = (batch, channels, height // rows, rows, width // columns, columns)
    order = (0, 2, 4, 1, 3, 5)
    ordered = tuple(split[at] for at in order)
    name = rewriter.add_new(op, "Reshape", (image,), split, dtype, scale=before)
    patched = rewriter.add_new(
        op, "Transpose", (name,), ordered, dtype, attributes={"perm": order}, scale=before
    )
    if rounding is not None:
        patched = rewriter.add_again(rounding, patched)
    rows = (*ordered[:3], weights[0].size)
    flat = rewriter.add_new(op, "Reshape", (patched,), rows, dtype, scale=scale)
    operands = (flat, rewriter.repacked(op.inputs[1], _columns, axis=1), *op.inputs[2:])
    tokens = rewriter.add_new(op, "MatMul", operands, (*ordered[:3], filters), dtype)
    return rewriter.replaced_by(
        op,
        "Transpose",
        (tokens,),
        {"perm": (0, 3, 1, 2)},
        also=() if rounding is None else (rounding,),
    )


def _cuts(op: Operation, weights: Array, shape: tuple[int, ...]) -> bool:
    """Whether the windows of a convolution of few channels are the patches of its image."""
    taps = weights.shape[2:]
    disjoint = op.integers("strides", (1, 1)) == taps and weights[0].size >= _MIN_PATCH_ELEMENTS
    plain = not any(op.integers("pads", (0,)))
    whole = all(fixed(n) and n % t == 0 for n, t in zip(shape[2:], taps, strict=True))
    return disjoint and plain and whole and op.text("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _columns(weights: Array) -> Array:
    columns: Array = weights.reshape(len(weights), -1).T
    return columns


PATCH_EMBEDDING_RULES: tuple[Rule, ...] = (Rule("Conv", patches),)
SPACE_TO_DEPTH_RULES: tuple[Rule, ...] = (Rule("Conv", space_to_depth),)
