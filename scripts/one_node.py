"""Graphs of a single node, called "node": the cases of the DLA's rules."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from toolkit.graph.node_view import NodeView, view

Shape = Sequence[int | str | None] | None
Operand = Shape | np.ndarray | str  # a computed tensor, a constant, or "" for none


def constant(*shape: int, value: float = 1.0) -> np.ndarray:
    """Return a constant operand of one repeated value."""
    return np.full(shape, value, np.float32)


def numbers(*values: float, dtype: type = np.int64) -> np.ndarray:
    """Return a constant vector, of integers unless told otherwise."""
    return np.array(values, dtype)


def one_node(
    op: str,
    operands: Sequence[Operand],
    *results: Shape,
    before: str = "",
    after: str = "",
    domain: str = "",
    dtype: int = TensorProto.FLOAT,
    out_dtype: int | None = None,
    opset: int = 19,
    **attributes: object,
) -> NodeView:
    """View a node called "node"; `before` and `after` are operators that make and use its data."""
    names = [("" if isinstance(o, str) else f"in{i}") for i, o in enumerate(operands)]
    outputs = [f"out{i}" for i in range(len(results))]
    nodes = [helper.make_node(op, names, outputs, name="node", domain=domain, **attributes)]
    constants, values = [], []
    for name, operand in zip(names, operands, strict=True):
        if isinstance(operand, np.ndarray):
            constants.append(numpy_helper.from_array(operand, name))
        elif name:
            values.append(helper.make_tensor_value_info(name, dtype, operand))
    results_info = [
        helper.make_tensor_value_info(name, out_dtype or dtype, shape)
        for name, shape in zip(outputs, results, strict=True)
    ]
    if before:
        nodes.insert(0, helper.make_node(before, ["start"], ["in0"], name="before"))
        values = [helper.make_tensor_value_info("start", dtype, None), *values]
    if after:
        nodes.append(helper.make_node(after, ["out0"], ["end"], name="after"))
    inputs = [value for value in values if not (before and value.name == "in0")]
    graph = helper.make_graph(
        nodes, "one", inputs, [] if after else results_info, constants, value_info=values[1:]
    )
    if before or after:
        known = {value.name for value in graph.value_info}
        graph.value_info.extend(v for v in values + results_info if v.name not in known)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]))
    return view(next(node for node in model.graph if node.name == "node"), opset)
