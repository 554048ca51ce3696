"""Let NonMaxSuppression end where later nodes take no more of its boxes.

A detector suppresses thousands of proposals and then takes the first 1000 or 100, best first. The
operator selects boxes in that order, so it may stop there; the time that it takes grows with the
boxes that it keeps.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

_BOX = 2  # the column of its result with the box: [batch, class, box]
_ONE_SIZE = ("Squeeze", "Cast", "Identity")  # nodes that keep the order of rows


def limit_boxes(model: ir.Model) -> str:
    """Give each NonMaxSuppression the largest number of boxes that is read; say how many."""
    changed = 0
    results = _results_of_branches(model)
    for node in list(model.graph.all_nodes()):
        if node.op_type != "NonMaxSuppression" or node.domain:
            continue
        read = _rows_read(node, results)
        if read is None or read >= _most(node):
            continue
        _set_most(node, read)
        changed += 1
    return f"ended {changed} NonMaxSuppression where no more boxes are read" if changed else ""


def _results_of_branches(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Return what an If gives for each output of its branches."""
    return {
        inner: outer
        for node in model.graph.all_nodes()
        if node.op_type == "If" and not node.domain
        for attribute in node.attributes.values()
        for inner, outer in zip(attribute.as_graph().outputs, node.outputs, strict=True)
    }


def _rows_read(node: ir.Node, results: Mapping[ir.Value, ir.Value]) -> int | None:
    """Return how many of the first boxes are read, None if that is not known, or all may be.

    With several images or classes the result is no longer in the order of the scores.
    """
    scores = node.inputs[1]
    if scores is None or scores.shape is None or tuple(scores.shape[:2]) != (1, 1):
        return None
    column = _only_reader(node.outputs[0])
    if column is None or column.op_type != "Gather" or _axis(column) != 1:
        return None
    if _numbers(column.inputs[1]) != [_BOX]:
        return None
    value: ir.Value | None = column.outputs[0]
    while value is not None:
        if value.is_graph_output():
            value = None if value.uses() else results.get(value)
            continue
        reader = _only_reader(value)
        if reader is not None and reader.op_type in _ONE_SIZE:
            value = reader.outputs[0]
            continue
        return _slice_end(reader)
    return None


def _slice_end(node: ir.Node | None) -> int | None:
    """Return n of a Slice that takes the first n rows."""
    if node is None or node.op_type != "Slice":
        return None
    starts, ends, axes, steps = (
        _numbers(node.inputs[at]) if at < len(node.inputs) else None for at in (1, 2, 3, 4)
    )
    if starts != [0] or ends is None or len(ends) != 1 or ends[0] < 1:
        return None
    return ends[0] if axes in (None, [0]) and steps in (None, [1]) else None


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = tuple(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _numbers(value: ir.Value | None) -> list[int] | None:
    tensor = None if value is None else value.const_value
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def _most(node: ir.Node) -> int:
    """Return the largest number of boxes that a node may select; absent, it is 0: none at all."""
    numbers = _numbers(node.inputs[2]) if len(node.inputs) > 2 else None
    return numbers[0] if numbers else 0


def _set_most(node: ir.Node, most: int) -> None:
    name = f"{node.name or node.outputs[0].name}.most"
    tensor = ir.tensor(np.array([most], np.int64), name=name)
    constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=name)
    constant.outputs[0].name = name
    constant.outputs[0].const_value = tensor
    assert node.graph is not None
    node.graph.insert_before(node, constant)
    node.replace_input_with(2, constant.outputs[0])
