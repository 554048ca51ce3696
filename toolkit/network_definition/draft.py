"""The graph under construction: nodes, constants, and the shapes that ONNX infers for them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from toolkit.errors import NetworkError, first_line
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.network_definition.layers import Shape, Tensor
from toolkit.plugins import Plugin
from toolkit.plugins import Tensor as PluginTensor
from toolkit.plugins.functions import shapes_of

OPSET = 20  # the first with Gelu
IR_VERSION = 9
_TYPES = {name: dtype for dtype, name in IO_DTYPES.items()}
_SHOWN_TO_INFERENCE = 1024  # values of a constant: sizes and axes have fewer

Attributes = Mapping[str, str | int | float | Sequence[int] | Sequence[float]]


class Draft:
    """A graph that grows by one node at a time."""

    def __init__(self) -> None:
        self._graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET})
        self._tensors: dict[ir.Value, Tensor] = {}
        self._names: set[str] = set()

    def claim(self, name: str | None, kind: str) -> str:
        """Return a name that no layer has yet; raises NetworkError if `name` is taken."""
        if name is None:
            number = 0
            while f"{kind}_{number}" in self._names:
                number += 1
            name = f"{kind}_{number}"
        elif name in self._names:
            raise NetworkError(f"the network has a layer {name!r} already; give another name")
        self._names.add(name)
        return name

    def input(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> Tensor:
        """Add an input. Raises NetworkError: a tensor has its name."""
        self._refuse_taken(name, None)
        value = ir.Value(
            name=name, shape=ir.Shape(shape), type=ir.TensorType(onnx_type(name, dtype))
        )
        self._graph.inputs.append(value)
        return self._known(value)

    def constant(self, name: str, values: npt.NDArray[Any]) -> Tensor:
        """Add a constant, under another name where a tensor has this one."""
        name = self._free(name)
        tensor = ir.tensor(
            np.ascontiguousarray(values), dtype=onnx_type(name, values.dtype), name=name
        )
        value = ir.Value(
            name=name,
            shape=ir.Shape(values.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return self._known(value)

    def node(
        self,
        name: str,
        op_type: str,
        inputs: Sequence[Tensor | None],
        attributes: Attributes | None = None,
        *,
        outputs: int = 1,
    ) -> tuple[Tensor, ...]:
        """Add a node of ONNX. Raises NetworkError: it does not take these inputs."""
        self._own(name, inputs)
        operands = [None if tensor is None else tensor.value for tensor in inputs]
        results = self._outputs(name, outputs)
        node = ir.node(op_type, operands, dict(attributes or {}), outputs=results, name=name)
        self._describe(node, [tensor for tensor in inputs if tensor is not None])
        return self._added(node)

    def plugin(
        self, name: str, plugin: Plugin, inputs: Sequence[Tensor], attributes: Attributes
    ) -> tuple[Tensor, ...]:
        """Add a node of a plugin; its outputs have the type of its first input."""
        self._own(name, inputs)
        function = plugin.function
        outputs = self._outputs(name, len(function.output))
        node = ir.node(
            function.name,
            [tensor.value for tensor in inputs],
            dict(attributes),
            domain=function.domain,
            outputs=outputs,
            name=name,
        )
        operands = [PluginTensor(t.name, t.dtype, _fixed(name, t)) for t in inputs]
        shapes = shapes_of(plugin, name, operands, node.attributes.values(), len(outputs))
        for value, shape in zip(node.outputs, shapes, strict=True):
            value.type, value.shape = inputs[0].value.type, ir.Shape(shape)
        self._graph.opset_imports[function.domain] = 1
        return self._added(node)

    def set_attributes(self, tensor: Tensor, attributes: Attributes) -> None:
        """Give the node that makes a tensor other attributes, and infer its shape again.

        Raises NetworkError: a layer takes the tensor already, or the node does not take them.
        """
        node = tensor.value.producer()
        assert node is not None
        if users := [use.node for use in tensor.value.uses()]:
            raise NetworkError(
                f"layer {node.name!r} cannot be changed any more, as layer {users[0].name!r} takes "
                f"its output, {tensor.sizes()}: set it before that layer is added, or pass it to "
                "the method that adds this one"
            )
        before = dict(node.attributes)
        node.attributes.clear()
        node.attributes.update(
            (attr.name, attr) for attr in ir.convenience.convert_attributes(attributes)
        )
        try:
            self._describe(
                node, [self._tensors[value] for value in node.inputs if value is not None]
            )
        except NetworkError:
            node.attributes.clear()
            node.attributes.update(before)
            raise

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a layer makes a tensor. Raises NetworkError: it is of another network."""
        self._own("of the outputs", [tensor])
        return tensor.value.producer() is not None

    def output(self, tensor: Tensor, name: str | None) -> Tensor:
        """Make a tensor that a layer makes an output, and rename it.

        Raises NetworkError: it is an output already, or another tensor has the name.
        """
        if tensor.value in self._graph.outputs:
            raise NetworkError(f"tensor {tensor.name!r} is an output already; mark it once")
        if name is not None:
            self._refuse_taken(name, tensor)
            tensor.value.name = name
        self._graph.outputs.append(tensor.value)
        return tensor

    def model(self, name: str) -> ir.Model:
        """Return the model. Raises NetworkError: no tensor is an output."""
        if not self._graph.outputs:
            raise NetworkError(f"network {name!r} has no output; call mark_output for its results")
        self._graph.name = name
        return ir.Model(self._graph, ir_version=IR_VERSION, producer_name="tandem")

    def _refuse_taken(self, name: str, owner: Tensor | None) -> None:
        """Refuse a name that another tensor than `owner` has."""
        owner_value = None if owner is None else owner.value
        if any(value.name == name and value is not owner_value for value in self._tensors):
            raise NetworkError(f"the network has a tensor {name!r} already; give another name")

    def _free(self, name: str) -> str:
        """Return a name for a tensor that the user does not name: this one, or with a number."""
        names = {value.name for value in self._tensors}
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        return next(free for free in itertools.chain([name], numbered) if free not in names)

    def _outputs(self, layer: str, count: int) -> list[ir.Value]:
        suffixes = [""] if count == 1 else [f"_{index}" for index in range(count)]
        return [ir.Value(name=self._free(f"{layer}_output{suffix}")) for suffix in suffixes]

    def _own(self, layer: str, inputs: Sequence[Tensor | None]) -> None:
        for tensor in inputs:
            if tensor is not None and tensor.value not in self._tensors:
                raise NetworkError(
                    f"layer {layer!r}: the tensor {tensor.name!r} is of another network"
                )

    def _describe(self, node: ir.Node, inputs: Sequence[Tensor]) -> None:
        """Infer the types and shapes of a node's outputs."""
        types = _infer(node.name or "", node, inputs)
        for value in node.outputs:
            described = types[value.name or ""]
            tensor_type = described.tensor_type
            value.dtype = ir.DataType(tensor_type.elem_type)
            if tensor_type.HasField("shape"):
                value.shape = ir.Shape([_size(dim, value) for dim in tensor_type.shape.dim])

    def _added(self, node: ir.Node) -> tuple[Tensor, ...]:
        self._graph.append(node)
        return tuple(self._known(value) for value in node.outputs)

    def _known(self, value: ir.Value) -> Tensor:
        assert value.dtype is not None
        tensor = Tensor(IO_DTYPES.get(value.dtype, value.dtype.name), value)
        self._tensors[value] = tensor
        return tensor


def onnx_type(name: str, dtype: npt.DTypeLike) -> ir.DataType:
    """Return the ONNX type of a numpy type; raises NetworkError if there is none."""
    word = np.dtype(dtype).name
    if word not in _TYPES:
        raise NetworkError(
            f"tensor {name!r} has the type {word}; it must be of {', '.join(_TYPES)}"
        )
    return _TYPES[word]


def _infer(name: str, node: ir.Node, inputs: Sequence[Tensor]) -> dict[str, onnx.TypeProto]:
    """Return the type of each output by name."""
    described = ", ".join(f"{t.name!r} {t.sizes()} {t.dtype}" for t in inputs)
    if len({t.dtype for t in inputs}) > 1 and node.op_type in _ONE_TYPE:
        raise NetworkError(
            f"layer {name!r} ({node.op_type}) needs inputs of one type, but has {described}; "
            "convert one with add_cast"
        )
    data = {
        tensor.name: ir.to_proto(tensor.value.const_value)
        for tensor in inputs
        if tensor.value.const_value is not None
        and tensor.value.const_value.size <= _SHOWN_TO_INFERENCE
    }
    try:
        return onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, OPSET, ""),
            ir.to_proto(node),
            {tensor.name: _type_proto(tensor) for tensor in inputs},
            data,
            opset_imports=[onnx.helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
    except (
        onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError
    ) as error:  # fmt: skip
        raise NetworkError(
            f"layer {name!r} ({node.op_type}) does not take {described}: {first_line(error)}"
        ) from error


# Operators whose inputs have one type; ONNX's inference does not compare them.
_ONE_TYPE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "Less", "MatMul", "Gemm",
     "Concat", "Conv", "ConvTranspose", "Einsum", "PRelu"}
)  # fmt: skip


def _type_proto(tensor: Tensor) -> onnx.TypeProto:
    assert tensor.value.dtype is not None
    shape = None if tensor.shape is None else [None if s == "?" else s for s in tensor.shape]
    return onnx.helper.make_tensor_type_proto(tensor.value.dtype.value, shape)


def _size(dim: onnx.TensorShapeProto.Dimension, value: ir.Value) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None


def _fixed(layer: str, tensor: Tensor) -> tuple[int, ...]:
    if tensor.shape is None or not all(isinstance(size, int) for size in tensor.shape):
        raise NetworkError(
            f"layer {layer!r}: a plugin's shapes are found from fixed sizes, but {tensor.name!r} "
            f"is {tensor.sizes()}; give the input fixed sizes"
        )
    return tuple(int(size) for size in tensor.shape)
