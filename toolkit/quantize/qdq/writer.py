"""Writes QuantizeLinear and DequantizeLinear into a graph, under names that are free in it."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


class QdqWriter:
    """Adds nodes and constants to one graph; the caller sorts it at the end."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._taken = _names(graph)

    def quantize(
        self,
        value: ir.Value,
        parameters: Sequence[ir.Value],
        output: str,
        *,
        dtype: ir.DataType,
        axis: int | None = None,
        label: str | None = None,
    ) -> ir.Value:
        """Q of a value with `parameters` scale and zero point; returns its integers.

        `output` and `label` are the names wished for the result and, after the operator, for the
        node (None: that of the result); `axis` that of the channels of a scale of several.
        """
        inputs = (value, *parameters)
        return self._node("QuantizeLinear", inputs, output, dtype=dtype, axis=axis, label=label)

    def dequantize(
        self,
        stored: ir.Value,
        parameters: Sequence[ir.Value],
        output: str,
        *,
        axis: int | None = None,
        label: str | None = None,
    ) -> ir.Value:
        """DQ of integers; returns their float32. Arguments as in `quantize`."""
        inputs, dtype = (stored, *parameters), ir.DataType.FLOAT
        return self._node("DequantizeLinear", inputs, output, dtype=dtype, axis=axis, label=label)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer that holds an array."""
        name = self._free(name)
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape = ir.Shape(array.shape)
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self._graph.register_initializer(value)
        return value

    def _node(
        self,
        op: str,
        inputs: Sequence[ir.Value],
        output: str,
        *,
        dtype: ir.DataType,
        axis: int | None,
        label: str | None,
    ) -> ir.Value:
        name = self._free(output)
        made = ir.Value(name=name, shape=inputs[0].shape, type=ir.TensorType(dtype))
        attributes = [] if axis is None else [ir.AttrInt64("axis", axis)]
        node_name = self._free(f"{op}_{label or name}")
        self._graph.append(ir.Node("", op, inputs, attributes, outputs=[made], name=node_name))
        return made

    def _free(self, name: str) -> str:
        """The name, or one like it that the model does not use for anything else."""
        free, n = name, 1
        while free in self._taken:
            free, n = f"{name}_{n}", n + 1
        self._taken.add(free)
        return free


def _names(graph: ir.Graph) -> set[str]:
    """Every name of a node or value in the graph and in the graphs inside its nodes."""
    found = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    for node in graph.all_nodes():
        found.add(str(node.name))
        found |= {str(value.name) for value in (*node.inputs, *node.outputs) if value is not None}
    return found
