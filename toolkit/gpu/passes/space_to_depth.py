"""Rules of `toolkit.gpu.ir.patterns` for the first convolution of a network over pictures.

Its few channels are too few for the pieces of 16 bytes that GPUs copy. With stride 2 it is a
convolution of stride 1 over blocks of 2 x 2 pixels: for taps t = 2 u + d, with d = 0, 1 and 0 for
taps that are not there,

    sum_t w[t] x[2 p + t - pad] = sum_u sum_d w[2 u + d] b[p + u, d],   b[i, d] = x[2 i + d - pad]

in rows and in columns. PixelBlocks makes b: 4 pixels of 4 channels, 0 outside the picture.

A pooling that looks for the largest commutes with all that never falls: max f(x) = f(max x). So
ConvMaxPool takes the largest of the sums, and what followed them is computed once for each pooled
pixel, to the same bits.
"""

from math import prod

import numpy as np

from device.padding import is_same, same_padding
from toolkit.gpu.ir.network import MAX_ELEMENTS, Array, IntegerConstant, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.shapes.sizes import fixed, most

PIXEL_BLOCKS, CONV_MAX_POOL = "SpaceToDepthStem", "ConvMaxPool"
SIDE = 2  # pixels of a block, in rows and in columns: the stride
CHANNELS = 4  # of each of its pixels
BLOCK = SIDE * SIDE * CHANNELS
_TAP_ROWS = 4  # of a convolution that is pooled, at most
# Operators that never fall as their tensor rises, in floating point too, which an approximated
# exponential might; `_never_falls` looks at attributes.
RISING = ("Relu", "RoundInt8", "Clip", "LeakyRelu", "HardSigmoid")


def blocks_of_pixels(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv of few channels and stride 2 -> Conv of stride 1 over PixelBlocks.

    A rounding of the picture is done with it: one kernel makes b of what the network is given.
    """
    if op.kind != "Conv" or op.inputs[1] not in rewriter.constants:
        return None
    source, weights = op.inputs[0], rewriter.constants[op.inputs[1]]
    shape, result = rewriter.shapes[source], rewriter.shapes[op.outputs[0]]
    if not _takes_blocks(op, weights, shape) or not kept_integers(rewriter, op):
        return None
    taps = tuple(-(-count // SIDE) for count in weights.shape[2:])
    blocks = (shape[0], BLOCK, result[2] + taps[0] - 1, result[3] + taps[1] - 1)
    if most(prod(blocks)) > MAX_ELEMENTS:
        return None
    rounding = graph.sole_producer(source, "RoundInt8")
    given = source if rounding is None else rounding.inputs[0]
    attributes = {"before": _pads_before(op, weights.shape[2:], shape[2:], result[2:])}
    dtype, scale = rewriter.dtypes[source], rewriter.scales.get(source)
    on_grid = scale if rounding is None else rewriter.scales.get(given)
    picture = rewriter.tensor(f"{given} (blocks)", blocks, dtype, on_grid)
    rewriter.add(op, PIXEL_BLOCKS, (given,), picture, attributes)
    if rounding is not None:
        rounded = rewriter.tensor(f"{source} (blocks)", blocks, dtype, scale)
        picture = rewriter.add(rounding, rounding.kind, (picture,), rounded, rounding.attributes)
    inputs = (picture, _weights_of_blocks(rewriter, op.inputs[1]), *op.inputs[2:])
    rewriter.add(op, "Conv", inputs, op.outputs[0], {"kernel_shape": taps})
    return rewriter.replacement(*(() if rounding is None else (rounding,)))


def pooled_sums(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """MaxPool(f(Conv(PixelBlocks(x)))) -> f(ConvMaxPool(PixelBlocks(x))), f rising."""
    if op.kind != "MaxPool" or len(op.outputs) > 1 or not is_pooled_by_kernel(op, rewriter):
        return None
    rising: list[Operation] = []
    source = op.inputs[0]
    while (one := graph.sole_producer(source, *RISING)) is not None and _never_falls(rewriter, one):
        rising.append(one)
        source = one.inputs[0]
    conv = graph.sole_producer(source, "Conv")
    if conv is None or not _reads_blocks(graph, conv):
        return None
    if rewriter.constants[conv.inputs[1]].shape[2] > _TAP_ROWS:
        return None
    shape, dtype = rewriter.shapes[op.outputs[0]], rewriter.dtypes[op.outputs[0]]
    size = rewriter.shapes[source][2:]
    attributes = {"before": _pads_before(op, (3, 3), size, shape[2:])}
    names = [
        rewriter.tensor(f"{name} (pooled)", shape, dtype) for name in (source, *_results(rising))
    ]
    names[-1] = op.outputs[0]
    rewriter.add(op, CONV_MAX_POOL, conv.inputs, names[0], {**attributes, "size": size})
    for one, before, after in zip(reversed(rising), names, names[1:], strict=False):
        rewriter.add(one, one.kind, (before, *one.inputs[1:]), after, one.attributes)
        if one.kind == "RoundInt8":
            rewriter.scales[after] = one.number("scale", 1.0)
    return rewriter.replacement(conv, *rising)


def rounded_once(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """RoundInt8(RoundInt8(x)) of one grid -> RoundInt8(x): a pooling stood between them."""
    first = graph.sole_producer(op.inputs[0], "RoundInt8") if op.kind == "RoundInt8" else None
    if first is None or first.attributes["scale"] != op.attributes["scale"]:
        return None
    rewriter.add(op, op.kind, first.inputs, op.outputs[0], op.attributes)
    return rewriter.replacement(first)


def _results(rising: list[Operation]) -> list[str]:
    """Names of what rising operations make, the first computed first."""
    return [one.outputs[0] for one in reversed(rising)]


def _takes_blocks(op: Operation, weights: Array, shape: tuple[int, ...]) -> bool:
    """Whether a convolution has few channels, stride 2 and more than one tap each way."""
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return False
    twice = op.integers("strides", (1, 1)) == (SIDE, SIDE)
    plain = op.integers("dilations", (1, 1)) == (1, 1)
    return twice and plain and min(weights.shape[2:]) > 1 and all(map(fixed, shape[2:]))


def kept_integers(rewriter: NetworkRewriter, op: Operation) -> bool:
    """Whether a picture on a grid meets weights of INT8: only then it is read as it lies."""
    given = rewriter.integers.get(op.inputs[1])
    if op.inputs[0] not in rewriter.scales:
        return True
    return given is not None and given.values.dtype == np.int8 and given.axis in (None, 0)


def _pads_before(
    op: Operation, taps: tuple[int, ...], size: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the padding above and to the left."""
    auto = op.text("auto_pad", "NOTSET")
    if not is_same(auto):
        return op.integers("pads", (0, 0, 0, 0))[:2] if auto == "NOTSET" else (0, 0)
    return tuple(
        same_padding(n, r, stride=SIDE, span=t, upper=auto == "SAME_UPPER")[0]
        for n, r, t in zip(size, result, taps, strict=True)
    )


def _weights_of_blocks(rewriter: NetworkRewriter, name: str) -> str:
    """Add the weights as taps of blocks, real numbers and the integers that they were."""
    changed = rewriter.constant(f"{name} (blocks)", _in_blocks(rewriter.constants[name]))
    given = rewriter.integers.get(name)
    if given is not None:
        rewriter.integers[changed] = IntegerConstant(
            _in_blocks(given.values), given.scale, given.axis
        )
    return changed


def _in_blocks(weights: Array) -> Array:
    """Return w (filter, channel, row, column) as (filter, block, row, column) of blocks."""
    filters, channels, rows, columns = weights.shape
    taps = -(-rows // SIDE), -(-columns // SIDE)
    spread = np.zeros((filters, CHANNELS, taps[0] * SIDE, taps[1] * SIDE), weights.dtype)
    spread[:, :channels, :rows, :columns] = weights
    parts = spread.reshape(filters, CHANNELS, taps[0], SIDE, taps[1], SIDE)
    found: Array = parts.transpose(0, 3, 5, 1, 2, 4).reshape(filters, BLOCK, *taps)
    return found


def is_pooled_by_kernel(op: Operation, rewriter: NetworkRewriter) -> bool:
    """Whether the kernel knows the window, and each one has a pixel of the picture."""
    shape, result = rewriter.shapes[op.inputs[0]], rewriter.shapes[op.outputs[0]]
    if len(shape) != 4 or not all(map(fixed, (*shape[1:], *result[1:]))):
        return False
    window = op.integers("kernel_shape", ()), op.integers("strides", (1, 1))
    if window != ((3, 3), (SIDE, SIDE)) or op.integers("dilations", (1, 1)) != (1, 1):
        return False
    before = _pads_before(op, (3, 3), shape[2:], result[2:])
    starts = [(r - 1) * SIDE - b for r, b in zip(result[2:], before, strict=True)]
    return max(before) < SIDE and all(s < n for s, n in zip(starts, shape[2:], strict=True))


def _reads_blocks(graph: UseDefGraph, conv: Operation) -> bool:
    rounding = graph.producer(conv.inputs[0], "RoundInt8")
    source = conv.inputs[0] if rounding is None else rounding.inputs[0]
    return graph.producer(source, PIXEL_BLOCKS) is not None


def _never_falls(rewriter: NetworkRewriter, op: Operation) -> bool:
    """Whether an operation of `RISING` is one with its attributes, and of one tensor."""
    if op.kind in ("HardSigmoid", "LeakyRelu") and op.number("alpha", 0.0) < 0:
        return False
    return all(not name or name in rewriter.constants for name in op.inputs[1:])


SPACE_TO_DEPTH_RULES: tuple[Rule, ...] = (blocks_of_pixels,)
CONV_MAX_POOL_RULES: tuple[Rule, ...] = (pooled_sums, rounded_once)
