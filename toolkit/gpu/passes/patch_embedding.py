"""A rule of `toolkit.gpu.ir.patterns` for convolutions that cut an image into patches.

Where windows neither overlap nor leave a pixel out, each pixel is read once: the convolution is a
product of the patches, a view of the image with its dimensions split, and the filters as columns.
One kernel puts the patches in order, and rounds them; what follows reads rows of tokens.
"""

from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.passes.space_to_depth import CHANNELS, reads_stored
from toolkit.gpu.shapes.sizes import fixed

_MOVES = ("Flatten", "Reshape", "Transpose")
_MIN_PATCH_ELEMENTS = 128  # shorter patches are copied in pieces that are too small


def patches(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv with the taps as its strides -> MatMul of the patches, in the order of tokens."""
    if any(n and n not in rewriter.constants for n in op.inputs[1:]):
        return None
    source, weights = op.inputs[0], rewriter.constants[op.inputs[1]]
    if not _cuts(op, weights, rewriter.shapes[source]) or not reads_stored(rewriter, op):
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
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return False
    taps = weights.shape[2:]
    disjoint = op.integers("strides", (1, 1)) == taps and weights[0].size >= _MIN_PATCH_ELEMENTS
    plain = op.integers("dilations", (1, 1)) == (1, 1) and not any(op.integers("pads", (0,)))
    whole = all(fixed(n) and n % t == 0 for n, t in zip(shape[2:], taps, strict=True))
    return disjoint and plain and whole and op.text("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _columns(weights: Array) -> Array:
    columns: Array = weights.reshape(len(weights), -1).T
    return columns


PATCH_EMBEDDING_RULES: tuple[Rule, ...] = (Rule("Conv", patches),)
