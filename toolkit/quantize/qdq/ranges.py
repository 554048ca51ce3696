"""Ranges that Q/DQ models leave out, and which of their nodes compute in floating point.

Operators that move or average numbers keep a range: amax(f(x)) = amax(x) bounds the result, and a
concatenation's is the largest of its operands'.
"""

from collections.abc import Mapping

import onnx_ir as ir

from toolkit.quantize.qdq.nodes import constant_of, has_weight, is_dequantize, is_quantize
from toolkit.quantize.quantize import QUANTIZED_OPS

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
# Of these, operators whose result holds the same numbers.
_SAME_NUMBERS = frozenset(
    {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
# Operators that run in the kernel of the INT8 product before them.
_FOLLOWING_OPS = RANGE_KEEPING_OPS | {"Add", "Clip", "Concat", "LeakyRelu", "Sigmoid", "Sum"}


def infer_ranges(
    graph: ir.Graph, amax: Mapping[str, float]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Carry ranges back over what moves numbers, forward, then backward over the rest.

    Returns all ranges, and the names of those that are new.
    """
    known = {**_backward(graph, amax, _SAME_NUMBERS), **amax}
    for node in graph:
        found = _forward(node, known)
        if found is not None:
            for out in node.outputs:
                if _is_float_activation(out):
                    known.setdefault(str(out.name), found)
    known = {**known, **_backward(graph, known, None)}
    names = (*amax, *(name for name in known if name not in amax))
    return {name: known[name] for name in names}, names[len(amax) :]


def _backward(
    graph: ir.Graph, known: Mapping[str, float], ops: frozenset[str] | None
) -> dict[str, float]:
    """The ranges that operands without one have from results; `ops` None: of all operators."""
    found: dict[str, float] = {}
    for node in reversed(list(graph)):
        result = str(node.outputs[0].name)
        limit = known.get(result, found.get(result))
        if limit is None or (ops is not None and node.op_type not in ops):
            continue
        for name in _sources(node):
            if name not in known:
                found[name] = max(limit, found.get(name, 0.0))
    return found


def nodes_in_float(graph: ir.Graph) -> tuple[str, ...]:
    """The nodes of a Q/DQ graph that compute on activations, but not on INT8.

    A product is INT8 if what it reads is on a grid: made by DequantizeLinear, moved or pooled since
    at most. What follows it in its kernel is INT8, too.
    """
    on_grid: set[ir.Value] = set()
    made_in_int8: set[ir.Value] = set()
    in_float: list[str] = []
    for node in graph:
        if is_quantize(node) or is_dequantize(node):
            on_grid.update(node.outputs)
            continue
        operands = [v for v in node.inputs if v is not None and _is_float_activation(v)]
        if not operands:
            continue
        if all(value in on_grid for value in operands) and not _has_float_weight(node):
            if _keeps_range(node):
                on_grid.update(node.outputs)
            made_in_int8.update(node.outputs)
        elif (
            (node.op_type in _FOLLOWING_OPS or _keeps_range(node))
            and not has_weight(node)
            and all(value in on_grid | made_in_int8 for value in operands)
        ):
            made_in_int8.update(node.outputs)
        else:
            in_float.append(str(node.name))
    return tuple(in_float)


def _keeps_range(node: ir.Node) -> bool:
    """Whether the results lie between the least and the largest number of the first operand."""
    if node.op_type == "Resize":
        # Weights of linear interpolation are positive and add up to 1; those of cubic are not.
        return node.attributes.get_string("mode", "nearest") in {"nearest", "linear"}
    return node.op_type in RANGE_KEEPING_OPS


def _has_float_weight(node: ir.Node) -> bool:
    row = QUANTIZED_OPS[node.op_type] if has_weight(node) else None
    return (
        row is not None
        and row.weight is not None
        and constant_of(node.inputs[row.weight]) is not None
    )


def _forward(node: ir.Node, known: Mapping[str, float]) -> float | None:
    found = [known.get(name) for name in _sources(node)]
    present = [limit for limit in found if limit is not None]
    return max(present) if present and len(present) == len(found) else None


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
