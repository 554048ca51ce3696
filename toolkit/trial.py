"""A trial model: one session in which INT8 is tried tensor by tensor, without building again.

Every place where `toolkit.quantize` rounds an activation holds a switch:

    x' = clip(round(x / s), -128, 127) s   where it is on,   x' = x   where it is off,

with s = amax / 127 fed anew. Weights and biases are fed too, each as it is or as the nearest
numbers of its INT8 or INT32 grid. So any choice of ranges, and of nodes that stay in floating
point, costs one forward pass. A run computes what onnxruntime computes from the Q/DQ graph of the
same choice, all in one segment and thus without INT8 boundaries, with its optimizations and the
packing of weights off.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from calibration.table import scale_of
from toolkit.errors import BuildError
from toolkit.lower import MAX_IR_VERSION, external_weights
from toolkit.quantize import (
    SCALE_KEEPING_OPS,
    QuantizedOp,
    int8_nodes,
    is_activation,
    weight_axis,
)
from toolkit.weights import bias_per_channel, constant_of, quantize_weight

Array = NDArray[Any]
Assignment = Mapping[str, float | None]
"""Tensor -> amax; a tensor that is missing, or None, stays in floating point."""

_OPTIONS = (
    # Q and DQ are computed as they stand: kernels that merge them round in other places.
    ("session.disable_quant_qdq", "1"),
    ("session.intra_op.allow_spinning", "0"),
)
# Before it every constant was an input as well.
LEAST_IR_VERSION = 4
_OFF = np.array(False)
_ON = np.array(True)


@dataclass(frozen=True, slots=True)
class _Switch:
    """Rounds `tensor` on the way to `readers` (node names); `name` is the input that turns it on.

    `shared` names the switch ahead of a rectifier that makes this one needless when it is on.
    """

    name: str
    tensor: str
    readers: frozenset[str]
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class _Weight:
    """The constant operands of a node and the inputs that feed them; `tensor` is what they meet."""

    node: str
    tensor: str
    weight: NDArray[np.float32]
    weight_input: str
    bias: NDArray[np.float32] | None
    bias_input: str | None
    axis: int | None

    def feeds(self, quantized: bool, step: float | None) -> dict[str, Array]:
        """The operands for a node in INT8 or not, behind an activation of step `step`."""
        weight, bias = self.weight, self.bias
        if quantized:
            integers = quantize_weight(weight, bias, self.axis, step)
            weight = integers.restored()
            restored = integers.restored_bias()
            if bias is not None and restored is not None:
                bias = restored.reshape(bias.shape)
        found: dict[str, Array] = {self.weight_input: np.ascontiguousarray(weight)}
        if self.bias_input is not None and bias is not None:
            found[self.bias_input] = np.ascontiguousarray(bias)
        return found


class TrialModel:
    """A model in onnxruntime whose INT8 can be chosen with every run.

    `tensors`: the activations that INT8 quantizes, in the order of the graph. `nodes`: those that
    compute in INT8. `inputs`: what a sample has to feed. `outputs`: what a run returns.
    """

    def __init__(
        self, model: ir.Model, *, threads: int | None = None, optimize: bool = True
    ) -> None:
        """`optimize` False keeps onnxruntime from rearranging float arithmetic, too.

        Raises BuildError: onnxruntime cannot load the model.
        """
        self.inputs = tuple(str(value.name) for value in model.graph.inputs)
        builder = _Builder(model.clone())
        known = max(model.ir_version, LEAST_IR_VERSION)
        builder.model.ir_version = min(known, MAX_IR_VERSION)
        self.tensors = tuple(builder.scales)
        self.nodes = tuple(builder.nodes)
        self.outputs = tuple(str(value.name) for value in builder.graph.outputs)
        self._scales = builder.scales
        self._switches = tuple(builder.switches)
        self._weights = tuple(builder.weights)
        self._weights_fed: dict[str, tuple[bool, float | None]] = {}
        self._session, self._constants = _open(builder.model, threads, optimize)
        self._binding = self._session.io_binding()
        for name in self.outputs:
            self._binding.bind_output(name, "cpu")
        self._fed: dict[str, Any] = {}  # a binding does not keep alive what it was given

    def __call__(
        self,
        assignment: Assignment,
        sample: Mapping[str, Array],
        keep_float: frozenset[str] = frozenset(),
    ) -> dict[str, Array]:
        """Run one sample with INT8 as assigned; nodes named in `keep_float` compute in float32.

        Weights are INT8 in every other node, whatever `assignment` says of its activations:
        `keep_float` with all `nodes` gives the model as it was.
        """
        self._feed_switches(assignment, keep_float)
        self._feed_weights(assignment, keep_float)
        for name, array in sample.items():
            self._feed(name, np.ascontiguousarray(array))
        self._session.run_with_iobinding(self._binding)
        # Copies: the binding writes the next run into the same memory.
        arrays = (value.numpy().copy() for value in self._binding.get_outputs())
        return dict(zip(self.outputs, arrays, strict=True))

    def _feed_switches(self, assignment: Assignment, keep_float: frozenset[str]) -> None:
        for tensor, name in self._scales.items():
            amax = assignment.get(tensor)
            self._feed_if_new(name, np.array(1.0 if amax is None else scale_of(amax), np.float32))
        on: set[str] = set()
        for switch in self._switches:
            if (
                assignment.get(switch.tensor) is not None
                and keep_float.isdisjoint(switch.readers)
                and switch.shared not in on
            ):
                on.add(switch.name)
            self._feed_if_new(switch.name, _ON if switch.name in on else _OFF)

    def _feed_weights(self, assignment: Assignment, keep_float: frozenset[str]) -> None:
        for weight in self._weights:
            amax = assignment.get(weight.tensor)
            quantized = weight.node not in keep_float
            step = scale_of(amax) if quantized and amax is not None else None
            if self._weights_fed.get(weight.node) != (quantized, step):
                self._weights_fed[weight.node] = (quantized, step)
                for name, array in weight.feeds(quantized, step).items():
                    self._feed(name, array)

    def _feed_if_new(self, name: str, scalar: Array) -> None:
        before = self._fed.get(name)
        if before is None or before[0] != scalar:
            self._feed(name, scalar)

    def _feed(self, name: str, array: Array) -> None:
        import onnxruntime as ort

        value = ort.OrtValue.ortvalue_from_numpy(array)
        self._fed[name] = (array, value)
        self._binding.bind_ortvalue_input(name, value)


def _open(model: ir.Model, threads: int | None, optimize: bool) -> tuple[Any, list[Any]]:
    """The session, and the constants that must live as long as it."""
    import onnxruntime as ort

    weights = external_weights(model.graph)
    # onnxruntime reads some weights in place.
    constants = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in _OPTIONS:
        options.add_session_config_entry(key, value)
    options.add_external_initializers(list(weights), constants)
    try:
        session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as err:  # onnxruntime has a type of its own for every status
        raise BuildError(f"onnxruntime cannot run the model for INT8 trials: {err}") from err
    return session, constants


class _Builder:
    """Puts switches and fed constants into a model, in place."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.scales: dict[str, str] = {}
        self.switches: list[_Switch] = []
        self.weights: list[_Weight] = []
        self.nodes: list[str] = []
        self._inputs: dict[str, ir.Value] = {}
        self._prefix = _free_prefix(self.graph)
        self._zero = self._constant(np.array(128, np.uint8))
        uses: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
        for node, row in int8_nodes(model):
            self._read_node(node, row, uses)
        kept = {value: _kept_before(value, uses) for value in uses}
        for value, readers in uses.items():
            self._switch(value, readers, kept[value])
        for name, constant in list(self.graph.initializers.items()):
            if not constant.uses() and not constant.is_graph_output():
                del self.graph.initializers[name]  # fed from outside now
        self.graph.sort()

    def _read_node(
        self, node: ir.Node, row: QuantizedOp, uses: dict[ir.Value, list[tuple[ir.Node, int]]]
    ) -> None:
        found = False
        for index in range(len(node.inputs)) if row.activations is None else row.activations:
            value = node.inputs[index]
            if value is not None and is_activation(value):
                uses.setdefault(value, []).append((node, index))
                found = True
        if found:
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
        self.weights.append(_Weight(name, tensor, weight, weight_input, bias, bias_input, axis))

    def _switch(
        self, value: ir.Value, readers: list[tuple[ir.Node, int]], kept: ir.Node | None
    ) -> None:
        """Put the switches for one tensor: ahead of its rectifier, before each reader, or both."""
        tensor = str(value.name)
        shared: str | None = None
        uses = value.uses()
        if kept is not None:
            every = frozenset(str(use.node.name) for use in uses)
            shared = self._insert(kept, 0, tensor, every, None)
            if len(uses) == 1:
                return
        for node, index in readers:
            self._insert(node, index, tensor, frozenset({str(node.name)}), shared)

    def _insert(
        self, node: ir.Node, index: int, tensor: str, readers: frozenset[str], shared: str | None
    ) -> str:
        """Put a switch before operand `index` of a node; returns the input that turns it on."""
        value = node.inputs[index]
        assert value is not None
        if tensor not in self.scales:
            scale = self._input(f"scale.{len(self.scales)}", np.array(1.0, np.float32))
            self.scales[tensor] = str(scale.name)
        scale = self._inputs[self.scales[tensor]]
        label = f"{self._prefix}{len(self.switches)}"
        on = self._input(f"on.{len(self.switches)}", _ON)
        branches = [
            ir.AttrGraph("then_branch", self._rounding(value, scale, label)),
            ir.AttrGraph("else_branch", _identity(value, label)),
        ]
        result = _like(value, f"{label}.out")
        self.graph.append(ir.Node("", "If", [on], branches, outputs=[result], name=f"{label}.if"))
        node.replace_input_with(index, result)
        self.switches.append(_Switch(str(on.name), tensor, readers, shared))
        return str(on.name)

    def _rounding(self, value: ir.Value, scale: ir.Value, label: str) -> ir.Graph:
        stored = _like(value, f"{label}.stored", ir.DataType.UINT8)
        restored = _like(value, f"{label}.restored")
        q = ir.Node("", "QuantizeLinear", [value, scale, self._zero], outputs=[stored])
        dq = ir.Node("", "DequantizeLinear", [stored, scale, self._zero], outputs=[restored])
        return ir.Graph([], [restored], nodes=[q, dq], name=f"{label}.then")

    def _replace(self, node: ir.Node, index: int | None, name: str, array: Array) -> str:
        """Feed a constant operand from outside; returns the input's name."""
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


def _kept_before(
    value: ir.Value, uses: Mapping[ir.Value, list[tuple[ir.Node, int]]]
) -> ir.Node | None:
    """The scale-keeping node whose operand is rounded in place of its result, if there is one."""
    maker = value.producer()
    if maker is None or maker.op_type not in SCALE_KEEPING_OPS:
        return None
    operand = maker.inputs[0]
    if operand is None or operand in uses or operand.producer() is None:
        return None
    return maker if len(operand.uses()) == 1 else None


def _identity(value: ir.Value, label: str) -> ir.Graph:
    same = _like(value, f"{label}.same")
    node = ir.Node("", "Identity", [value], outputs=[same])
    return ir.Graph([], [same], nodes=[node], name=f"{label}.else")


def _like(value: ir.Value, name: str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))


def _free_prefix(graph: ir.Graph) -> str:
    """A beginning that no name of the graph has."""
    taken = [str(value.name) for value in (*graph.inputs, *graph.initializers.values())]
    taken += [str(value.name) for node in graph.all_nodes() for value in node.outputs]
    prefix = "trial."
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    return prefix
