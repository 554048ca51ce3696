"""A network typed in FP16, as strongly typed TensorRT computes it.

TensorRT from 11 on takes the type of every tensor from the ONNX file: a float32 network runs in
FP32, which no DLA has. Weights and tensors become float16. Inputs and outputs keep float32, with a
Cast, unless the caller wants none. An operand whose operator has no float16 in ONNX (the scales of
Resize, the boxes of NonMaxSuppression) stays float32, with a Cast where it is computed.

Scales of Q/DQ become float16, too, as the type of a scale is the type of the tensor. They are
rounded up, so that no value is clipped that was not before. Below 2^-14 float16 loses digits, and
hardware may read 0: there nodes keep floating point (`beyond_scales`), or a channel of a weight
whose other channels are larger gets 2^-14.
"""

from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx_ir as ir

from toolkit.errors import BuildError

MIN_OPSET = 19
"""The first opset whose Q/DQ takes float16."""

MIN_SCALE = 2.0**-14
"""The smallest float16 with all its digits."""

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_SCALED = ("QuantizeLinear", "DequantizeLinear")
_MAX_HALF = float(np.finfo(np.float16).max)


def to_half(model: ir.Model, *, half_io: bool, wide: Collection[str] = frozenset()) -> ir.Model:
    """Return a copy of a model with float16 in place of float32.

    `half_io`: inputs and outputs are float16, too. `wide`: tensors that FP16 does not hold; nodes
    that read or write one compute in float32. `model` has Q/DQ from opset 19 on, or none.
    Raises BuildError: a weight is beyond float16, or the model has functions of its own.
    """
    if model.functions:
        raise BuildError(
            "the model has operators of its own "
            f"({', '.join(sorted(str(key[1]) for key in model.functions))}), whose types are not "
            "known; export it from an engine without plugins."
        )
    copy = model.clone()
    opset = copy.graph.opset_imports.get("", MIN_OPSET)
    _Halver(opset, frozenset(wide)).graph(copy.graph, top=not half_io)
    return copy


def beyond_scales(model: ir.Model, amax: Mapping[str, float]) -> frozenset[str]:
    """Return the nodes whose INT8 would need scales below MIN_SCALE.

    Those read an activation with such a range (`amax` by name), or a weight all of whose channels
    have one.
    """
    smallest = MIN_SCALE * 127
    return frozenset(
        str(node.name)
        for node in model.graph
        for value in node.inputs
        if value is not None and _largest(value, amax) < smallest
    )


def _largest(value: ir.Value, amax: Mapping[str, float]) -> float:
    """Return the largest magnitude of an operand that INT8 may store, infinity for others."""
    tensor = value.const_value
    if tensor is None:
        return amax.get(str(value.name), np.inf)
    if tensor.dtype != _FLOAT or len(tensor.shape) < 2:  # biases are not INT8
        return np.inf
    return float(np.abs(tensor.numpy()).max(initial=0.0)) or np.inf


class _Halver:
    """Changes the types of one model, graph by graph."""

    def __init__(self, opset: int, wide: frozenset[str]) -> None:
        self._opset, self._wide = opset, wide
        self._casts: dict[ir.Value, ir.Value] = {}

    def graph(self, graph: ir.Graph, *, top: bool) -> None:
        """Change a graph and those inside it. `top`: its inputs and outputs keep float32."""
        scales = _scales(graph)
        inputs = [value for value in graph.inputs if value.dtype == _FLOAT]
        outputs = [value for value in graph.outputs if value.dtype == _FLOAT]
        nodes = list(graph)
        for value in list(graph.initializers.values()):
            if not self._stays_single(value):
                _halve_constant(value, round_up=value in scales)
        for value in inputs if top else ():
            if value.name not in self._wide:
                self._cast_input(graph, value)
        for value in () if top else inputs:
            value.type = ir.TensorType(_HALF)  # a clone shares its types
        for node in nodes:
            self._node(graph, node)
        for value in outputs if top else ():
            self._cast_output(graph, value)
        graph.sort()

    def _node(self, graph: ir.Graph, node: ir.Node) -> None:
        schema = _schema(node, self._opset)
        if self._is_single(node):
            self._compute_single(graph, node)
            return
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _HALF and not _takes_half(schema, index):
                node.replace_input_with(index, self._single(graph, value))
        for attribute in list(node.attributes.values()):
            self._attribute(node, attribute)
        for index, output in enumerate(node.outputs):
            if output.dtype == _FLOAT and _gives_half(schema, index) and not _typed(node):
                output.type = ir.TensorType(_HALF)  # a clone shares its types
            elif output.dtype == _FLOAT:
                self._halve_output(graph, output)

    def _is_single(self, node: ir.Node) -> bool:
        """Whether a node reads or writes what FP16 does not hold."""
        tensors = (*node.inputs, *node.outputs)
        return any(value is not None and value.name in self._wide for value in tensors)

    def _stays_single(self, value: ir.Value) -> bool:
        """Whether a constant is read by nodes in float32 alone."""
        readers = [reader for reader, _ in value.uses()]
        return bool(readers) and all(map(self._is_single, readers))

    def _compute_single(self, graph: ir.Graph, node: ir.Node) -> None:
        """Let a node read and write float32, with Casts to and from its neighbours."""
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _HALF:
                node.replace_input_with(index, self._single(graph, value))
        for output in node.outputs:
            if output.dtype == _FLOAT and output.name not in self._wide:
                self._halve_output(graph, output)

    def _attribute(self, node: ir.Node, attribute: ir.Attr) -> None:
        if attribute.type == ir.AttributeType.GRAPH:
            self.graph(attribute.as_graph(), top=False)
        elif attribute.type == ir.AttributeType.GRAPHS:
            for inner in attribute.as_graphs():
                self.graph(inner, top=False)
        elif attribute.type == ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            if tensor.dtype == _FLOAT:
                half = ir.Tensor(_halved(str(node.name), tensor.numpy()))
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, half)
        elif (
            node.op_type == "Cast" and attribute.name == "to" and attribute.as_int() == int(_FLOAT)
        ):
            node.attributes["to"] = ir.AttrInt64("to", int(_HALF))

    def _single(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """Return `value` as float32: the constant itself, or a Cast."""
        if value not in self._casts:
            if value.const_value is not None and value.is_initializer():
                tensor = ir.Tensor(value.const_value.numpy().astype(np.float32))
                single = ir.Value(
                    name=f"{value.name}_fp32", shape=value.shape, type=ir.TensorType(_FLOAT),
                    const_value=tensor,
                )  # fmt: skip
                tensor.name = str(single.name)
                graph.register_initializer(single)
            else:
                single = _cast(graph, value, f"{value.name}_fp32", _FLOAT)
            self._casts[value] = single
        return self._casts[value]

    def _cast_input(self, graph: ir.Graph, value: ir.Value) -> None:
        """Put a Cast to float16 between an input and its readers."""
        readers = list(value.uses())
        half = _cast(graph, value, f"{value.name}_fp16", _HALF)
        for reader, operand in readers:
            reader.replace_input_with(operand, half)
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = half

    def _cast_output(self, graph: ir.Graph, value: ir.Value) -> None:
        """Make an output float32 again, under its name."""
        if value.dtype != _HALF:
            return
        name = str(value.name)
        value.name = f"{name}_fp16"
        index = list(graph.outputs).index(value)
        graph.outputs[index] = _cast(graph, value, name, _FLOAT)

    def _halve_output(self, graph: ir.Graph, output: ir.Value) -> None:
        """Cast what a node must give as float32 for those that read float16."""
        readers = list(output.uses())
        if not readers:
            return
        half = _cast(graph, output, f"{output.name}_fp16", _HALF)
        for reader, operand in readers:
            reader.replace_input_with(operand, half)


def _scales(graph: ir.Graph) -> set[ir.Value]:
    return {
        node.inputs[1]
        for node in graph
        if node.op_type in _SCALED and len(node.inputs) > 1 and node.inputs[1] is not None
    }


def _halve_constant(value: ir.Value, *, round_up: bool) -> None:
    tensor = value.const_value
    if tensor is None or tensor.dtype != _FLOAT:
        return
    array = tensor.numpy()
    halved = rounded_up(array) if round_up else _halved(str(value.name), array)
    value.const_value = ir.Tensor(halved, name=str(value.name))
    value.type = ir.TensorType(_HALF)  # a clone shares its types


def _halved(name: str, array: np.ndarray) -> np.ndarray:
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    if largest > _MAX_HALF:
        raise BuildError(
            f"Constant {name!r} holds {largest:.6g}, beyond the largest float16, {_MAX_HALF:.0f}; "
            "build the engine with `tandem build --precision fp32`, or scale the weights."
        )
    return array.astype(np.float16)


def rounded_up(scale: np.ndarray) -> np.ndarray:
    """Return the smallest float16 that is not below each scale and MIN_SCALE, at most the largest.

    A scale beyond that belongs to values that float16 does not hold either.
    """
    scale = np.maximum(scale, np.float32(MIN_SCALE))
    half = np.minimum(scale, _MAX_HALF).astype(np.float16)
    above = np.nextafter(half, np.float16(_MAX_HALF))  # the largest stays as it is
    up: np.ndarray = np.where(half.astype(np.float32) < scale, above, half)
    return up.astype(np.float16)


def _cast(graph: ir.Graph, value: ir.Value, name: str, dtype: ir.DataType) -> ir.Value:
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    node = ir.Node(
        "", "Cast", [value], [ir.AttrInt64("to", int(dtype))], outputs=[output], name=f"Cast_{name}"
    )
    graph.append(node)
    return output


def _typed(node: ir.Node) -> bool:
    """Whether an attribute of the node, kept as it is, says that it gives float32."""
    attribute = node.attributes.get("dtype")
    return attribute is not None and attribute.as_int() == int(_FLOAT)


def _schema(node: ir.Node, opset: int) -> onnx.defs.OpSchema | None:
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return None
    return onnx.defs.get_schema(node.op_type, opset)


def _takes_half(schema: onnx.defs.OpSchema | None, index: int) -> bool:
    if schema is None or not schema.inputs:
        return True
    return "tensor(float16)" in _types(schema, schema.inputs, index)


def _gives_half(schema: onnx.defs.OpSchema | None, index: int) -> bool:
    if schema is None or not schema.outputs:
        return True
    return "tensor(float16)" in _types(schema, schema.outputs, index)


def _types(schema: onnx.defs.OpSchema, parameters: object, index: int) -> set[str]:
    rows = list(parameters)  # type: ignore[call-overload]
    return set(rows[min(index, len(rows) - 1)].types)
