"""ONNX -> the layers that the double's rules judge."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx
from onnx import numpy_helper
from tensorrt_double.dla_rules import ELEMENTWISE, Layer, Tensor

TRANSPARENT = frozenset({"QuantizeLinear", "DequantizeLinear"})
CONSTANT_READERS = ELEMENTWISE | {"PRelu"}
"""Operators whose operands are tensors in TensorRT's API (add_elementwise, add_parametric_relu): a
constant operand is the output of a constant layer."""


def layers_of(model: onnx.ModelProto) -> list[Layer]:
    """Return the nodes of a model, Q/DQ too, with shapes as ONNX infers them."""
    with contextlib.suppress(onnx.shape_inference.InferenceError):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    reader = _Reader(model.graph)
    return [reader.layer(node) for node in model.graph.node]


class _Reader:
    """The values of one graph by name. Q/DQ are seen through, of constants and of neighbours."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = graph.node
        self._infos = {i.name: i for i in (*graph.input, *graph.value_info, *graph.output)}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._constants = {c.name: numpy_helper.to_array(c) for c in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self._constants[node.output[0]] = _constant(node)
            elif node.op_type in TRANSPARENT and node.input[0] in self._constants:
                self._constants[node.output[0]] = self._constants[node.input[0]]

    def layer(self, node: onnx.NodeProto) -> Layer:
        tensors = [self._tensor(name) for name in node.output]
        return Layer(
            name=node.name,
            op=node.op_type,
            domain=node.domain,
            attributes={a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
            inputs=tuple(self._tensor(name) for name in node.input),
            outputs=tuple(tensor for tensor in tensors if tensor is not None),
            before=tuple(self._beside(node.input, self._above)),
            after=tuple(sorted(self._beside(node.output, self._below))),
        )

    def _tensor(self, name: str) -> Tensor | None:
        if not name:
            return None
        if name in self._constants:
            value = self._constants[name]
            return Tensor(name, value.shape, str(value.dtype), constant=True, value=value)
        if name not in self._infos:
            return Tensor(name, None, "float32")
        kind = self._infos[name].type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        shape = tuple(dims) if kind.HasField("shape") else None
        return Tensor(name, shape, str(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))

    def _beside(
        self,
        names: Sequence[str],
        step: Callable[[str], list[tuple[onnx.NodeProto, Sequence[str]]]],
    ) -> Iterator[str]:
        for name in names:
            for node, further in step(name):
                if node.op_type in TRANSPARENT:
                    yield from self._beside(further, step)
                else:
                    yield node.op_type

    def _above(self, name: str) -> list[tuple[onnx.NodeProto, Sequence[str]]]:
        node = None if name in self._constants else self._makers.get(name)
        return [] if node is None else [(node, node.input[:1])]

    def _below(self, name: str) -> list[tuple[onnx.NodeProto, Sequence[str]]]:
        return [(node, node.output) for node in self._nodes if name in node.input]


def _constant(node: onnx.NodeProto) -> np.ndarray:
    value = onnx.helper.get_attribute_value(node.attribute[0])
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.array(value)
