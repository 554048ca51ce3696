"""Q/DQ model -> plain float model + ranges: what a TensorRT with calibrators can build for the DLA.

    x -> Q(s) -> DQ(s) -> x'      becomes  x,  amax(x) = 127 s
    q -> DQ(s_c),  w -> Q -> DQ   become   the float weight w = q s_c, or w itself

Taken: INT8 with zero point 0, and UINT8 with 128, which is the same grid; one scale for each
activation; weights with s_c = max|w_c| / 127, which is what TensorRT makes of a plain model.
Biases stored as INT32 become float. Everything else is refused with node, rule and value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes

from calibration.table import QMAX
from toolkit.errors import ImportModelError
from toolkit.quantize.qdq.nodes import (
    INTEGER_OPS,
    Grid,
    constant_of,
    is_dequantize,
    is_quantize,
    quantized_constant,
)
from toolkit.quantize.qdq.ranges import infer_ranges, nodes_in_float
from toolkit.quantize.qdq.symmetric import along, rounded_by, symmetric_grid, weight_readers
from toolkit.quantize.quantize import QUANTIZED_OPS, is_activation

WEIGHT_TOLERANCE = 1e-3
"""How far s_c may lie from max|w_c| / 127, relative to it."""

# Weights below this are nothing beside any other: a channel that is switched off.
_NOTHING = 1e-30


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A float model and what its Q/DQ said.

    `amax`: activation -> range, those in `inferred` carried over from neighbours. `float_nodes`:
    the nodes that computed in floating point. `unranged`: float activations that INT8 nodes read
    or make, but for which the model gave no range. `notes`: what was taken although it differs
    from the rules.
    """

    model: ir.Model
    amax: Mapping[str, float]
    inferred: tuple[str, ...]
    float_nodes: tuple[str, ...]
    unranged: tuple[str, ...]
    notes: tuple[str, ...]


def import_qdq(model: ir.Model, *, any_weight_scale: bool = False) -> PlainModel:
    """Take the Q/DQ out of a copy of a model.

    `any_weight_scale` takes weights whose scale is not max|w_c| / 127 and notes them; their float
    values are then those on the grid.

    Raises ImportModelError: there is no Q/DQ, or one that is not symmetric INT8.
    """
    copy = model.clone()
    _refuse_foreign(copy)
    state = _Stripper(copy.graph, any_weight_scale)
    float_nodes = nodes_in_float(copy.graph)
    for node in list(copy.graph):
        if is_dequantize(node):
            state.take_out(node)
    amax = {str(value.name): found for value, found in state.amax.items()}
    ir_passes.RemoveUnusedNodesPass()(copy)
    ranges, inferred = infer_ranges(copy.graph, amax)
    unranged = tuple(
        dict.fromkeys(
            name
            for node in copy.graph
            if node.op_type in QUANTIZED_OPS and str(node.name) not in float_nodes
            for name in _float_activations(node)
            if name not in ranges
        )
    )
    return PlainModel(copy, ranges, inferred, float_nodes, unranged, tuple(state.notes))


class _Stripper:
    """Takes out one DQ node after another, with the Q before it; collects ranges and notes."""

    def __init__(self, graph: ir.Graph, any_weight_scale: bool) -> None:
        self.amax: dict[ir.Value, float] = {}
        self.notes: list[str] = []
        self._graph = graph
        self._any_weight_scale = any_weight_scale

    def take_out(self, node: ir.Node) -> None:
        grid = symmetric_grid(node)
        source = node.inputs[0]
        assert source is not None  # onnx.checker: the first operand is required
        maker = source.producer()
        if quantized_constant(node) is not None:
            self._fold(node, grid, source)
        elif maker is not None and is_quantize(maker):
            self._remove_pair(maker, node, grid)
        else:
            what = f"{maker.op_type} ({maker.name!r})" if maker else "an input of the model"
            raise ImportModelError(
                f"Node {node.name!r} (DequantizeLinear) reads {source.name!r}, made by {what}, but "
                "only what a QuantizeLinear made can become float; export the model with Q/DQ "
                "pairs around its operators."
            )

    def _remove_pair(self, quantize: ir.Node, node: ir.Node, grid: Grid) -> None:
        before = symmetric_grid(quantize)
        value = quantize.inputs[0]
        assert value is not None
        name = str(value.name)
        if before.scale.ndim or grid.scale.ndim:
            raise ImportModelError(
                f"Node {quantize.name!r} gives the activation {name!r} "
                f"{max(before.scale.size, grid.scale.size)} scales, but activations have one; "
                "quantize activations per tensor."
            )
        if before.scale != grid.scale:
            raise ImportModelError(
                f"Nodes {quantize.name!r} and {node.name!r} are a pair, but their scales are "
                f"{float(before.scale)} and {float(grid.scale)}; they must be equal."
            )
        self._replace(node.outputs[0], value)
        found, known = QMAX * float(grid.scale), self.amax.get(value)
        if known is not None and known != found:
            self.notes.append(
                f"tensor {name!r} has the ranges {known} and {found} (node {quantize.name!r}); "
                "the larger one is taken"
            )
        self.amax[value] = max(found, known or 0.0)

    def _replace(self, out: ir.Value, value: ir.Value) -> None:
        """Let readers of a DQ node read `value`; an output of the model keeps its name."""
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

    def _fold(self, node: ir.Node, grid: Grid, source: ir.Value) -> None:
        """Replace the DQ of a constant by a float constant."""
        origin = quantized_constant(node)
        array = constant_of(origin)
        assert origin is not None
        assert array is not None
        quantize = source.producer() if origin is not source else None
        plain: np.ndarray | None = None
        if quantize is not None:
            before = symmetric_grid(quantize)
            if not np.array_equal(before.scale, grid.scale):
                raise ImportModelError(
                    f"Nodes {quantize.name!r} and {node.name!r} are a pair, but their scales "
                    "differ; they must be equal."
                )
            plain, array = array, rounded_by(array, before, str(quantize.name))
        scale, zero = (along(part, grid, array, str(node.name)) for part in (grid.scale, grid.zero))
        wide = array.astype(np.float64 if array.dtype == np.int32 else np.float32)
        restored = ((wide - zero) * scale).astype(grid.scale.dtype)
        differs = self._check_weight(node, grid, restored if plain is None else plain)
        out = node.outputs[0]
        if plain is not None and not differs:
            self._replace(out, origin)
            return
        name = f"{out.name}_value" if out.is_graph_output() else str(out.name)
        out.name = str(out.name) if out.is_graph_output() else f"{name}_removed"
        folded = ir.Value(name=name, shape=ir.Shape(array.shape))
        folded.const_value = ir.tensor(restored, name=name)
        folded.type = ir.TensorType(folded.const_value.dtype)
        self._graph.register_initializer(folded)
        self._replace(out, folded)

    def _check_weight(self, node: ir.Node, grid: Grid, weight: np.ndarray) -> bool:
        """Compare a weight's scale with max|w_c| / 127; whether it differs."""
        for reader, axis in weight_readers(node, weight):
            if axis is not None and grid.scale.ndim and grid.axis % weight.ndim != axis:
                raise ImportModelError(
                    f"Node {node.name!r} scales the weight of {reader.name!r} ({reader.op_type}) "
                    f"along axis {grid.axis}, but its output channels are axis {axis}; quantize "
                    "weights per output channel."
                )
            others = tuple(i for i in range(weight.ndim) if i != axis)
            limit = np.abs(weight).max(axis=others).astype(np.float64)
            scale = np.broadcast_to(grid.scale.astype(np.float64), limit.shape)
            off = np.abs(scale - limit / QMAX) > WEIGHT_TOLERANCE * limit / QMAX
            off &= limit > _NOTHING
            if not off.any():
                continue
            at = int(np.argmax(off))
            text = (
                f"the weight of node {reader.name!r} has the scale {float(scale.flat[at]):.7g} in "
                f"channel {at}, but max|w| / 127 is {float(limit.flat[at]) / QMAX:.7g} there "
                f"({int(off.sum())} of {off.size} channels differ)"
            )
            if not self._any_weight_scale:
                raise ImportModelError(
                    f"{text[0].upper()}{text[1:]}; TensorRT would quantize the plain weight "
                    "differently: allow any weight scale, or quantize weights by their maximum."
                )
            self.notes.append(text)
            return True
        return False


def _refuse_foreign(model: ir.Model) -> None:
    """Refuse integer operators, Q/DQ in inner graphs, and models without Q/DQ."""
    outer = set(model.graph)
    found = False
    for node in model.graph.all_nodes():
        if node.op_type in INTEGER_OPS or node.op_type.startswith("QLinear"):
            raise ImportModelError(
                f"Node {node.name!r} is {node.op_type}, which computes in integers by itself; "
                "export the model in the Q/DQ format."
            )
        if not (is_quantize(node) or is_dequantize(node)):
            continue
        found = True
        if node not in outer:
            raise ImportModelError(
                f"Node {node.name!r} ({node.op_type}) lies in a graph inside another node, where "
                "Q/DQ cannot be taken out; inline that graph first."
            )
        if is_quantize(node):
            _refuse_other_readers(node)
    if not found:
        raise ImportModelError(
            "The model has no QuantizeLinear or DequantizeLinear node; it is plain already."
        )


def _refuse_other_readers(node: ir.Node) -> None:
    out = node.outputs[0]
    reader = next((use.node for use in out.uses() if not is_dequantize(use.node)), None)
    if reader is None and not out.is_graph_output():
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
