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
from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site, constant_of, image

LOGIC = frozenset({"And", "Not", "Or", "Xor"})


def conditions(site: Site) -> Outcome:
    """Write connected logic, and the Where and Cast that read it, as arithmetic."""
    rewriter, masks = site.rewriter, dict[ir.Value, ir.Value]()
    rewriter.restart()
    network = _network(site.node)
    for node in network:
        rewriter.replace(node)
        operands = [_mask(rewriter, value, masks) for value in node.inputs if value is not None]
        masks[node.outputs[0]] = _written(rewriter, node.op_type, operands)
    for node in network:
        condition = node.outputs[0]
        outside = [use.node for use in condition.uses() if use.node not in network]
        read = [
            reader for reader in dict.fromkeys(outside) if _read(rewriter, reader, condition, masks)
        ]
        if condition.is_graph_output() or len(read) < len(set(outside)):
            rewriter.set_origin(node)
            as_boolean = {"to": ir.DataType.BOOL.value}
            rewriter.replace_uses(
                condition, rewriter.add_border("Cast", [masks[condition]], as_boolean)
            )
    return rewriter.replacement()


def _network(start: ir.Node) -> list[ir.Node]:
    network, open_nodes = {start}, [start]
    while open_nodes:
        node = open_nodes.pop()
        near = [value.producer() for value in node.inputs if value is not None]
        near += [use.node for use in node.outputs[0].uses()]
        for neighbour in near:
            if neighbour is None or neighbour in network or neighbour.graph is not start.graph:
                continue
            if neighbour.op_type in LOGIC and image(neighbour.outputs[0]) is not None:
                network.add(neighbour)
                open_nodes.append(neighbour)
    graph = start.graph
    assert graph is not None
    return [node for node in graph if node in network]


def _mask(rewriter: GraphRewriter, value: ir.Value, masks: dict[ir.Value, ir.Value]) -> ir.Value:
    """The number 0 or 1 of a boolean."""
    if value not in masks:
        constant = constant_of(value)
        masks[value] = (
            rewriter.add_border("Cast", [value], {"to": ir.DataType.FLOAT.value})
            if constant is None
            else rewriter.constant(constant.astype(np.float32))
        )
    return masks[value]


def _written(rewriter: GraphRewriter, op: str, operands: Sequence[ir.Value]) -> ir.Value:
    if op == "Not":
        return _inverse(rewriter, operands[0])
    if op == "Xor":
        negative = rewriter.add("Mul", [operands[1], rewriter.scalar(-1.0, operands[1])])
        apart = rewriter.add("Add", [negative, operands[0]])
        return rewriter.add("Mul", [apart, apart])
    return rewriter.add("Mul" if op == "And" else "Max", operands)


def _inverse(rewriter: GraphRewriter, mask: ir.Value) -> ir.Value:
    negative = rewriter.add("Mul", [mask, rewriter.scalar(-1.0, mask)])
    return rewriter.add("Add", [negative, rewriter.scalar(1.0, mask)])


def _read(
    rewriter: GraphRewriter, reader: ir.Node, condition: ir.Value, masks: dict[ir.Value, ir.Value]
) -> bool:
    """Write a Cast to numbers or a Where that reads a condition; False: it is neither."""
    result = reader.outputs[0]
    if result.dtype != ir.DataType.FLOAT or reader.graph is not rewriter.graph:
        return False
    if reader.op_type == "Cast" and not result.is_graph_output():
        rewriter.replace(reader)
        rewriter.replace_uses(result, masks[condition])
        return True
    if reader.op_type != "Where" or reader.inputs[0] is not condition or image(result) is None:
        return False
    if not all(finite(value) for value in reader.inputs[1:]):
        return False
    rewriter.replace(reader)
    mask = masks[condition]
    parts = [
        rewriter.add("Mul", [share, value])
        for value, share in zip(reader.inputs[1:], (mask, _inverse(rewriter, mask)), strict=True)
    ]
    rewriter.replace_uses(result, rewriter.add("Add", parts))
    return True
