"""Chains of layers to place."""

from onnx import helper
from planning_graphs import constant, graph_of


def chain(*ops: str, channels: int = 64, side: int = 56):
    """A chain of nodes n0, n1, ...: tensors x -> t0 -> t1 ..., the last one the output y."""
    nodes, weights, data = [], {}, "x"
    for index, op in enumerate(ops):
        made = "y" if index == len(ops) - 1 else f"t{index}"
        operands, pads = [data], {}
        if op == "Conv":
            weights[f"w{index}"] = constant(channels, channels, 3, 3)
            operands, pads = [data, f"w{index}"], {"pads": [1] * 4}
        nodes.append(helper.make_node(op, operands, [made], name=f"n{index}", **pads))
        data = made
    return graph_of(nodes, {"x": (1, channels, side, side)}, ["y"], weights)
