"""Rewrite rules for operators that simpler ones express, and for padding and per-channel factors
that a convolution absorbs.
"""

import numpy as np
import onnx

from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.parameters import constant_of, integers_of
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.passes.fusion import MAX_OPERANDS
from toolkit.gpu.shapes.sizes import Size


def split(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Split(x) -> a Slice for each result: rounding to INT8 moves through operators of one."""
    axis = op.integer("axis", 0) % len(rewriter.shapes[op.inputs[0]])
    sizes = [rewriter.shapes[name][axis] for name in op.outputs]
    whole = rewriter.shapes[op.inputs[0]][axis]
    if any(isinstance(size, Size) for size in (*sizes, whole)):
        return None
    start = 0
    axes = rewriter.constant(f"{op.outputs[0]} (axis)", np.array([axis]))
    for name, size in zip(op.outputs, sizes, strict=True):
        limits = [
            rewriter.constant(f"{name} ({what})", np.array([at]))
            for what, at in (("start", start), ("end", start + size))
        ]
        rewriter.add(op, "Slice", (op.inputs[0], *limits, axes), name)
        start += size
    return rewriter.replacement()


def many_operands(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Sum(a, b, c, d, e, ...) -> Sum(Sum(a, b, c, d), e, ...)."""
    if len(op.inputs) <= MAX_OPERANDS:
        return None
    output, kind = op.outputs[0], "Sum" if op.kind == "Mean" else op.kind
    shape, dtype = rewriter.shapes[output], rewriter.dtypes[output]
    total, rest = op.inputs[0], list(op.inputs[1:])
    while rest:
        part, rest = rest[: MAX_OPERANDS - 1], rest[MAX_OPERANDS - 1 :]
        last = not rest and op.kind != "Mean"
        target = output if last else rewriter.tensor(f"{output} (part)", shape, dtype)
        total = rewriter.add(op, kind, (total, *part), target)
    if op.kind == "Mean":
        share = rewriter.constant(f"{output} (share)", np.array(1 / len(op.inputs), dtype))
        rewriter.add(op, "Mul", (total, share), output)
    return rewriter.replacement()


def padded_convolution(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv(Pad(x)) -> Conv(x) with wider borders of zeros."""
    pad = graph.sole_producer(op.inputs[0], "Pad")
    if pad is None or pad.text("mode", "constant") != "constant":
        return None
    if op.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    widths = _border(graph, pad, len(rewriter.shapes[op.inputs[0]]))
    if widths is None:
        return None
    sides = len(widths)
    before = op.integers("pads", (0,) * sides) if "pads" in op.attributes else (0,) * sides
    attributes = {k: v for k, v in op.attributes.items() if k != "auto_pad"}
    attributes["pads"] = tuple(a + b for a, b in zip(before, widths, strict=True))
    return rewriter.replaced_by(
        op, "Conv", (pad.inputs[0], *op.inputs[1:]), attributes, also=(pad,)
    )


def _border(graph: UseDefGraph, pad: Operation, rank: int) -> tuple[int, ...] | None:
    """Return the widths around the image, None where a Pad does other than add zeros there."""
    constants = graph.network.constants
    if any(name and name not in constants for name in pad.inputs[1:]):
        return None
    widths = integers_of(graph.network, pad, 1, "pads") or ()
    value = constant_of(graph.network, pad, 2)
    axes = integers_of(graph.network, pad, 3, "axes") or tuple(range(rank))
    if pad.number("value", 0.0) != 0 or (value is not None and value.any()) or min(widths) < 0:
        return None
    pads = [0] * (2 * rank)
    for at, axis in enumerate(axes):
        pads[axis % rank], pads[rank + axis % rank] = widths[at], widths[len(axes) + at]
    if any(pads[at] for at in (0, 1, rank, rank + 1)):
        return None
    return (*pads[2:rank], *pads[rank + 2 :])


def channel_constants(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Conv(x, w, b) * k -> Conv(x, k w, k b), and so for + - /, with a k for each channel."""
    pair = _convolution_and_constant(graph, op)
    if pair is None:
        return None
    conv, k = pair
    weights = graph.network.constants[conv.inputs[1]]
    bias = graph.network.constants.get(conv.input(2), np.zeros(len(weights), weights.dtype))
    k = np.broadcast_to(k.reshape(-1), (len(weights),))
    if op.kind in ("Mul", "Div"):
        factor = (k if op.kind == "Mul" else 1 / k).astype(np.float64)
        each = factor.reshape(-1, *[1] * (weights.ndim - 1))
        weights, bias = (weights * each).astype(weights.dtype), (bias * factor).astype(bias.dtype)
    else:
        bias = bias + k if op.kind == "Add" else bias - k
    names = (
        rewriter.constant(f"{op.outputs[0]} (weights)", weights),
        rewriter.constant(f"{op.outputs[0]} (bias)", bias),
    )
    return rewriter.replaced_by(op, "Conv", (conv.inputs[0], *names), conv.attributes, also=(conv,))


def _convolution_and_constant(graph: UseDefGraph, op: Operation) -> tuple[Operation, Array] | None:
    """Return the convolution that an operation works on, and the constant."""
    network = graph.network
    orders = (op.inputs, op.inputs[::-1]) if op.kind in ("Add", "Mul") else (op.inputs,)
    for result, constant in orders:
        conv, k = graph.sole_producer(result, "Conv"), network.constants.get(constant)
        if conv is None or k is None:
            continue
        shape = network.shapes[result]
        each = (1,) * (len(shape) - k.ndim) + k.shape
        weights = conv.inputs[1]
        fixed = weights in network.constants and weights not in network.integers
        fixed = fixed and (not conv.input(2) or conv.input(2) in network.constants)
        channels = each[1:2] in ((1,), shape[1:2])
        wide = each[:1] != (1,) or not channels or any(size != 1 for size in each[2:])
        if fixed and not wide and not (op.kind == "Div" and (k == 0).any()):
            return conv, k
    return None


def triangle(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Trilu(x, k) -> Where(a constant mask, x, 0)."""
    if op.input(1) and op.input(1) not in graph.network.constants:
        return None
    output = op.outputs[0]
    k = int(graph.network.constants[op.inputs[1]].reshape(())) if op.input(1) else 0
    ones = np.ones(rewriter.shapes[output][-2:], np.bool_)
    mask = np.triu(ones, k) if op.integer("upper", 1) else np.tril(ones, k)
    names = (
        rewriter.constant(f"{output} (mask)", mask),
        op.inputs[0],
        rewriter.constant(f"{output} (zero)", np.array(0, rewriter.dtypes[output])),
    )
    return rewriter.replaced_by(op, "Where", names)


def eye(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """EyeLike(x) -> a constant."""
    output = op.outputs[0]
    rows, columns = rewriter.shapes[output]
    values = np.eye(rows, columns, op.integer("k", 0), rewriter.dtypes[output])
    return rewriter.replaced_by(
        op, "Identity", (rewriter.constant(f"{output} (constant)", values),)
    )


def one_hot(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """OneHot(i, depth, (off, on)) -> Where(i == 0..depth-1, on, off), i + depth where i < 0."""
    output = op.outputs[0]
    shape = rewriter.shapes[output]
    axis = op.integer("axis", -1) % len(shape)
    depth = shape[axis]
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    dtype = rewriter.dtypes[output]
    places = (rewriter.constant(f"{output} (at)", np.array(at, np.int64)) for at in (1, 0))
    values = [rewriter.add_new(op, "Gather", (op.inputs[2], at), (), dtype) for at in places]
    indices_shape, to = rewriter.shapes[op.inputs[0]], {"to": int(onnx.TensorProto.INT64)}
    index = rewriter.add_new(op, "Cast", op.inputs[:1], indices_shape, "int64", attributes=to)
    placed = rewriter.add_new(op, "Reshape", (index,), single, "int64")
    wrapped = _from_the_end(rewriter, op, placed, depth)
    values_along = np.arange(depth).reshape(depth, *[1] * (len(shape) - axis - 1))
    classes = rewriter.constant(f"{output} (places)", values_along)
    equal = rewriter.add_new(op, "Equal", (wrapped, classes), shape, "bool")
    return rewriter.replaced_by(op, "Where", (equal, *values))


def _from_the_end(rewriter: NetworkRewriter, op: Operation, index: str, size: int) -> str:
    """Add `size` to negative indices."""
    shape = rewriter.shapes[index]
    zero = rewriter.constant(f"{index} (zero)", np.array(0, np.int64))
    amount = rewriter.constant(f"{index} (size)", np.array(size, np.int64))
    below = rewriter.add_new(op, "Less", (index, zero), shape, "bool")
    moved = rewriter.add_new(op, "Add", (index, amount), shape, "int64")
    return rewriter.add_new(op, "Where", (below, moved, index), shape, "int64")


def reversed_sequence(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """ReverseSequence(x, n) -> x at time n - 1 - t where t < n, else at t."""
    output = op.outputs[0]
    shape = rewriter.shapes[output]
    time, batch = op.integer("time_axis", 0), op.integer("batch_axis", 1)
    along = tuple(size if at == time else 1 for at, size in enumerate(shape))
    across = tuple(size if at == batch else 1 for at, size in enumerate(shape))
    both = tuple(max(pair) for pair in zip(along, across, strict=True))
    t = rewriter.constant(f"{output} (time)", np.arange(shape[time]).reshape(along))
    next_t = rewriter.constant(f"{output} (next)", np.arange(1, shape[time] + 1).reshape(along))
    count = rewriter.add_new(op, "Reshape", op.inputs[1:2], across, "int64")
    inside = rewriter.add_new(op, "Less", (t, count), both, "bool")
    back = rewriter.add_new(op, "Sub", (count, next_t), both, "int64")
    index = rewriter.add_new(op, "Where", (inside, back, t), both, "int64")
    return rewriter.replaced_by(op, "GatherElements", (op.inputs[0], index), {"axis": time})


def dropout(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Dropout(x) -> x, outside of training; its mask is all ones."""
    training = graph.network.constants.get(op.input(2), np.array(False))
    if training.any() or (op.input(2) and op.input(2) in rewriter.shapes):
        return None
    if len(op.outputs) > 1:
        mask = op.outputs[1]
        ones = rewriter.constant(
            f"{mask} (ones)", np.ones(rewriter.shapes[mask], rewriter.dtypes[mask])
        )
        rewriter.add(op, "Identity", (ones,), mask)
    return rewriter.replaced_by(op, "Identity", op.inputs[:1])


def cast_like(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """CastLike(x, y) -> Cast(x) to the type of y."""
    target = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(rewriter.dtypes[op.outputs[0]]))
    return rewriter.replaced_by(op, "Cast", op.inputs[:1], {"to": int(target)})


EARLY_LAYOUT_RULES: tuple[Rule, ...] = (Rule("Split", split),)  # before Q/DQ is read
LAYOUT_RULES: tuple[Rule, ...] = (
    Rule("Sum Mean Max Min", many_operands),
    Rule("Conv", padded_convolution),
    Rule("Add Sub Mul Div", channel_constants),
    Rule("Add Sub Mul Div", channel_constants),  # a factor, then a sum
    Rule("Trilu", triangle),
    Rule("EyeLike", eye),
    Rule("OneHot", one_hot),
    Rule("ReverseSequence", reversed_sequence),
    Rule("Dropout", dropout),
    Rule("CastLike", cast_like),
)
