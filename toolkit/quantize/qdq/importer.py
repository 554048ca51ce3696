"""Q/DQ model -> float model + ranges, which TensorRT with calibrators can build for the DLA.

    x -> Q(s) -> DQ(s) -> x'      becomes  x,  amax(x) = 127 s
    q -> DQ(s_c),  w -> Q -> DQ   become   the float weight w = q s_c, or w itself

Accepted: INT8 with zero point 0, or the equivalent UINT8 with 128; activations per tensor; weights
with s_c = max|w_c| / 127, as TensorRT quantizes a float model. INT32 biases become float. A Clip of
the integers of a weight is applied, one that only cuts -128 off an activation is dropped.
On request zero points of activations become symmetric ranges. Where the least integer is 0, Q cuts
negative numbers off: a Relu takes that over, unless there are none.
Everything else is refused with node, rule and value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as ir_passes

from calibration.table import QMAX
from toolkit.errors import ImportModelError
from toolkit.graph.widen import widen
from toolkit.quantize.qdq.infer_ranges import RANGE_KEEPING_OPS, infer_ranges, nodes_in_float
from toolkit.quantize.qdq.nodes import (
    INTEGER_OPS,
    QuantParams,
    constant_of,
    is_dequantize,
    is_quantize,
    quant_params_of,
    quantized_constant,
)
from toolkit.quantize.qdq.symmetric import (
    along,
    cuts_negatives,
    quantized_by,
    symmetric_params,
    symmetric_steps,
    weight_readers,
)
from toolkit.quantize.quantize import QUANTIZED_OPS, RESULT_AMAX, is_activation
from toolkit.quantize.weights import StoredWeight

WEIGHT_TOLERANCE = 1e-3
"""Relative tolerance of s_c against max|w_c| / 127."""

# Channels whose weights are all below are switched off.
_SWITCHED_OFF = 1e-30

_NOT_NEGATIVE = frozenset({"Abs", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Sqrt"})
# Operators whose results are not negative if no operand is.
_KEEPS_SIGN = frozenset({"Add", "Concat", "Max", "Mul", "Sum"})


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
    model: ir.Model,
    *,
    any_weight_scale: bool = False,
    any_zero_point: bool = False,
    int8_borders: bool = False,
) -> PlainModel:
    """Remove the Q/DQ from a copy of a model, whose floats of 16 bits become float32.

    `any_weight_scale` accepts weights whose scale is not max|w_c| / 127, with a note; their float
    values are then the dequantized ones. `any_zero_point` makes ranges of activations symmetric,
    with a note of how much coarser their steps become. `int8_borders` accepts INT8 inputs and
    outputs, which become floats under their names, as those of a segment.

    Raises ImportModelError: there is no Q/DQ, or one that is not symmetric INT8.
    """
    copy = model.clone()
    was_half = widen(copy, ir.DataType.FLOAT16)
    for node in list(copy.graph):
        if node.op_type == "Clip" and not node.outputs[0].is_graph_output():
            _absorb_clip(copy.graph, node)
    _refuse_foreign(copy, int8_borders=int8_borders)
    remover = _QdqRemover(copy.graph, any_weight_scale, any_zero_point, int8_borders)
    float_nodes = nodes_in_float(copy.graph)
    for node in list(copy.graph):
        if is_dequantize(node):
            remover.remove(node)
    if int8_borders:
        remover.restore_borders()
    remover.note_coarser_steps()
    if was_half:
        remover.notes.append("floats of 16 bits are read as float32, of which INT8 is made")
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

    def __init__(
        self, graph: ir.Graph, any_weight_scale: bool, any_zero_point: bool, int8_borders: bool
    ) -> None:
        self.amax: dict[ir.Value, float] = {}
        self.notes: list[str] = []
        self.integers: dict[str, StoredWeight] = {}
        self._graph = graph
        self._any_weight_scale = any_weight_scale
        self._any_zero_point = any_zero_point
        self._rectified: dict[ir.Value, ir.Value] = {}
        self._coarser: dict[str, float] = {}  # activation -> growth of its step
        self._int8_borders = int8_borders

    def remove(self, node: ir.Node) -> None:
        params = self._params(node)
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

    def note_coarser_steps(self) -> None:
        """Note the loss by ranges that became symmetric."""
        if self._coarser:
            worst = max(self._coarser, key=self._coarser.__getitem__)
            growth = self._coarser[worst]
            self.notes.append(
                f"{len(self._coarser)} activations have a zero point that INT8 has not: their "
                f"ranges become symmetric, and steps up to {growth:.2f} times as large "
                f"({worst!r}: {20 * np.log10(growth):.1f} dB lost)"
            )

    def _params(self, node: ir.Node) -> QuantParams:
        constant = quantized_constant(node) is not None
        any_zero_point = self._any_weight_scale if constant else self._any_zero_point
        return symmetric_params(node, any_zero_point=any_zero_point)

    def _rectify(self, value: ir.Value) -> ir.Value:
        """A Relu of a value that a zero point made positive; what never is negative, itself."""
        if _never_negative(value):
            return value
        if value not in self._rectified:
            relu = ir.Node("", "Relu", [value], name=f"{value.name}_rectify")
            out = relu.outputs[0]
            out.name, out.type, out.shape = f"{value.name}_rectified", value.type, value.shape
            producer = value.producer()
            assert producer is not None  # inputs of a model are left alone
            self._graph.insert_after(producer, relu)
            self._rectified[value] = out
        return self._rectified[value]

    def _remove_pair(self, quantize: ir.Node, node: ir.Node, params: QuantParams) -> None:
        quantize_params = self._params(quantize)
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
        if quantize_params.zero != params.zero:
            raise ImportModelError(
                f"Nodes {quantize.name!r} and {node.name!r} are a pair, but their zero points are "
                f"{int(quantize_params.zero)} and {int(params.zero)}; they must be equal."
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
        if self._any_zero_point and cuts_negatives(params):
            value = self._rectify(value)
        name, steps = str(value.name), symmetric_steps(params)
        self._replace(out, value)
        if steps > QMAX:
            self._coarser[name] = steps / QMAX
        limit, known = steps * float(params.scale), self.amax.get(value)
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
            quantize_params = symmetric_params(quantize, any_zero_point=self._any_weight_scale)
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
        if not params.block and not params.zero.any():
            axis = params.axis if params.scale.ndim else None
            scales = params.scale.astype(np.float32)
            self.integers[name] = StoredWeight(str(origin.name), scales, axis)
        folded = ir.Value(name=name, shape=ir.Shape(array.shape))
        folded.const_value = ir.tensor(restored, name=name)
        folded.type = ir.TensorType(folded.const_value.dtype)
        self._graph.register_initializer(folded)
        self._replace(out, folded)

    def _check_weight(self, node: ir.Node, params: QuantParams, weight: np.ndarray) -> bool:
        """Compare a weight's scale with max|w_c| / 127; return True if it differs."""
        for reader, axis in weight_readers(node, weight):
            if params.block:
                self.notes.append(
                    f"the weight of node {reader.name!r} has a scale for every {params.block} "
                    "numbers; INT8 gives it one for each output channel"
                )
                return True
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


def _absorb_clip(graph: ir.Graph, clip: ir.Node) -> None:
    """Remove a Clip of integers before DQ, as tools write narrow ranges and fewer bits."""
    stored, readers = clip.inputs[0], [use.node for use in clip.outputs[0].uses()]
    bounds = [constant_of(value) for value in clip.inputs[1:]]
    if not readers or not all(map(is_dequantize, readers)):
        return
    if stored is None or len(bounds) != 2 or any(b is None or b.size != 1 for b in bounds):
        return  # refused, as other readers of integers are
    low, high = (int(bound.item()) for bound in bounds if bound is not None)
    integers, quantize = constant_of(stored), stored.producer()
    if quantize is not None and is_quantize(quantize):
        array, params = constant_of(quantize.inputs[0]), quant_params_of(quantize)
        if array is not None and params is not None:
            integers = quantized_by(array, params, str(quantize.name))
        elif high - low < 2 * QMAX:
            raise ImportModelError(
                f"Node {clip.name!r} clips the integers of an activation to [{low}, {high}], fewer "
                "than 8 bits; quantize activations to 8 bits (Brevitas: bit_width=8)."
            )
    elif integers is None:
        return
    if integers is not None:
        name = f"{clip.outputs[0].name}_integers"
        tensor = ir.tensor(np.clip(integers, low, high).astype(integers.dtype), name=name)
        stored = ir.Value(name=name, const_value=tensor, shape=ir.Shape(integers.shape))
        stored.type = ir.TensorType(tensor.dtype)
        graph.register_initializer(stored)
    clip.outputs[0].replace_all_uses_with(stored)
    graph.remove(clip, safe=True)


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
                "export the model in the Q/DQ format (onnxruntime: quantize_static with "
                "quant_format=QuantFormat.QDQ)."
            )


def check_narrow_floats(model: ir.Model, no_float8: str | None) -> int:
    """Return how many nodes round activations to FP8 (E4M3) that others than a Cast read.

    Raises ImportModelError: there are some, and `no_float8` says why they cannot stay, or such a
    node rounds to other floats of 8 or 4 bits.
    """
    count = 0
    for node in model.graph.all_nodes():
        params = quant_params_of(node) if is_quantize(node) else None
        if params is None or constant_of(node.inputs[0]) is not None:
            continue
        if not params.dtype.name.startswith(("FLOAT8", "FLOAT4")):
            continue
        if all(use.node.op_type == "Cast" for use in node.outputs[0].uses()):
            continue  # which runs portable
        refusal = no_float8
        if params.dtype != ir.DataType.FLOAT8E4M3FN:
            refusal = "for which there are no kernels"
        if refusal is not None:
            raise ImportModelError(
                f"Node {node.name!r} (QuantizeLinear) rounds an activation to {params.dtype.name}, "
                f"{refusal}; quantize to INT8 (ModelOpt: quantize_mode='int8', AIMET: "
                "activation_type='int8')."
            )
        count += 1
    return count


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


def _never_negative(value: ir.Value) -> bool:
    """Whether a value is an input, whose range is said, or made by operators that give no sign."""
    pending, seen = [value], {value}
    while pending:
        operand = pending.pop()
        node = operand.producer()
        if node is None:
            if operand.const_value is not None:
                return False
            continue
        low = constant_of(node.inputs[1]) if node.op_type == "Clip" and node.inputs[1:] else None
        if node.op_type in _NOT_NEGATIVE or (low is not None and np.all(low >= 0)):
            continue
        if node.op_type not in RANGE_KEEPING_OPS | _KEEPS_SIGN:
            return False
        sources = node.inputs[:1] if node.op_type in RANGE_KEEPING_OPS else node.inputs
        new = {source for source in sources if source is not None} - seen
        pending.extend(new)
        seen |= new
    return True


def _float_activations(node: ir.Node) -> Iterator[str]:
    for value in node.inputs:
        if value is not None and is_activation(value):
            yield str(value.name)
