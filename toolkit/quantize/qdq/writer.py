"""Add QuantizeLinear and DequantizeLinear nodes to a graph, under unused names; or none of them.

A build writes the same graph twice: `QdqWriter` for CPUs and for kernels, `FloatWriter` for the
forms of TensorRT, whose Q/DQ or ranges are their own.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from toolkit.quantize.weights import StoredWeight, dequantized

STORED = "stored"
"""Metadata of a float constant: the StoredWeight that it was restored from."""


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
        """Add a Q node with `parameters` (scale, zero point); return its INT8 output.

        `output`: preferred name of the result. `label`: suffix of the node name, None: the name of
        the result. `axis`: channel axis of a per-channel scale.
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
        """Add a DQ node; return its float32 output. Arguments as in `quantize`."""
        inputs, dtype = (stored, *parameters), ir.DataType.FLOAT
        return self._node("DequantizeLinear", inputs, output, dtype=dtype, axis=axis, label=label)

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer that holds an array."""
        value = _constant(self._free(name), array)
        self._graph.register_initializer(value)
        return value

    def call(
        self,
        op: tuple[str, str],
        inputs: Sequence[ir.Value],
        outputs: Mapping[str, ir.DataType],
        attributes: Mapping[str, int],
    ) -> tuple[ir.Value, ...]:
        """Add a node of another operator, (domain, name); return its results.

        `outputs`: their preferred names and types. The first has the shape of the first input.
        """
        results = [
            ir.Value(name=self._free(name), type=ir.TensorType(dtype))
            for name, dtype in outputs.items()
        ]
        results[0].shape = inputs[0].shape
        numbers = [ir.AttrInt64(name, int(n)) for name, n in attributes.items()]
        name = self._free(f"{op[1]}_{results[0].name}")
        self._graph.append(ir.Node(*op, inputs, numbers, outputs=results, name=name))
        return tuple(results)

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
        result = ir.Value(name=name, shape=inputs[0].shape, type=ir.TensorType(dtype))
        return self._add(op, inputs, result, self._free(f"{op}_{label or name}"), axis)

    def _add(
        self, op: str, inputs: Sequence[ir.Value], result: ir.Value, name: str, axis: int | None
    ) -> ir.Value:
        attributes = [] if axis is None else [ir.AttrInt64("axis", axis)]
        self._graph.append(ir.Node("", op, inputs, attributes, outputs=[result], name=name))
        return result

    def _free(self, name: str) -> str:
        """The name, with a number appended if it is in use."""
        unused, n = name, 1
        while unused in self._taken:
            unused, n = f"{name}_{n}", n + 1
        self._taken.add(unused)
        return unused


class FloatWriter(QdqWriter):
    """Leaves a graph in floating point, with the names that it has with Q/DQ.

    A tensor between segments is an Identity in place of its Q. A constant holds the numbers that
    its integers stand for, and says which they are (STORED).
    """

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
        """A value for Q and DQ alone, outside of the graph."""
        return _constant(self._free(name), array)

    def _add(
        self, op: str, inputs: Sequence[ir.Value], result: ir.Value, name: str, axis: int | None
    ) -> ir.Value:
        source, scale = (value.const_value for value in inputs[:2])
        if source is not None and scale is not None:
            scales = scale.numpy()
            result = _constant(str(result.name), dequantized(source.numpy(), scales, axis))
            single = scales.size == 1
            result.meta[STORED] = StoredWeight(
                str(inputs[0].name),
                scales.reshape(()) if single else scales,
                None if single else axis,
            )
            self._graph.register_initializer(result)
            return result
        if result.dtype != ir.DataType.INT8:
            return inputs[0]
        result.type = ir.TensorType(ir.DataType.FLOAT)
        return super()._add("Identity", inputs[:1], result, name, None)


def _constant(name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    value.shape = ir.Shape(array.shape)
    value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return value


def _names(graph: ir.Graph) -> set[str]:
    """All names of nodes and values in the graph and its subgraphs."""
    names = {str(value.name) for value in graph.inputs} | set(graph.initializers)
    for node in graph.all_nodes():
        names.add(str(node.name))
        names |= {str(value.name) for value in (*node.inputs, *node.outputs) if value is not None}
    return names
