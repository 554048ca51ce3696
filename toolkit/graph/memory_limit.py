"""Refuses graphs that take too much memory: sizes are judged before they are made."""

import math

import onnx_ir as ir

from device.profile import Profile
from toolkit.errors import ImportModelError
from toolkit.graph.max_memory import max_memory_bytes, size_text
from toolkit.graph.node_view import subgraphs


def value_bytes(value: ir.Value) -> int | None:
    """Return the bytes of a tensor, sizes that are not known counted as 1; None: no shape."""
    if value.shape is None or value.dtype is None:
        return None
    bits = {ir.DataType.STRING: 64, ir.DataType.UNDEFINED: 8}.get(value.dtype)
    return -(-_elements(value) * (bits or value.dtype.bitwidth) // 8)


def check_host_memory(graph: ir.Graph) -> None:
    """Refuse a graph whose tensors would not fit into the limit while it runs on this machine.

    A tensor lives from its node to its last reader; branches and bodies run beside what lives then.
    Raises ImportModelError, which names the node.
    """
    _check_graph(graph, 0, max_memory_bytes())


def _check_graph(graph: ir.Graph, outer_bytes: int, limit: int) -> None:
    nodes = list(graph)
    last_read = {value: at for at, node in enumerate(nodes) for value in node.inputs}
    last_read |= {value: len(nodes) for value in graph.outputs}
    alive = {value: value_bytes(value) or 0 for value in graph.inputs}
    total = outer_bytes + sum(alive.values())
    for at, node in enumerate(nodes):
        results = {value: value_bytes(value) or 0 for value in node.outputs}
        alive |= results
        total += sum(results.values())
        if total > limit:
            raise _too_large(node, sum(results.values()), total, limit)
        for inner in subgraphs(node):
            _check_graph(inner, total, limit)
        for value in (*node.inputs, *node.outputs):
            if value in alive and last_read.get(value, at) <= at:
                total -= alive.pop(value)


def check_device_memory(graph: ir.Graph, profile: Profile) -> None:
    """Refuse a node whose tensors alone have more bytes than the memory of the device.

    An element counts as one byte, the least that an engine makes of it. Raises ImportModelError.
    """
    limit = int(profile.memory.gb.value * 1e9)
    for node in graph.all_nodes():
        tensors = {value for value in (*node.inputs, *node.outputs) if value is not None}
        needed = sum(_elements(value) for value in tensors)
        if needed > limit:
            shapes = ", ".join(str(value.shape) for value in node.outputs)
            raise ImportModelError(
                f"node {node.name!r} ({node.op_type}) makes {shapes}; with what it reads that is "
                f"more than {size_text(needed)}, but {profile.name} has {size_text(limit)}: give "
                "smaller sizes with --shape, or take another profile"
            )


def _elements(value: ir.Value) -> int:
    if value.shape is None:
        return 0
    return math.prod(max(0, dim) for dim in value.shape if isinstance(dim, int))


def _too_large(node: ir.Node, result_bytes: int, total: int, limit: int) -> ImportModelError:
    shapes = ", ".join(str(value.shape) for value in node.outputs)
    return ImportModelError(
        f"node {node.name!r} ({node.op_type}) makes {shapes}, {size_text(result_bytes)}, so that "
        f"{size_text(total)} are in use, above the limit of {size_text(limit)}; "
        "give smaller sizes with --shape, or raise the limit with `tandem build --max-memory`"
    )
