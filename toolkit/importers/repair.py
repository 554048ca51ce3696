"""Puts right what exporters write against the standard and onnxruntime takes all the same."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import onnx

# What exporters call a dimension that has no name; equal ones are not the same dimension.
UNNAMED = frozenset({"?", "-1", "None", "none", "unk", "unknown"})


def sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically, as ONNX requires.

    onnxruntime runs any order, and its converter to FP16 writes new nodes at the end.
    """
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output}
    needs = {
        at: {makers[name] for name in _names_read(node) if name in makers}
        for at, node in enumerate(graph.node)
    }
    if all(before < at for at, producers in needs.items() for before in producers):
        return
    try:
        order = tuple(TopologicalSorter(needs).static_order())
    except CycleError:
        return  # the checker refuses it by name
    ordered = onnx.GraphProto(node=[graph.node[at] for at in order])
    del graph.node[:]
    graph.node.extend(ordered.node)


def clear_false_sizes(graph: onnx.GraphProto) -> None:
    """Make dimensions unknown that exporters write as -1, 0 or "?" for want of a size or a name."""
    constants = {tensor.name for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            false_size = dim.HasField("dim_value") and dim.dim_value < 1
            if value.name not in constants and (false_size or dim.dim_param in UNNAMED):
                dim.Clear()
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                clear_false_sizes(inner)


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node reads, in its branches and bodies, too; "" is none."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _names_read(inner)
