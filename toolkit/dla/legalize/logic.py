"""Booleans as numbers 0 and 1, which the DLA multiplies and compares like any others.

and(a, b) = a b, or(a, b) = max(a, b), not(a) = 1 - a, xor(a, b) = (a - b)^2,
where(c, x, y) = c x + (1 - c) y

The operators of a network of conditions are written together: casts stand only where booleans
enter it from elsewhere, or leave it as booleans.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from toolkit.dla.legalize.arithmetic import finite
from toolkit.dla.legalize.draft import Draft
from toolkit.dla.legalize.rewrite import Site, constant_of, image

LOGIC = frozenset({"And", "Not", "Or", "Xor"})


def conditions(site: Site) -> str | None:
    """Write connected logic, and the Where and Cast that read it, as arithmetic."""
    draft, masks = site.draft, dict[ir.Value, ir.Value]()
    draft.restart()
    network = _network(site.node)
    for node in network:
        draft.at(node)
        given = [_mask(draft, value, masks) for value in node.inputs if value is not None]
        masks[node.outputs[0]] = _written(draft, node.op_type, given)
    for node in network:
        made = node.outputs[0]
        left = [use.node for use in made.uses() if use.node not in network]
        read = [reader for reader in dict.fromkeys(left) if _read(draft, reader, made, masks)]
        if made.is_graph_output() or len(read) < len(set(left)):
            draft.beside(node)
            as_boolean = {"to": ir.DataType.BOOL.value}
            draft.finish(made, draft.border("Cast", [masks[made]], as_boolean))
    return None


def _network(start: ir.Node) -> list[ir.Node]:
    found, open_nodes = {start}, [start]
    while open_nodes:
        node = open_nodes.pop()
        near = [value.producer() for value in node.inputs if value is not None]
        near += [use.node for use in node.outputs[0].uses()]
        for other in near:
            if other is None or other in found or other.graph is not start.graph:
                continue
            if other.op_type in LOGIC and image(other.outputs[0]) is not None:
                found.add(other)
                open_nodes.append(other)
    graph = start.graph
    assert graph is not None
    return [node for node in graph if node in found]


def _mask(draft: Draft, value: ir.Value, masks: dict[ir.Value, ir.Value]) -> ir.Value:
    """The number 0 or 1 of a boolean."""
    if value not in masks:
        constant = constant_of(value)
        masks[value] = (
            draft.border("Cast", [value], {"to": ir.DataType.FLOAT.value})
            if constant is None
            else draft.constant(constant.astype(np.float32))
        )
    return masks[value]


def _written(draft: Draft, op: str, given: Sequence[ir.Value]) -> ir.Value:
    if op == "Not":
        return _inverse(draft, given[0])
    if op == "Xor":
        negative = draft.add("Mul", [given[1], draft.number(-1.0, given[1])])
        apart = draft.add("Add", [negative, given[0]])
        return draft.add("Mul", [apart, apart])
    return draft.add("Mul" if op == "And" else "Max", given)


def _inverse(draft: Draft, mask: ir.Value) -> ir.Value:
    negative = draft.add("Mul", [mask, draft.number(-1.0, mask)])
    return draft.add("Add", [negative, draft.number(1.0, mask)])


def _read(draft: Draft, reader: ir.Node, made: ir.Value, masks: dict[ir.Value, ir.Value]) -> bool:
    """Write a Cast to numbers or a Where that reads a condition; False: it is neither."""
    result = reader.outputs[0]
    if result.dtype != ir.DataType.FLOAT or reader.graph is not draft.graph:
        return False
    if reader.op_type == "Cast" and not result.is_graph_output():
        draft.at(reader)
        draft.finish(result, masks[made])
        return True
    if reader.op_type != "Where" or reader.inputs[0] is not made or image(result) is None:
        return False
    if not all(finite(value) for value in reader.inputs[1:]):
        return False
    draft.at(reader)
    mask = masks[made]
    parts = [
        draft.add("Mul", [share, value])
        for value, share in zip(reader.inputs[1:], (mask, _inverse(draft, mask)), strict=True)
    ]
    draft.finish(result, draft.add("Add", parts))
    return True
