"""Infer the ranges that Q/DQ models omit, and the nodes that compute in floating point.

Operators that move or average values keep a range: amax(x) bounds f(x). The range of a Concat is
the largest of its operands.
"""

from collections.abc import Mapping, Set

import onnx_ir as ir

from toolkit.quantize.qdq.nodes import constant_of, has_weight, is_dequantize, is_quantize
from toolkit.quantize.qdq.writer import STORED
from toolkit.quantize.quantize import INT8_READS, QUANTIZED_OPS

# Operators whose first operand and results share a range.
RANGE_KEEPING_OPS = frozenset(
    {
        "AveragePool",
        "DepthToSpace",
        "Dropout",
        "Flatten",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Identity",
        "MaxPool",
        "Pad",
        "ReduceMax",
        "ReduceMean",
        "Relu",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    }
)
# Of these, operators whose result holds the same values.
_SAME_NUMBERS = frozenset(
    {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
# Operators fused into the epilogue of the INT8 node before them.
_FOLLOWING_OPS = RANGE_KEEPING_OPS | {"Add", "Clip", "Concat", "LeakyRelu", "Sigmoid", "Sum"}


def infer_ranges(
    graph: ir.Graph, amax: Mapping[str, float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Propagate ranges backward over data movement, then forward, then backward over the rest.

    Returns all ranges, and the names of the inferred ones.
    """
    known = {**_backward(graph, amax, _SAME_NUMBERS), **amax}
    for node in graph:
        limit = _forward(node, known)
        if limit is not None:
            for out in node.outputs:
                if _is_float_activation(out):
                    known.setdefault(str(out.name), limit)
    known = {**known, **_backward(graph, known, None)}
    names = (*amax, *(name for name in known if name not in amax))
    return {name: known[name] for name in names}, names[len(amax) :]


def _backward(
    graph: ir.Graph, known: Mapping[str, float], ops: frozenset[str] | None
) -> dict[str, float]:
    """The ranges of operands, inferred from results; `ops` None: over all operators."""
    inferred: dict[str, float] = {}
    for node in reversed(list(graph)):
        result = str(node.outputs[0].name)
        limit = known.get(result, inferred.get(result))
        if limit is None or (ops is not None and node.op_type not in ops):
            continue
        for name in _sources(node):
            if name not in known:
                inferred[name] = max(limit, inferred.get(name, 0.0))
    return inferred


def nodes_in_float(graph: ir.Graph) -> tuple[str, ...]:
    """The nodes of a quantized graph that compute on activations in floating point.

    A convolution or GEMM is INT8 if its operands are dequantized, at most moved or pooled since.
    Nodes in its epilogue are INT8 too. The graph has Q/DQ, or the metadata of `FloatWriter`.
    """
    dequantized: set[ir.Value | None] = {None}  # None: what its reader reads in INT8
    dequantized.update(value for value in graph.initializers.values() if STORED in value.meta)
    int8_results: set[ir.Value] = set()
    in_float: list[str] = []
    for node in graph:
        if is_quantize(node) or is_dequantize(node):
            dequantized.update(node.outputs)
            continue
        marked = node.meta.get(INT8_READS, {})
        operands = [
            None if index in marked else value
            for index, value in enumerate(node.inputs)
            if value is not None and (_is_float_activation(value) or value in dequantized)
        ]
        if not operands:
            continue
        if all(value in dequantized for value in operands) and not _has_float_weight(
            node, dequantized
        ):
            if _keeps_range(node):
                dequantized.update(node.outputs)
            int8_results.update(node.outputs)
        elif (
            (node.op_type in _FOLLOWING_OPS or _keeps_range(node))
            and not has_weight(node)
            and all(value in dequantized | int8_results for value in operands)
        ):
            int8_results.update(node.outputs)
        else:
            in_float.append(str(node.name))
    return tuple(in_float)


def _keeps_range(node: ir.Node) -> bool:
    """True if the results are within the minimum and maximum of the first operand."""
    if node.op_type == "Resize":
        # Weights of linear interpolation are positive and add up to 1; those of cubic are not.
        return node.attributes.get_string("mode", "nearest") in {"nearest", "linear"}
    return node.op_type in RANGE_KEEPING_OPS


def _has_float_weight(node: ir.Node, dequantized: Set[ir.Value | None]) -> bool:
    row = QUANTIZED_OPS[node.op_type] if has_weight(node) else None
    return (
        row is not None
        and row.weight is not None
        and constant_of(node.inputs[row.weight]) is not None
        and node.inputs[row.weight] not in dequantized
    )


def _forward(node: ir.Node, known: Mapping[str, float]) -> float | None:
    limits = [known.get(name) for name in _sources(node)]
    known_limits = [limit for limit in limits if limit is not None]
    return max(known_limits) if known_limits and len(known_limits) == len(limits) else None


def _sources(node: ir.Node) -> list[str]:
    """The operands whose range the results share."""
    if node.domain != "":
        return []
    if node.op_type == "Concat":
        values = [value for value in node.inputs if value is not None]
        constant = any(constant_of(value) is not None for value in values)
        return [] if constant else [str(value.name) for value in values]
    if not _keeps_range(node) or not node.inputs or node.inputs[0] is None:
        return []
    first = node.inputs[0]
    return [] if constant_of(first) is not None else [str(first.name)]


def _is_float_activation(value: ir.Value) -> bool:
    return constant_of(value) is None and value.dtype in {ir.DataType.FLOAT, None}
