"""Q/DQ model -> float model + ranges, which TensorRT with calibrators can build for the DLA.

    x -> Q(s) -> DQ(s) -> x'      becomes  x,  amax(x) = 127 s
    q -> DQ(s_c),  w -> Q -> DQ   become   the float weight w = q s_c, or w itself

Accepted: INT8 with zero point 0, or the equivalent UINT8 with 128; activations per tensor; weights
with s_c = max|w_c| / 127, as TensorRT quantizes a float model. INT32 biases become float.
Everything else is refused with node, rule and value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes

from calibration.table import QMAX
from toolkit.errors import ImportModelError
from toolkit.quantize.qdq.infer_ranges import infer_ranges, nodes_in_float
from toolkit.quantize.qdq.nodes import (
    INTEGER_OPS,
    QuantParams,
    constant_of,
    is_dequantize,
    is_quantize,
    quantized_constant,
)
from toolkit.quantize.qdq.symmetric import along, quantized_by, symmetric_params, weight_readers
from toolkit.quantize.quantize import QUANTIZED_OPS, RESULT_AMAX, is_activation
from toolkit.quantize.weights import StoredWeight

WEIGHT_TOLERANCE = 1e-3
"""Relative tolerance of s_c against max|w_c| / 127."""

# Channels whose weights are all below are switched off.
_SWITCHED_OFF = 1e-30


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A float model and the quantization of its Q/DQ nodes.

    `amax`: activation -> range; those in `inferred` come from neighbours. `results`: ranges of what
    INT8 nodes write and no node reads in INT8 (`toolkit.quantize.quantize`). `float_nodes`: the
    nodes that computed in floating point. `unranged`: float activations that INT8 nodes read or
    write without a range in the model. `notes`: accepted deviations from the rules. `integers`:
    constant -> the constant of integers that it was.
    """

    model: ir.Model
    amax: Mapping[str, float]
    inferred: tuple[str, ...]
    float_nodes: tuple[str, ...]
    unranged: tuple[str, ...]
    notes: tuple[str, ...]
    results: Mapping[str, float] = field(default_factory=dict)
    integers: Mapping[str, StoredWeight] = field(default_factory=dict)


def import_qdq(
    model: ir.Model, *, any_weight_scale: bool = False, int8_borders: bool = False
) -> PlainModel:
    """Remove the Q/DQ from a copy of a model.

    `any_weight_scale` accepts weights whose scale is not max|w_c| / 127, with a note; their float
    values are then the dequantized ones. `int8_borders` accepts INT8 inputs and outputs, which
    become floats under their names, as those of a segment.

    Raises ImportModelError: there is no Q/DQ, or one that is not symmetric INT8.
    """
    copy = model.clone()
    _refuse_foreign(copy, int8_borders=int8_borders)
    remover = _QdqRemover(copy.graph, any_weight_scale, int8_borders)
    float_nodes = nodes_in_float(copy.graph)
    for node in list(copy.graph):
        if is_dequantize(node):
            remover.remove(node)
    if int8_borders:
        remover.restore_borders()
    return plain_model(copy, remover.amax, float_nodes, remover.integers, tuple(remover.notes))


def plain_model(
    model: ir.Model,
    amax: Mapping[ir.Value, float],
    float_nodes: tuple[str, ...],
    integers: Mapping[str, StoredWeight],
    notes: tuple[str, ...] = (),
) -> PlainModel:
    """Drop unused nodes of a model without Q/DQ; add the ranges that follow from `amax`."""
    names = {str(value.name): limit for value, limit in amax.items()}
    ir_passes.RemoveUnusedNodesPass()(model)
    ranges, inferred = infer_ranges(model.graph, names)
    unranged = tuple(
        dict.fromkeys(
            name
            for node in model.graph
            if node.op_type in QUANTIZED_OPS and str(node.name) not in float_nodes
            for name in _float_activations(node)
            if name not in ranges
        )
    )
    results = {
        str(value.name): float(value.metadata_props[RESULT_AMAX])
        for node in model.graph
        for value in node.outputs
        if RESULT_AMAX in value.metadata_props and str(value.name) not in ranges
    }
    return PlainModel(model, ranges, inferred, float_nodes, unranged, notes, results, integers)


class _QdqRemover:
    """Removes DQ nodes with the Q before them; collects ranges and notes."""

    def __init__(self, graph: ir.Graph, any_weight_scale: bool, int8_borders: bool) -> None:
        self.amax: dict[ir.Value, float] = {}
        self.notes: list[str] = []
        self.integers: dict[str, StoredWeight] = {}
        self._graph = graph
        self._any_weight_scale = any_weight_scale
        self._int8_borders = int8_borders

    def remove(self, node: ir.Node) -> None:
        params = symmetric_params(node)
        source = node.inputs[0]
        assert source is not None  # onnx.checker: the first operand is required
        producer = source.producer()
        if quantized_constant(node) is not None:
            self._fold(node, params, source)
        elif producer is not None and is_quantize(producer):
            self._remove_pair(producer, node, params)
        elif self._int8_borders and source in self._graph.inputs:
            self._restore(node.outputs[0], source, node, params)
        else:
            source_text = (
                f"{producer.op_type} ({producer.name!r})" if producer else "an input of the model"
            )
            raise ImportModelError(
                f"Node {node.name!r} (DequantizeLinear) reads {source.name!r}, made by "
                f"{source_text}, but "
                "only what a QuantizeLinear made can become float; export the model with Q/DQ "
                "pairs around its operators."
            )

    def _remove_pair(self, quantize: ir.Node, node: ir.Node, params: QuantParams) -> None:
        quantize_params = symmetric_params(quantize)
        value = quantize.inputs[0]
        assert value is not None
        name = str(value.name)
        if quantize_params.scale.ndim or params.scale.ndim:
            raise ImportModelError(
                f"Node {quantize.name!r} gives the activation {name!r} "
                f"{max(quantize_params.scale.size, params.scale.size)} scales, but activations "
                "have one; "
                "quantize activations per tensor."
            )
        if quantize_params.scale != params.scale:
            raise ImportModelError(
                f"Nodes {quantize.name!r} and {node.name!r} are a pair, but their scales are "
                f"{float(quantize_params.scale)} and {float(params.scale)}; they must be equal."
            )
        self._restore(node.outputs[0], value, quantize, params)

    def restore_borders(self) -> None:
        """Make INT8 inputs and outputs floats."""
        real = ir.TensorType(ir.DataType.FLOAT)
        for value in list(self._graph.outputs):
            writer = value.producer()
            if writer is not None and is_quantize(writer) and writer.inputs[0] is not None:
                value.type = real
                self._restore(value, writer.inputs[0], writer, symmetric_params(writer))
        borders = (*self._graph.inputs, *self._graph.outputs)
        for value in borders:
            if value.dtype == ir.DataType.INT8 and value in self.amax:
                value.type = real
        refuse_unscaled(borders)

    def _restore(
        self, out: ir.Value, value: ir.Value, quantize: ir.Node, params: QuantParams
    ) -> None:
        """Replace the result of Q or DQ by the value that it stands for, which gets its range."""
        name = str(value.name)
        self._replace(out, value)
        limit, known = QMAX * float(params.scale), self.amax.get(value)
        if known is not None and known != limit:
            self.notes.append(
                f"tensor {name!r} has the ranges {known} and {limit} (node {quantize.name!r}); "
                "the larger one is taken"
            )
        self.amax[value] = max(limit, known or 0.0)

    def _replace(self, out: ir.Value, value: ir.Value) -> None:
        """Replace the output of a DQ node by `value`; a model output keeps its name."""
        for reader, operand in list(out.uses()):
            reader.replace_input_with(operand, value)
        if not out.is_graph_output():
            return
        index = list(self._graph.outputs).index(out)
        name = out.name
        if value.producer() is None or value.is_graph_output():
            same = ir.Node("", "Identity", [value], name=f"Identity_{name}")
            same.outputs[0].type, same.outputs[0].shape = out.type, out.shape
            self._graph.append(same)
            out.name = f"{name}_dequantized"
            same.outputs[0].name = name
            self._graph.outputs[index] = same.outputs[0]
            return
        self._graph.outputs[index] = value
        out.name, value.name = f"{name}_dequantized", name
        value.type = value.type or out.type
        value.shape = value.shape or out.shape

    def _fold(self, node: ir.Node, params: QuantParams, source: ir.Value) -> None:
        """Replace the DQ of a constant by a float constant."""
        origin = quantized_constant(node)
        array = constant_of(origin)
        assert origin is not None
        assert array is not None
        quantize = source.producer() if origin is not source else None
        float_weight: np.ndarray | None = None
        if quantize is not None:
            quantize_params = symmetric_params(quantize)
            if not np.array_equal(quantize_params.scale, params.scale):
                raise ImportModelError(
                    f"Nodes {quantize.name!r} and {node.name!r} are a pair, but their scales "
                    "differ; they must be equal."
                )
            float_weight, array = array, quantized_by(array, quantize_params, str(quantize.name))
        scale, zero = (
            along(part, params, array, str(node.name)) for part in (params.scale, params.zero)
        )
        wide = array.astype(np.float64 if array.dtype == np.int32 else np.float32)
        restored = ((wide - zero) * scale).astype(params.scale.dtype)
        differs = self._check_weight(
            node, params, restored if float_weight is None else float_weight
        )
        out = node.outputs[0]
        if float_weight is not None and not differs:
            self._replace(out, origin)
            return
        name = f"{out.name}_value" if out.is_graph_output() else str(out.name)
        out.name = str(out.name) if out.is_graph_output() else f"{name}_removed"
        axis = params.axis if params.scale.ndim else None
        self.integers[name] = StoredWeight(str(origin.name), params.scale.astype(np.float32), axis)
        folded = ir.Value(name=name, shape=ir.Shape(array.shape))
        folded.const_value = ir.tensor(restored, name=name)
        folded.type = ir.TensorType(folded.const_value.dtype)
        self._graph.register_initializer(folded)
        self._replace(out, folded)

    def _check_weight(self, node: ir.Node, params: QuantParams, weight: np.ndarray) -> bool:
        """Compare a weight's scale with max|w_c| / 127; return True if it differs."""
        for reader, axis in weight_readers(node, weight):
            if axis is not None and params.scale.ndim and params.axis % weight.ndim != axis:
                raise ImportModelError(
                    f"Node {node.name!r} scales the weight of {reader.name!r} ({reader.op_type}) "
                    f"along axis {params.axis}, but its output channels are axis {axis}; quantize "
                    "weights per output channel."
                )
            reduced_axes = tuple(i for i in range(weight.ndim) if i != axis)
            limit = np.abs(weight).max(axis=reduced_axes).astype(np.float64)
            scale = np.broadcast_to(params.scale.astype(np.float64), limit.shape)
            differs = np.abs(scale - limit / QMAX) > WEIGHT_TOLERANCE * limit / QMAX
            differs &= limit > _SWITCHED_OFF
            if not differs.any():
                continue
            channel = int(np.argmax(differs))
            text = (
                f"the weight of node {reader.name!r} has the scale "
                f"{float(scale.flat[channel]):.7g} in "
                f"channel {channel}, but max|w| / 127 is {float(limit.flat[channel]) / QMAX:.7g} "
                "there "
                f"({int(differs.sum())} of {differs.size} channels differ)"
            )
            if not self._any_weight_scale:
                raise ImportModelError(
                    f"{text[0].upper()}{text[1:]}; TensorRT would quantize the plain weight "
                    "differently: allow any weight scale, or quantize weights by their maximum."
                )
            self.notes.append(text)
            return True
        return False


def refuse_unscaled(values: Sequence[ir.Value]) -> None:
    """Raise ImportModelError: an INT8 tensor is among these values, which have no scale."""
    for value in values:
        if value.dtype == ir.DataType.INT8:
            raise ImportModelError(
                f"no Q/DQ beside it says the scale of the INT8 tensor {value.name!r}."
            )


def refuse_integer_operators(model: ir.Model) -> None:
    """Raise ImportModelError: a node computes in integers by itself."""
    for node in model.graph.all_nodes():
        if node.op_type in INTEGER_OPS or node.op_type.startswith("QLinear"):
            raise ImportModelError(
                f"Node {node.name!r} is {node.op_type}, which computes in integers by itself; "
                "export the model in the Q/DQ format."
            )


def _refuse_foreign(model: ir.Model, *, int8_borders: bool) -> None:
    """Refuse integer operators, Q/DQ in inner graphs, and models without Q/DQ."""
    refuse_integer_operators(model)
    outer = set(model.graph)
    has_qdq = False
    for node in model.graph.all_nodes():
        if not (is_quantize(node) or is_dequantize(node)):
            continue
        has_qdq = True
        if node not in outer:
            raise ImportModelError(
                f"Node {node.name!r} ({node.op_type}) lies in a graph inside another node, where "
                "Q/DQ cannot be taken out; inline that graph first."
            )
        if is_quantize(node):
            _refuse_other_readers(node, int8_borders=int8_borders)
    if not has_qdq:
        raise ImportModelError(
            "The model has no QuantizeLinear or DequantizeLinear node; it is plain already."
        )


def _refuse_other_readers(node: ir.Node, *, int8_borders: bool) -> None:
    out = node.outputs[0]
    reader = next((use.node for use in out.uses() if not is_dequantize(use.node)), None)
    if reader is None and (int8_borders or not out.is_graph_output()):
        return
    who = f"node {reader.name!r} ({reader.op_type})" if reader is not None else "the model's output"
    raise ImportModelError(
        f"Node {node.name!r} (QuantizeLinear) gives integers to {who}, but only DequantizeLinear "
        "may read them; export the model with Q/DQ pairs around its operators."
    )


def _float_activations(node: ir.Node) -> Iterator[str]:
    for value in node.inputs:
        if value is not None and is_activation(value):
            yield str(value.name)
