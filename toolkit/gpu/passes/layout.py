"""Rules of `graph.patterns` for operators that simpler ones say, and for borders and factors that a
convolution takes along.
"""

import numpy as np
import onnx

from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.parameters import constant_of, integers_of
from toolkit.gpu.ir.patterns import Rule, Surroundings
from toolkit.gpu.ir.rewriting import Rewriting
from toolkit.gpu.passes.fusion import MAX_OPERANDS
from toolkit.gpu.shapes.sizes import Size

Replaced = tuple[Operation, ...] | None
_TAKES_MANY = {"Sum": "Sum", "Mean": "Sum", "Max": "Max", "Min": "Min"}


def split(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Split(x) -> a Slice for each result: rounding to INT8 moves through operators of one."""
    if op.kind != "Split":
        return None
    axis = op.integer("axis", 0) % len(made.shapes[op.inputs[0]])
    sizes = [made.shapes[name][axis] for name in op.outputs]
    whole = made.shapes[op.inputs[0]][axis]
    if any(isinstance(size, Size) for size in (*sizes, whole)) or sum(sizes) != whole:
        return None
    start = 0
    axes = made.constant(f"{op.outputs[0]} (axis)", np.array([axis]))
    for name, size in zip(op.outputs, sizes, strict=True):
        limits = [
            made.constant(f"{name} ({what})", np.array([at]))
            for what, at in (("start", start), ("end", start + size))
        ]
        made.add(op, "Slice", (op.inputs[0], *limits, axes), name)
        start += size
    return ()


def many_operands(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Sum(a, b, c, d, e, ...) -> Sum(Sum(a, b, c, d), e, ...)."""
    if op.kind not in _TAKES_MANY or len(op.inputs) <= MAX_OPERANDS:
        return None
    output, kind = op.outputs[0], _TAKES_MANY[op.kind]
    shape, dtype = made.shapes[output], made.dtypes[output]
    found, rest = op.inputs[0], list(op.inputs[1:])
    while rest:
        part, rest = rest[: MAX_OPERANDS - 1], rest[MAX_OPERANDS - 1 :]
        last = not rest and op.kind != "Mean"
        target = output if last else made.tensor(f"{output} (part)", shape, dtype)
        found = made.add(op, kind, (found, *part), target)
    if op.kind == "Mean":
        share = made.constant(f"{output} (share)", np.array(1 / len(op.inputs), dtype))
        made.add(op, "Mul", (found, share), output)
    return ()


def padded_convolution(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Conv(Pad(x)) -> Conv(x) with wider borders of zeros."""
    pad = around.own(op.inputs[0], "Pad") if op.kind == "Conv" else None
    if pad is None or pad.text("mode", "constant") != "constant":
        return None
    if op.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    widths = _border(around, pad, len(made.shapes[op.inputs[0]]))
    if widths is None:
        return None
    sides = len(widths)
    before = op.integers("pads", (0,) * sides) if "pads" in op.attributes else (0,) * sides
    attributes = {k: v for k, v in op.attributes.items() if k != "auto_pad"}
    attributes["pads"] = tuple(a + b for a, b in zip(before, widths, strict=True))
    made.add(op, "Conv", (pad.inputs[0], *op.inputs[1:]), op.outputs[0], attributes)
    return (pad,)


def _border(around: Surroundings, pad: Operation, rank: int) -> tuple[int, ...] | None:
    """Return the widths around the picture, None where a Pad does other than add zeros there."""
    constants = around.network.constants
    if any(name and name not in constants for name in pad.inputs[1:]):
        return None
    widths = integers_of(around.network, pad, 1, "pads") or ()
    value = constant_of(around.network, pad, 2)
    axes = integers_of(around.network, pad, 3, "axes") or tuple(range(rank))
    if pad.number("value", 0.0) != 0 or (value is not None and value.any()) or min(widths) < 0:
        return None
    found = [0] * (2 * rank)
    for at, axis in enumerate(axes):
        found[axis % rank], found[rank + axis % rank] = widths[at], widths[len(axes) + at]
    if any(found[at] for at in (0, 1, rank, rank + 1)):
        return None
    return (*found[2:rank], *found[rank + 2 :])


def channel_constants(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Conv(x, w, b) * k -> Conv(x, k w, k b), and so for + - /, with a k for each channel."""
    found = _convolution_and_constant(around, op)
    if found is None:
        return None
    conv, k = found
    weights = around.network.constants[conv.inputs[1]]
    bias = around.network.constants.get(conv.input(2), np.zeros(len(weights), weights.dtype))
    k = np.broadcast_to(k.reshape(-1), (len(weights),))
    if op.kind in ("Mul", "Div"):
        factor = (k if op.kind == "Mul" else 1 / k).astype(np.float64)
        each = factor.reshape(-1, *[1] * (weights.ndim - 1))
        weights, bias = (weights * each).astype(weights.dtype), (bias * factor).astype(bias.dtype)
    else:
        bias = bias + k if op.kind == "Add" else bias - k
    names = (
        made.constant(f"{op.outputs[0]} (weights)", weights),
        made.constant(f"{op.outputs[0]} (bias)", bias),
    )
    made.add(op, "Conv", (conv.inputs[0], *names), op.outputs[0], conv.attributes)
    return (conv,)


def _convolution_and_constant(
    around: Surroundings, op: Operation
) -> tuple[Operation, Array] | None:
    """Return the convolution that an operation works on, and the constant."""
    if op.kind not in ("Add", "Sub", "Mul", "Div"):
        return None
    network = around.network
    orders = (op.inputs, op.inputs[::-1]) if op.kind in ("Add", "Mul") else (op.inputs,)
    for left, right in orders:
        conv, k = around.own(left, "Conv"), network.constants.get(right)
        if conv is None or k is None:
            continue
        shape = network.shapes[left]
        each = (1,) * (len(shape) - k.ndim) + k.shape
        weights = conv.inputs[1]
        fixed = weights in network.constants and weights not in network.integers
        fixed = fixed and (not conv.input(2) or conv.input(2) in network.constants)
        channels = each[1:2] in ((1,), shape[1:2])
        wide = each[:1] != (1,) or not channels or any(size != 1 for size in each[2:])
        if fixed and not wide and not (op.kind == "Div" and (k == 0).any()):
            return conv, k
    return None


def triangle(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Trilu(x, k) -> Where(a constant mask, x, 0)."""
    if op.kind != "Trilu" or (op.input(1) and op.input(1) not in around.network.constants):
        return None
    output = op.outputs[0]
    k = int(around.network.constants[op.inputs[1]].reshape(())) if op.input(1) else 0
    ones = np.ones(made.shapes[output][-2:], np.bool_)
    mask = np.triu(ones, k) if op.integer("upper", 1) else np.tril(ones, k)
    names = (
        made.constant(f"{output} (mask)", mask),
        op.inputs[0],
        made.constant(f"{output} (zero)", np.array(0, made.dtypes[output])),
    )
    made.add(op, "Where", names, output)
    return ()


def eye(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """EyeLike(x) -> a constant."""
    if op.kind != "EyeLike":
        return None
    output = op.outputs[0]
    rows, columns = made.shapes[output]
    values = np.eye(rows, columns, op.integer("k", 0), made.dtypes[output])
    made.add(op, "Identity", (made.constant(f"{output} (constant)", values),), output)
    return ()


def one_hot(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """OneHot(i, depth, (off, on)) -> Where(i == 0..depth-1, on, off), i + depth where i < 0."""
    if op.kind != "OneHot":
        return None
    output = op.outputs[0]
    shape = made.shapes[output]
    axis = op.integer("axis", -1) % len(shape)
    depth = shape[axis]
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    values = [
        made.add(
            op,
            "Gather",
            (op.inputs[2], made.constant(f"{output} (at)", np.array(at, np.int64))),
            made.tensor(f"{output} (value)", (), made.dtypes[output]),
        )
        for at in (1, 0)
    ]
    index = made.tensor(f"{output} (index)", made.shapes[op.inputs[0]], "int64")
    made.add(op, "Cast", op.inputs[:1], index, {"to": int(onnx.TensorProto.INT64)})
    placed = made.add(op, "Reshape", (index,), made.tensor(f"{output} (placed)", single, "int64"))
    wrapped = _from_the_end(made, op, placed, depth)
    places = np.arange(depth).reshape(depth, *[1] * (len(shape) - axis - 1))
    every = made.constant(f"{output} (places)", places)
    equal = made.tensor(f"{output} (equal)", shape, "bool")
    made.add(op, "Equal", (wrapped, every), equal)
    made.add(op, "Where", (equal, *values), output)
    return ()


def _from_the_end(made: Rewriting, op: Operation, index: str, size: int) -> str:
    """Add `size` to negative indices."""
    shape = made.shapes[index]
    zero = made.constant(f"{index} (zero)", np.array(0, np.int64))
    amount = made.constant(f"{index} (size)", np.array(size, np.int64))
    below = made.add(op, "Less", (index, zero), made.tensor(f"{index} (below)", shape, "bool"))
    moved = made.add(op, "Add", (index, amount), made.tensor(f"{index} (moved)", shape, "int64"))
    target = made.tensor(f"{index} (from 0)", shape, "int64")
    return made.add(op, "Where", (below, moved, index), target)


def reversed_sequence(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """ReverseSequence(x, n) -> x at time n - 1 - t where t < n, else at t."""
    if op.kind != "ReverseSequence":
        return None
    output = op.outputs[0]
    shape = made.shapes[output]
    time, batch = op.integer("time_axis", 0), op.integer("batch_axis", 1)
    along = tuple(size if at == time else 1 for at, size in enumerate(shape))
    across = tuple(size if at == batch else 1 for at, size in enumerate(shape))
    both = tuple(max(pair) for pair in zip(along, across, strict=True))
    t = made.constant(f"{output} (time)", np.arange(shape[time]).reshape(along))
    next_t = made.constant(f"{output} (next)", np.arange(1, shape[time] + 1).reshape(along))
    count = made.tensor(f"{output} (counts)", across, "int64")
    made.add(op, "Reshape", op.inputs[1:2], count)
    inside = made.tensor(f"{output} (inside)", both, "bool")
    made.add(op, "Less", (t, count), inside)
    back = made.add(op, "Sub", (count, next_t), made.tensor(f"{output} (back)", both, "int64"))
    index = made.tensor(f"{output} (index)", both, "int64")
    made.add(op, "Where", (inside, back, t), index)
    made.add(op, "GatherElements", (op.inputs[0], index), output, {"axis": time})
    return ()


def dropout(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """Dropout(x) -> x, outside of training; its mask is all ones."""
    training = around.network.constants.get(op.input(2), np.array(False))
    if op.kind != "Dropout" or training.any() or (op.input(2) and op.input(2) in made.shapes):
        return None
    if len(op.outputs) > 1:
        mask = op.outputs[1]
        ones = made.constant(f"{mask} (ones)", np.ones(made.shapes[mask], made.dtypes[mask]))
        made.add(op, "Identity", (ones,), mask)
    made.add(op, "Identity", op.inputs[:1], op.outputs[0])
    return ()


def cast_like(around: Surroundings, op: Operation, made: Rewriting) -> Replaced:
    """CastLike(x, y) -> Cast(x) to the type of y."""
    if op.kind != "CastLike":
        return None
    target = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(made.dtypes[op.outputs[0]]))
    made.add(op, "Cast", op.inputs[:1], op.outputs[0], {"to": int(target)})
    return ()


EARLY_LAYOUT_RULES: tuple[Rule, ...] = (split,)  # before Q/DQ is read
LAYOUT_RULES: tuple[Rule, ...] = (
    many_operands,
    padded_convolution,
    channel_constants,
    channel_constants,  # a factor, then a sum
    triangle,
    eye,
    one_hot,
    reversed_sequence,
    dropout,
    cast_like,
)
