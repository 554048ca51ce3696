"""Rewrite rules for composites: recurrences, normalizations, attention, GEMMs."""

import math
from functools import partial

import numpy as np

from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph
from toolkit.gpu.passes.constants import added_between_reshapes, added_twice, pad_nothing
from toolkit.gpu.passes.einsum import einsum_as_matmul
from toolkit.gpu.passes.group_normalization import group_factor, group_normalization
from toolkit.gpu.passes.recurrent import recurrence_in_steps

DEEPEST_HEAD = 128  # numbers of a query, and of a value, that a block of attention holds

_NORMS = ("LayerNormalization", "RMSNormalization")


def general_gemm(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Gemm(a, b, c) -> alpha a b + beta c, where b, c or the factors are not what kernels take."""
    if _plain_gemm(graph, op):
        return None
    shape = rewriter.shapes[op.outputs[0]]
    a, b = (
        _transposed(rewriter, op, name) if op.integer(flag, 0) else name
        for name, flag in zip(op.inputs, ("transA", "transB"), strict=False)
    )
    alpha, beta = op.number("alpha", 1.0), op.number("beta", 1.0) if op.input(2) else 0.0
    if alpha == 1.0 and beta == 0.0:
        return rewriter.replaced_by(op, "MatMul", (a, b))
    dtype = rewriter.dtypes[op.outputs[0]]
    total = rewriter.add_new(op, "MatMul", (a, b), shape, dtype)
    if alpha != 1.0:
        factor = rewriter.constant("alpha", np.array(alpha, dtype))
        scaled = rewriter.tensor(f"{total} (scaled)", shape, dtype) if beta else op.outputs[0]
        total = rewriter.add(op, "Mul", (total, factor), scaled)
    if beta:
        added = op.inputs[2]
        if beta != 1.0:
            factor = rewriter.constant("beta", np.array(beta, dtype))
            added_shape = rewriter.shape_of(added)
            added = rewriter.add_new(op, "Mul", (added, factor), added_shape, dtype)
        rewriter.add(op, "Add", (total, added), op.outputs[0])
    return rewriter.replacement()


def _plain_gemm(graph: UseDefGraph, op: Operation) -> bool:
    constants = graph.network.constants
    columns = graph.network.shapes[op.outputs[0]][1]
    added = constants.get(op.input(2), np.zeros(()))
    return (
        op.inputs[1] in constants
        and op.number("alpha", 1.0) == 1.0
        and (not op.input(2) or (op.input(2) in constants and op.number("beta", 1.0) == 1.0))
        and (added.size == 1 or added.size == columns == added.shape[-1])
    )


def _transposed(rewriter: NetworkRewriter, op: Operation, name: str) -> str:
    """Add a matrix, or a pile of them, with rows and columns exchanged."""
    if name in rewriter.constants:
        return rewriter.constant(f"{name} (transposed)", rewriter.constants[name].swapaxes(-1, -2))
    shape = rewriter.shapes[name]
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    turned, dtype = tuple(shape[at] for at in order), rewriter.dtypes[name]
    return rewriter.add_new(op, "Transpose", (name,), turned, dtype, attributes={"perm": order})


def batch_normalization(_: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """BatchNormalization(x) with constant statistics -> x factor + shift, one each a channel."""
    if op.integer("training_mode", 0) or len(op.outputs) > 1:
        return None
    if any(name not in rewriter.constants for name in op.inputs[1:5]):
        return None
    gain, bias, mean, variance = (rewriter.constants[n].astype(np.float64) for n in op.inputs[1:5])
    factor = gain / np.sqrt(variance + op.number("epsilon", 1e-5))
    shape, dtype = rewriter.shapes[op.outputs[0]], rewriter.dtypes[op.outputs[0]]
    wide = (-1, *(1,) * (len(shape) - 2))

    def packed(name: str, values: Array) -> str:
        return rewriter.constant(f"{op.name} ({name})", values.astype(dtype).reshape(wide))

    factors = packed("factor", factor)
    scaled = rewriter.add_new(op, "Mul", (op.inputs[0], factors), shape, dtype)
    return rewriter.replaced_by(op, "Add", (scaled, packed("shift", bias - mean * factor)))


def layer_normalization(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """(x - m) / sqrt(mean((x - m)^2) + e) with m = mean(x), or 0 -> a normalization."""
    away, root, inverse = _quotient(graph, op)
    add = root and graph.sole_producer(root.inputs[0], "Add")
    if root is None or add is None:
        return None
    square, epsilon = _with_number(graph, add)
    variance = graph.sole_producer(square, "ReduceMean")
    power = variance and graph.sole_producer(variance.inputs[0], "Pow", "Mul")
    if epsilon is None or variance is None or power is None or not _squares(graph, power, away):
        return None
    axes = _mean_axes(graph, variance)
    if axes is None:
        return None
    replaced = (power, variance, add, root, *inverse)
    x, kind = away, "RMSNormalization"
    sub = graph.producer(away, "Sub")
    mean = sub and graph.sole_producer(sub.inputs[1], "ReduceMean")
    if sub and mean and mean.inputs[0] == sub.inputs[0] and _mean_axes(graph, mean) == axes:
        # Only the square and the quotient may read the difference: it is not computed any more.
        if graph.reads[away] != 2:
            return None
        replaced = (mean, sub, *replaced)
        x, kind = sub.inputs[0], "LayerNormalization"
    return rewriter.replaced_by(op, kind, (x,), {"axes": axes, "epsilon": epsilon}, also=replaced)


def _quotient(
    graph: UseDefGraph, op: Operation
) -> tuple[str, Operation | None, tuple[Operation, ...]]:
    """Read a / sqrt(b), or a (1 / sqrt(b)): a, the root, and what takes its inverse."""
    if op.kind == "Div":
        return op.inputs[0], graph.sole_producer(op.inputs[1], "Sqrt"), ()
    for dividend, factor in (op.inputs, op.inputs[::-1]):
        inverse = graph.sole_producer(factor, "Reciprocal", "Div")
        if inverse is None:
            continue
        if inverse.kind == "Div" and graph.scalar(inverse.inputs[0]) != 1.0:
            continue
        return dividend, graph.sole_producer(inverse.inputs[-1], "Sqrt"), (inverse,)
    return "", None, ()


def _with_number(graph: UseDefGraph, op: Operation) -> tuple[str, float | None]:
    """Read an operation of a tensor and a constant number, in either order."""
    for name, constant in (op.inputs, op.inputs[::-1]):
        if (number := graph.scalar(constant)) is not None:
            return name, number
    return "", None


def _squares(graph: UseDefGraph, power: Operation, name: str) -> bool:
    if power.kind == "Pow":
        return power.inputs[0] == name and graph.scalar(power.inputs[1]) == 2.0
    return power.inputs == (name, name)


def _mean_axes(graph: UseDefGraph, mean: Operation) -> tuple[int, ...] | None:
    """Return the axes of a mean that keeps them, counted from the first."""
    rank = len(graph.network.shapes[mean.outputs[0]])
    axes = mean.integers("axes", ())
    if mean.input(1):
        values = graph.network.constants.get(mean.input(1), np.zeros(0))
        axes = tuple(int(axis) for axis in values.reshape(-1))
    keeps_dims = mean.integer("keepdims", 1) == 1
    return tuple(sorted(axis % rank for axis in axes)) if axes and keeps_dims else None


def normalization_factor(
    graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter, *, operand: int
) -> Match:
    """A normalization without factors (a bias), times (plus) a constant -> one with it."""
    for normalized, constant in (op.inputs, op.inputs[::-1]):
        norm = graph.sole_producer(normalized, *_NORMS)
        factor = rewriter.constants.get(constant)
        shape = rewriter.shapes[op.outputs[0]]
        if norm is None or factor is None or norm.input(operand) or "axes" not in norm.attributes:
            continue
        if factor.ndim > len(shape) or rewriter.shapes[normalized] != shape:
            continue
        inputs = (*norm.inputs, "", "")[:operand]
        return rewriter.replaced_by(
            op, norm.kind, (*inputs, constant), norm.attributes, also=(norm,)
        )
    return None


def matmul_bias(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """A product plus a constant number for each column -> a product with a bias."""
    for summand, constant in (op.inputs, op.inputs[::-1]):
        product, bias = graph.sole_producer(summand, "MatMul"), rewriter.constants.get(constant)
        shape = rewriter.shapes[op.outputs[0]]
        if product is None or bias is None or len(product.inputs) > 2:
            continue
        along = bias.ndim > 0 and bias.size == bias.shape[-1] == shape[-1]
        if along and rewriter.shapes[summand] == shape and summand not in rewriter.scales:
            return rewriter.replaced_by(op, "MatMul", (*product.inputs, constant), also=(product,))
    return None


def swish(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """x sigmoid(x) -> Swish."""
    for x, gate in (op.inputs, op.inputs[::-1]):
        sigmoid = graph.sole_producer(gate, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs == (x,):
            return rewriter.replaced_by(op, "Swish", (x,), also=(sigmoid,))
    return None


def attention(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """softmax(scale q k^T + mask) v -> Attention."""
    if len(op.inputs) != 2:
        return None
    softmax = graph.sole_producer(op.inputs[0], "Softmax")
    shape = rewriter.shapes[op.outputs[0]]
    rank = len(shape)
    if softmax is None or softmax.integer("axis", -1) % rank != rank - 1 or rank not in (3, 4):
        return None
    replaced = [softmax]
    name, mask = softmax.inputs[0], ""
    if (add := graph.sole_producer(name, "Add")) is not None:
        replaced.append(add)
        name, mask = _scores_first(graph, add)
    name, scale, factors = _unscaled(graph, name)
    product = graph.sole_producer(name, "MatMul")
    if product is None or len(product.inputs) != 2:
        return None
    q, q_scale, q_factors = _unscaled(graph, product.inputs[0])
    k, k_scale, k_factors = _unscaled(graph, product.inputs[1])
    replaced += [*factors, product, *q_factors, *k_factors]
    scale *= q_scale * k_scale
    shapes = [rewriter.shapes.get(n, ()) for n in (q, k, op.inputs[1])]
    alike = all(len(s) == rank and s[:-2] == shape[:-2] for s in shapes)
    # A mask may make more scores than the product has.
    alike = alike and rewriter.shapes[softmax.inputs[0]] == rewriter.shapes[product.outputs[0]]
    if not alike or scale <= 0 or shapes[0][-1] > DEEPEST_HEAD or shape[-1] > DEEPEST_HEAD:
        return None
    inputs = (q, _rows_of_keys(graph, rewriter, op, k), op.inputs[1], *((mask,) if mask else ()))
    return rewriter.replaced_by(op, "Attention", inputs, {"scale": scale}, also=replaced)


def _scores_first(graph: UseDefGraph, add: Operation) -> tuple[str, str]:
    """Return the summand that products lead to, and the other."""
    for summand, mask in (add.inputs, add.inputs[::-1]):
        if graph.sole_producer(_unscaled(graph, summand)[0], "MatMul") is not None:
            return summand, mask
    return "", ""


def _unscaled(graph: UseDefGraph, name: str) -> tuple[str, float, tuple[Operation, ...]]:
    """Follow a tensor up through factors that are constant numbers."""
    scale = 1.0
    factors: list[Operation] = []
    while (op := graph.sole_producer(name, "Mul", "Div")) is not None:
        number = graph.scalar(op.inputs[1])
        source = op.inputs[0]
        if number is None and op.kind == "Mul":
            source, number = op.inputs[1], graph.scalar(op.inputs[0])
        if number is None or not math.isfinite(number) or number == 0:
            break
        scale = scale / number if op.kind == "Div" else scale * number
        factors.append(op)
        name = source
    return name, scale, tuple(factors)


def _rows_of_keys(graph: UseDefGraph, rewriter: NetworkRewriter, op: Operation, name: str) -> str:
    """Return keys as rows: the operand of a transposition, or a new transposition."""
    swap = graph.producer(name, "Transpose")
    rank = len(rewriter.shapes[name])
    last = (*range(rank - 2), rank - 1, rank - 2)
    if swap is not None and swap.integers("perm", ()) == last:
        return swap.inputs[0]
    return _transposed(rewriter, op, name)


COMPOSITE_RULES: tuple[Rule, ...] = (
    Rule("RNN GRU LSTM", recurrence_in_steps),
    Rule("Einsum", einsum_as_matmul),
    Rule("Gemm", general_gemm),
    Rule("BatchNormalization", batch_normalization),
    Rule("Reshape", group_normalization),
    Rule("Mul", group_factor),
    Rule("Add", group_factor),
    Rule("Div Mul", layer_normalization),
    Rule("Mul", partial(normalization_factor, operand=1)),
    Rule("Add", partial(normalization_factor, operand=2)),
    Rule("Pad", pad_nothing),
    Rule("Reshape", added_between_reshapes),
    Rule("Add", added_twice),
    Rule("Mul", swish),
    Rule("MatMul", attention),
    Rule("Add", matmul_bias),
)


def _choose_regions(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Where(mask, RoiAlign(x, boxes, images), y) -> RoiAlign(x, boxes, images, mask, y).

    The mask is a number for each region: only those that are chosen cost time.
    """
    mask, sampled, rest = op.inputs
    align = graph.sole_producer(sampled, "RoiAlign")
    shape = graph.network.shapes[op.outputs[0]]
    by_region = (shape[0], *(1 for _ in shape[1:]))
    if align is None or len(align.inputs) != 3 or graph.network.shapes.get(mask) != by_region:
        return None
    if sampled in graph.network.scales or graph.network.shapes[sampled] != shape:
        return None
    return rewriter.replaced_by(
        op, "RoiAlign", (*align.inputs, mask, rest), align.attributes, also=(align,)
    )


CHOSEN_REGION_RULES: tuple[Rule, ...] = (Rule("Where", _choose_regions),)
