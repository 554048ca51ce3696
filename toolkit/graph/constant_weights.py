"""Change a constant operand of one node without touching other readers of it."""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


def set_constant(
    graph: ir.Graph, node: ir.Node, index: int, array: NDArray[Any], name: str
) -> None:
    """Let `node` read `array` as operand `index`, which may be one behind its last.

    A constant that only this node reads keeps its name; else a new initializer is made, called
    `name` or, where that is taken, `name` with a number.
    """
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is not None and value.is_initializer() and _only_reader(value, node):
        value.const_value = ir.tensor(array, name=value.name)
        value.shape = ir.Shape(array.shape)
        return
    free = free_name(graph, name)
    fresh = ir.Value(name=free, const_value=ir.tensor(array, name=free))
    fresh.shape = ir.Shape(array.shape)
    fresh.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    graph.register_initializer(fresh)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, fresh)


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The array in float32, contiguous; weights are computed in float64 and stored in this."""
    return np.ascontiguousarray(array, np.float32)


def _only_reader(value: ir.Value, node: ir.Node) -> bool:
    uses = list(value.uses())
    return len(uses) == 1 and uses[0].node is node and not value.is_graph_output()


def free_name(graph: ir.Graph, name: str) -> str:
    """Return `name`, or where a tensor or node has it, `name` with the first free number."""
    taken = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    for node in graph.all_nodes():
        named = (node, *node.inputs, *node.outputs)
        taken |= {str(one.name) for one in named if one is not None}
    free, number = name, 1
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free
