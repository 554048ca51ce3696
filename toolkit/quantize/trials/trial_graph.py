"""The graph of a trial model: a switch at each Q/DQ pair; weights and scales are inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.quantize.quantize import (
    SCALE_KEEPING_OPS,
    QuantizedOp,
    int8_reads,
    is_activation,
    weight_axis,
)
from toolkit.quantize.weights import bias_per_channel, constant_of, quantize_weight

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Switch:
    """Quantizes `tensor` for `readers` (node names); the graph input `name` turns it on.

    `shared`: the switch before a ReLU that makes this one redundant when it is on.
    """

    name: str
    tensor: str
    readers: frozenset[str]
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class FedWeight:
    """Constant operands of a node and the inputs that feed them; `tensor` is its activation.

    `rounded`: what INT8 has in the place of `weight`, None: the weight to the nearest integers.
    """

    node: str
    tensor: str
    weight: NDArray[np.float32]
    weight_input: str
    bias: NDArray[np.float32] | None
    bias_input: str | None
    axis: int | None
    rounded: NDArray[np.float32] | None = None

    def feeds(self, quantized: bool, activation_scale: float | None) -> dict[str, Array]:
        """Input -> array, quantized or not; `activation_scale`: None for a float activation."""
        weight, bias = self.weight, self.bias
        if quantized:
            weight = weight if self.rounded is None else self.rounded
            integers = quantize_weight(weight, bias, self.axis, activation_scale)
            weight = integers.restored()
            restored = integers.restored_bias()
            if bias is not None and restored is not None:
                bias = restored.reshape(bias.shape)
        arrays: dict[str, Array] = {self.weight_input: np.ascontiguousarray(weight)}
        if self.bias_input is not None and bias is not None:
            arrays[self.bias_input] = np.ascontiguousarray(bias)
        return arrays


class TrialGraph:
    """Puts switches and fed constants into a model, in place."""

    def __init__(
        self,
        model: ir.Model,
        operands: Mapping[str, tuple[int, ...]],
        rounded: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """`operands`: as of `toolkit.quantize.quantize.quantize`. `rounded`: of `FedWeight`."""
        self.model = model
        self._rounded = rounded
        self.graph = model.graph
        self.scales: dict[str, str] = {}
        self.switches: list[Switch] = []
        self.weights: list[FedWeight] = []
        self.nodes: list[str] = []
        self._inputs: dict[str, ir.Value] = {}
        self._prefix = _free_prefix(self.graph)
        self._zero = self._constant(np.array(128, np.uint8))
        uses: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
        for node, row in int8_reads(model, frozenset(), operands):
            self._read_node(node, row, uses)
        rectifiers = {value: _rectifier_before(value, uses) for value in uses}
        for value, readers in uses.items():
            self._switch(value, readers, rectifiers[value])
        for name, constant in list(self.graph.initializers.items()):
            if not constant.uses() and not constant.is_graph_output():
                del self.graph.initializers[name]  # an input now
        self.graph.sort()

    def _read_node(
        self, node: ir.Node, row: QuantizedOp, uses: dict[ir.Value, list[tuple[ir.Node, int]]]
    ) -> None:
        reads_activation = False
        for index in range(len(node.inputs)) if row.activations is None else row.activations:
            value = node.inputs[index]
            if value is not None and is_activation(value):
                uses.setdefault(value, []).append((node, index))
                reads_activation = True
        if reads_activation:
            self.nodes.append(str(node.name))
        first, weight = node.inputs[0], constant_of(node, row.weight)
        if weight is None or weight.ndim < 2 or first is None or not is_activation(first):
            return
        axis = weight_axis(node, row, weight)
        bias = bias_per_channel(constant_of(node, row.bias), weight, axis)
        number = len(self.weights)
        weight_input = self._replace(node, row.weight, f"weight.{number}", weight)
        bias_input = None
        if bias is not None:
            bias_input = self._replace(node, row.bias, f"bias.{number}", bias)
        name, tensor = str(node.name), str(first.name)
        constants = (weight, weight_input, bias, bias_input, axis, self._rounded.get(name))
        self.weights.append(FedWeight(name, tensor, *constants))

    def _switch(
        self, value: ir.Value, readers: list[tuple[ir.Node, int]], rectifier: ir.Node | None
    ) -> None:
        """Insert the switches of one tensor: before its ReLU, before each reader, or both."""
        tensor = str(value.name)
        shared: str | None = None
        uses = value.uses()
        if rectifier is not None:
            all_readers = frozenset(str(use.node.name) for use in uses)
            shared = self._insert(rectifier, 0, tensor, all_readers, None)
            if len(uses) == 1:
                return
        for node, index in readers:
            self._insert(node, index, tensor, frozenset({str(node.name)}), shared)

    def _insert(
        self, node: ir.Node, index: int, tensor: str, readers: frozenset[str], shared: str | None
    ) -> str:
        """Insert a switch before operand `index` of a node; return the input that turns it on."""
        value = node.inputs[index]
        assert value is not None
        if tensor not in self.scales:
            scale = self._input(f"scale.{len(self.scales)}", np.array(1.0, np.float32))
            self.scales[tensor] = str(scale.name)
        scale = self._inputs[self.scales[tensor]]
        label = f"{self._prefix}{len(self.switches)}"
        on = self._input(f"on.{len(self.switches)}", np.array(True))
        branches = [
            ir.AttrGraph("then_branch", self._rounding(value, scale, label)),
            ir.AttrGraph("else_branch", _identity(value, label)),
        ]
        result = _like(value, f"{label}.out")
        self.graph.append(ir.Node("", "If", [on], branches, outputs=[result], name=f"{label}.if"))
        node.replace_input_with(index, result)
        self.switches.append(Switch(str(on.name), tensor, readers, shared))
        return str(on.name)

    def _rounding(self, value: ir.Value, scale: ir.Value, label: str) -> ir.Graph:
        stored = _like(value, f"{label}.stored", ir.DataType.UINT8)
        restored = _like(value, f"{label}.restored")
        q = ir.Node("", "QuantizeLinear", [value, scale, self._zero], outputs=[stored])
        dq = ir.Node("", "DequantizeLinear", [stored, scale, self._zero], outputs=[restored])
        return ir.Graph([], [restored], nodes=[q, dq], name=f"{label}.then")

    def _replace(self, node: ir.Node, index: int | None, name: str, array: Array) -> str:
        """Replace a constant operand by an input; return its name."""
        assert index is not None
        fed = self._input(name, array)
        node.replace_input_with(index, fed)
        return str(fed.name)

    def _input(self, name: str, like: Array) -> ir.Value:
        value = ir.Value(
            name=f"{self._prefix}{name}",
            shape=ir.Shape(like.shape),
            type=ir.TensorType(ir.DataType.from_numpy(like.dtype)),
        )
        self.graph.inputs.append(value)
        self._inputs[str(value.name)] = value
        return value

    def _constant(self, array: Array) -> ir.Value:
        name = f"{self._prefix}zero"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape = ir.Shape(array.shape)
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self.graph.register_initializer(value)
        return value


def _rectifier_before(
    value: ir.Value, uses: Mapping[ir.Value, list[tuple[ir.Node, int]]]
) -> ir.Node | None:
    """The scale-keeping node whose operand is quantized in place of its result, if any."""
    producer = value.producer()
    if producer is None or producer.op_type not in SCALE_KEEPING_OPS:
        return None
    operand = producer.inputs[0]
    if operand is None or operand in uses or operand.producer() is None:
        return None
    return producer if len(operand.uses()) == 1 else None


def _identity(value: ir.Value, label: str) -> ir.Graph:
    same = _like(value, f"{label}.same")
    node = ir.Node("", "Identity", [value], outputs=[same])
    return ir.Graph([], [same], nodes=[node], name=f"{label}.else")


def _like(value: ir.Value, name: str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))


def _free_prefix(graph: ir.Graph) -> str:
    """A prefix that no name of the graph has."""
    taken = [str(value.name) for value in (*graph.inputs, *graph.initializers.values())]
    taken += [str(value.name) for node in graph.all_nodes() for value in node.outputs]
    prefix = "trial."
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    return prefix
