"""A rule of `toolkit.gpu.ir.patterns` for convolutions that cut a picture into patches.

Where windows neither overlap nor leave a pixel out, each pixel is read once: the convolution is a
product of the patches, a view of the picture with its dimensions split, and the filters as columns.
One kernel puts the patches in order, and rounds them; what follows reads rows of tokens.
"""

from toolkit.gpu.ir.network import Array, IntegerConstant, Operation
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.passes.space_to_depth import CHANNELS, reads_stored
from toolkit.gpu.shapes.sizes import fixed

_MOVES = ("Flatten", "Reshape", "Transpose")
_LEAST_NUMBERS = 128  # of a patch: shorter ones are copied in pieces that are too small


def patches(around: Surroundings, op: Operation, made: Rewriting) -> tuple[Operation, ...] | None:
    """Conv with the taps as its strides -> MatMul of the patches, in the order of tokens."""
    if op.kind != "Conv" or any(n and n not in made.constants for n in op.inputs[1:]):
        return None
    source, weights = op.inputs[0], made.constants[op.inputs[1]]
    if not _cuts(op, weights, made.shapes[source]) or not reads_stored(made, op):
        return None
    readers = [one for one in around.network.operations if op.outputs[0] in one.inputs]
    if not readers or any(one.kind not in _MOVES for one in readers):
        return None  # element-wise work would not meet the product that it ends
    rounding = around.own(source, "RoundInt8")
    given = source if rounding is None else rounding.inputs[0]
    filters, channels, rows, columns = weights.shape
    batch, _, height, width = made.shapes[given]
    dtype, scale = made.dtypes[source], made.scales.get(source)
    before = made.scales.get(given)
    split = (batch, channels, height // rows, rows, width // columns, columns)
    order = (0, 2, 4, 1, 3, 5)
    ordered = tuple(split[at] for at in order)
    name = made.tensor(f"{given} (split)", split, dtype, before)
    made.add(op, "Reshape", (given,), name)
    picture = made.tensor(f"{given} (patches)", ordered, dtype, before)
    made.add(op, "Transpose", (name,), picture, {"perm": order})
    if rounding is not None:
        rounded = made.tensor(f"{source} (patches)", ordered, dtype, scale)
        picture = made.add(rounding, rounding.kind, (picture,), rounded, rounding.attributes)
    flat = made.tensor(f"{source} (rows)", (*ordered[:3], weights[0].size), dtype, scale)
    made.add(op, "Reshape", (picture,), flat)
    tokens = made.tensor(f"{op.outputs[0]} (tokens)", (*ordered[:3], filters), dtype)
    made.add(op, "MatMul", (flat, _as_columns(made, op.inputs[1]), *op.inputs[2:]), tokens)
    made.add(op, "Transpose", (tokens,), op.outputs[0], {"perm": (0, 3, 1, 2)})
    return () if rounding is None else (rounding,)


def _cuts(op: Operation, weights: Array, shape: tuple[int, ...]) -> bool:
    """Whether the windows of a convolution of few channels are the patches of its picture."""
    if weights.ndim != 4 or weights.shape[1] > CHANNELS or op.integer("group", 1) != 1:
        return False
    taps = weights.shape[2:]
    apart = op.integers("strides", (1, 1)) == taps and weights[0].size >= _LEAST_NUMBERS
    plain = op.integers("dilations", (1, 1)) == (1, 1) and not any(op.integers("pads", (0,)))
    whole = all(fixed(n) and n % t == 0 for n, t in zip(shape[2:], taps, strict=True))
    return apart and plain and whole and op.text("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _as_columns(made: Rewriting, name: str) -> str:
    """Add the filters as columns, real numbers and the integers that they were."""
    columns = made.constant(f"{name} (columns)", _columns(made.constants[name]))
    given = made.integers.get(name)
    if given is not None:
        axis = None if given.axis is None else 1
        made.integers[columns] = IntegerConstant(_columns(given.values), given.scale, axis)
    return columns


def _columns(weights: Array) -> Array:
    found: Array = weights.reshape(len(weights), -1).T
    return found


PATCH_EMBEDDING_RULES: tuple[Rule, ...] = (patches,)
