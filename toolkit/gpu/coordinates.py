"""Boxes and scores of a detector, which FP16 is too coarse for.

From 512 to 1024 pixels FP16 knows halves of a pixel, and scores near 1 in steps of 0.0005. What
NonMaxSuppression and RoiAlign read is therefore stored in its own type, from the arithmetic that
computes it on; products of matrices before it stay in the precision of the build.
"""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from toolkit.gpu.data_dependent_shapes.symbolic import PADDED
from toolkit.gpu.ir.elementwise_ops import ARRANGED, OPERATORS

_COMPUTED = frozenset({*OPERATORS, "LogSoftmax", "Softmax"})
_READ: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("NonMaxSuppression", PADDED), (0, 1)),
    "RoiAlign": (1,),
}


def coordinate_tensors(models: Sequence[ir.Model]) -> frozenset[str]:
    """Return the tensors that are stored in their own type; `models`: all segments of a model."""
    nodes = [node for model in models for node in model.graph.all_nodes()]
    producers = {str(value.name): node for node in nodes for value in node.outputs}
    read = [
        str(value.name)
        for node in nodes
        for at in _READ.get(node.op_type, ())
        if (value := node.inputs[at] if at < len(node.inputs) else None) is not None
    ]
    exact: dict[str, bool] = {}
    for name in read:
        _trace(name, producers, exact)
    return frozenset(name for name, is_exact in exact.items() if is_exact)


def _trace(name: str, producers: Mapping[str, ir.Node], exact: dict[str, bool]) -> None:
    """Note of a tensor and what it is computed from whether arithmetic on numbers made it."""
    pending = [name]
    while pending:
        last = pending[-1]
        node = producers.get(last)
        arithmetic = node is not None and node.domain == "" and node.op_type in _COMPUTED
        operands = _operands(node) if node is not None else []
        ahead = [operand for operand in operands if operand not in exact]
        if last not in exact and ahead:
            exact[last] = arithmetic
            pending += ahead
            continue
        pending.pop()
        exact[last] = arithmetic or any(exact[operand] for operand in operands)
        if arithmetic:  # constants beside it, too
            exact |= {operand: True for operand in operands if operand not in producers}


def _operands(node: ir.Node) -> list[str]:
    """Return the numbers that a node computes with or arranges; none of other nodes."""
    count = len(node.inputs) if node.op_type in OPERATORS else ARRANGED.get(node.op_type, 0)
    if node.domain != "":
        count = 0
    return [str(value.name) for value in node.inputs[:count] if value is not None]
