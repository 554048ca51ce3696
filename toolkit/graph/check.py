"""Refuses nodes that ONNX's definition of their operator does not allow, by name.

Rules, rewrites, costs and kernels read ranks, windows and types of nodes as ONNX defines them. A
node that contradicts its definition is refused here, once, and not in each of them.
"""

import onnx_ir as ir
from onnx_ir.passes.common._c_api_utils import call_onnx_api  # leaves large weights out

from toolkit.errors import ImportModelError, first_line
from toolkit.graph import native


def check_nodes(model: ir.Model) -> None:
    """Check each node of the graph alone; the model has gone through the passes.

    Raises ImportModelError: a node has inputs, attributes or results that contradict its operator.
    """
    try:
        bad = call_onnx_api(native.bad_nodes, model)
    except ir.serde.SerdeError as err:
        raise ImportModelError(
            f"the graph cannot be written as ONNX ({first_line(err.__cause__ or err)}); "
            "export the model again"
        ) from err
    if not bad:
        return
    node = bad[0]
    more = f" (and {len(bad) - 1} more such nodes)" if len(bad) > 1 else ""
    raise ImportModelError(
        f"node {node.node!r} ({node.op}) contradicts its operator{more}: {first_line_of(node)}; "
        "export the model again"
    )


def first_line_of(node: native.BadNode) -> str:
    """Return what ONNX says against a node, in one line."""
    return first_line(ValueError(node.reason)).rstrip(".")
