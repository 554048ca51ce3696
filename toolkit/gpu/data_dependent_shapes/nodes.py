"""New nodes and constants of a graph, with new names."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from toolkit.graph.rewriter import UniqueNames


class NewNodes:
    """Adds nodes and constants with new names to a graph, which is to be sorted then."""

    def __init__(self, graph: ir.Graph, names: UniqueNames) -> None:
        self._graph = graph
        self._names = names
        self._constants: dict[tuple[str, bytes], ir.Value] = {}
        self._added: list[ir.Node] = []

    def name(self, preferred: str) -> str:
        """Return a name that is not in use."""
        return self._names.take(preferred)

    def constant(self, name: str, values: npt.NDArray[Any]) -> ir.Value:
        """Return a constant; equal ones of a name once."""
        key = (name, values.tobytes())
        if key not in self._constants:
            value = ir.Value(name=self.name(f"padding/{name}"), const_value=ir.tensor(values))
            value.dtype, value.shape = ir.DataType.from_numpy(values.dtype), ir.Shape(values.shape)
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def add(
        self, op: str, inputs: list[ir.Value], attributes: Mapping[str, int] | None = None
    ) -> ir.Value:
        """Add a node of one result."""
        return self.put(ir.node(op, inputs, attributes=dict(attributes or {})), f"padding/{op}")

    def copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """Add a node as another one, of one result, with other operands."""
        copied = ir.Node("", node.op_type, inputs, node.attributes.values(), num_outputs=1)
        old, new = node.outputs[0], self.put(copied, f"padding/{node.op_type}")
        new.type, new.shape = old.type, old.shape
        return new

    def put(self, node: ir.Node, name: str) -> ir.Value:
        """Add a node under a new name like this one; return its first result."""
        node.name = self.name(name)
        for at, value in enumerate(node.outputs):
            value.name = self.name(f"{node.name}_output{at or ''}")
        self._graph.append(node)
        self._added.append(node)
        return node.outputs[0]

    def take_back(self) -> None:
        """Remove all nodes and constants that were added, which nothing else reads."""
        self._graph.remove(self._added, safe=True)
        self._added.clear()
        for value in self._constants.values():
            del self._graph.initializers[str(value.name)]
        self._constants.clear()

    def take_output(self, value: ir.Value, new: ir.Value) -> None:
        """Let a tensor leave the graph in the place of another, under its name."""
        self._graph.outputs[self._graph.outputs.index(value)] = new
        name, value.name = value.name, self.name(f"{value.name}_padded")
        new.name = name
