"""Rules of `toolkit.gpu.ir.patterns` for the first convolution of a network over pictures.

Its few channels are too few for the pieces of 16 bytes that GPUs copy. With stride 2 it is a
convolution of stride 1 over blocks of 2 x 2 pixels: for taps t = 2 u + d, with d = 0, 1 and 0 for
taps that are not there,

    sum_t w[t] x[2 p + t - pad] = sum_u sum_d w[2 u + d] b[p + u, d],   b[i, d] = x[2 i + d - pad]

in rows and in columns. SpaceToDepthStem makes b: 4 pixels of 4 channels, 0 outside the picture.
"""

from math import prod

import numpy as np

from toolkit.gpu.ir.network import MAX_ELEMENTS, Array, IntegerConstant, Operation
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.shapes.sizes import fixed, most

SPACE_TO_DEPTH_STEM = "SpaceToDepthStem"
SIDE = 2  # pixels of a block, in rows and in columns: the stride
CHANNELS = 4  # of each of its pixels
BLOCK = SIDE * SIDE * CHANNELS
_Replaced = tuple[Operation, ...] | None


def blocks_of_pixels(around: Surroundings, op: Operation, made: Rewriting) -> _Replaced:
    """Conv of few channels and stride 2 -> Conv of stride 1 over SpaceToDepthStem.

    A rounding of the picture is done with it: one kernel makes b of what the network is given.
    """
    if op.kind != "Conv" or op.inputs[1] not in made.constants:
        return None
    source, weights = op.inputs[0], made.constants[op.inputs[1]]
    shape, result = made.shapes[source], made.shapes[op.outputs[0]]
    if not _takes_blocks(op, weights, shape) or not kept_integers(made, op):
        return None
    taps = tuple(-(-count // SIDE) for count in weights.shape[2:])
    blocks = (shape[0], BLOCK, result[2] + taps[0] - 1, result[3] + taps[1] - 1)
    if most(prod(blocks)) > MAX_ELEMENTS:
        return None
    rounding = around.own(source, "RoundInt8")
    given = source if rounding is None else rounding.inputs[0]
    attributes = {"before": pads_before(op, weights.shape[2:], shape[2:], result[2:])}
    dtype, scale = made.dtypes[source], made.scales.get(source)
    on_grid = scale if rounding is None else made.scales.get(given)
    picture = made.tensor(f"{given} (blocks)", blocks, dtype, on_grid)
    made.add(op, SPACE_TO_DEPTH_STEM, (given,), picture, attributes)
    if rounding is not None:
        rounded = made.tensor(f"{source} (blocks)", blocks, dtype, scale)
        picture = made.add(rounding, rounding.kind, (picture,), rounded, rounding.attributes)
    inputs = (picture, _weights_of_blocks(made, op.inputs[1]), *op.inputs[2:])
    made.add(op, "Conv", inputs, op.outputs[0], {"kernel_shape": taps})
    return () if rounding is None else (rounding,)


def _takes_blocks(op: Operation, weights: Array, shape: tuple[int, ...]) -> bool:
    """Whether a convolution has few channels, stride 2 and more than one tap each way."""
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return False
    twice = op.integers("strides", (1, 1)) == (SIDE, SIDE)
    plain = op.integers("dilations", (1, 1)) == (1, 1)
    return twice and plain and min(weights.shape[2:]) > 1 and all(map(fixed, shape[2:]))


def kept_integers(made: Rewriting, op: Operation) -> bool:
    """Whether a picture on a grid meets weights of INT8: only then it is read as it lies."""
    given = made.integers.get(op.inputs[1])
    if op.inputs[0] not in made.scales:
        return True
    return given is not None and given.values.dtype == np.int8 and given.axis in (None, 0)


def pads_before(
    op: Operation, taps: tuple[int, ...], size: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the padding above and to the left, with stride 2."""
    auto = op.text("auto_pad", "NOTSET")
    if not auto.startswith("SAME"):
        return op.integers("pads", (0, 0, 0, 0))[:2] if auto == "NOTSET" else (0, 0)
    totals = [max(0, (r - 1) * SIDE + t - n) for r, t, n in zip(result, taps, size, strict=True)]
    return tuple((total + (auto == "SAME_LOWER")) // 2 for total in totals)


def _weights_of_blocks(made: Rewriting, name: str) -> str:
    """Add the weights as taps of blocks, real numbers and the integers that they were."""
    changed = made.constant(f"{name} (blocks)", _in_blocks(made.constants[name]))
    given = made.integers.get(name)
    if given is not None:
        made.integers[changed] = IntegerConstant(_in_blocks(given.values), given.scale, given.axis)
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


SPACE_TO_DEPTH_RULES: tuple[Rule, ...] = (blocks_of_pixels,)
