"""Calibration table + placement -> Q/DQ graph (INT8, symmetric, zero point 0).

    q = clip(round(x / s), -128, 127),  x' = q s,  s = amax / 127

Activations are quantized per tensor, weights per output channel (s_w = max|w_c| / 127). A bias is
INT32 with scale s_x s_w, so that Conv(x', w') + b is exact in integers. If the weights of a channel
are so small that its bias would overflow INT32 (batch normalisation switches channels off that
way), s_w is raised to the smallest value that holds the bias.

A ReLU keeps the scale of its operand: relu(Q'(x)) = Q'(relu(x)) for the same s, because rounding is
monotone and Q(0) = 0. Quantizing on both sides of it costs nothing and lets runtimes fuse Conv and
Q.

A tensor that crosses between processors is INT8: Q is in the segment that computes it, DQ in each
segment that reads it. Within a segment the same values are stored as UINT8 with zero point 128
(stored + 128), for which onnxruntime has integer kernels on every CPU.

What an INT8 node writes for readers in floating point alone, such as the SiLU behind a convolution,
or as an output of the model, is not rounded, and keeps its range as metadata: TensorRT with ranges
runs a layer in INT8 only if its result has one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from calibration.table import scale_of
from toolkit.errors import BuildError
from toolkit.quantize.qdq.writer import QdqWriter
from toolkit.quantize.weights import bias_per_channel, constant_of, quantize_weight

# Larger constants are attention masks; no INT8 scale represents them and a signal.
MASK = 1e30
# Operators between a mask constant and the Softmax.
MASK_CARRIERS = frozenset(
    {"Add", "Cast", "Concat", "Expand", "Gather", "Mul", "Reshape", "Slice", "Squeeze", "Sub"}
    | {"Tile", "Transpose", "Trilu", "Unsqueeze", "Where"}
)

INT8_READS = "int8_reads"
"""Metadata of a node while a build goes on: index of an operand that it reads in INT8 -> scale."""
INTEGERS_OF = "integers_of"
"""Metadata of an integer constant while a build goes on: the name of the float constant."""
RESULT_AMAX = "tandem.result_amax"
"""Metadata of a value that an INT8 node writes and no node reads in INT8: its range."""


@dataclass(frozen=True, slots=True)
class QuantizedOp:
    """How an operator is quantized: which operands are activations, and where its weight is.

    `weight_axis` is the output-channel axis of the weight.
    """

    op: str
    activations: tuple[int, ...] | None  # None: all operands
    weight: int | None = None
    weight_axis: int = 0
    bias: int | None = None


QUANTIZED_OPS: Mapping[str, QuantizedOp] = {
    row.op: row
    for row in (
        QuantizedOp("Conv", (0,), weight=1, weight_axis=0, bias=2),
        QuantizedOp("ConvTranspose", (0,), weight=1, weight_axis=1, bias=2),
        QuantizedOp("Gemm", (0,), weight=1, weight_axis=1, bias=2),
        QuantizedOp("MatMul", (0, 1), weight=1, weight_axis=1),
        QuantizedOp("Add", None),
        QuantizedOp("Sum", None),
        QuantizedOp("Concat", None),
        QuantizedOp("MaxPool", (0,)),
        QuantizedOp("AveragePool", (0,)),
        QuantizedOp("GlobalAveragePool", (0,)),
    )
}

AVERAGES = frozenset({"AveragePool", "GlobalAveragePool"})
# Operators behind which Q at the same scale rounds just as before them.
SCALE_MOVING_OPS = frozenset({"Flatten", "Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# Operators f with f(Q'(x)) = Q'(f(x)) for the same scale.
SCALE_KEEPING_OPS = frozenset({"Relu"})


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The Q/DQ graph, the segment of every node in it, and the scale of every INT8 tensor."""

    model: ir.Model
    segment_of: Mapping[str, str]
    scales: Mapping[str, float]


def rectified_operands(model: ir.Model) -> dict[str, str]:
    """Operand -> result of ReLUs that are the only reader of their operand; both share one range.

    For f = max(0, x), with or without an upper bound, f(Q'(x)) = Q'(f(x)) at the scale of f(x),
    which is within the bounds of f: f clips whatever Q' clips.
    """
    result_of = {}
    for node in model.graph:
        if node.domain != "" or node.op_type not in ("Relu", "Clip"):
            continue
        operand, result = node.inputs[0], node.outputs[0]
        if node.op_type == "Clip" and _constant(node, 1) != 0.0:
            continue
        if operand is None or operand.producer() is None or operand.is_graph_output():
            continue
        if len(list(operand.uses())) == 1:
            result_of[str(operand.name)] = str(result.name)
    return result_of


def with_operands(model: ir.Model, amax: Mapping[str, float]) -> dict[str, float]:
    """Return `amax` with the ranges of ReLU operands added, where they are missing."""
    complete = dict(amax)
    for operand, result in reversed(rectified_operands(model).items()):
        if result in complete:
            complete.setdefault(operand, complete[result])
    return complete


def _constant(node: ir.Node, index: int) -> float | None:
    """The single number that an operand holds; exporters write it as [] or as [1]."""
    value = node.inputs[index] if index < len(node.inputs) else None
    constant = value.const_value if value is not None else None
    if constant is None or constant.size != 1:
        return None
    return float(constant.numpy().item())


def calibrated_tensors(model: ir.Model) -> tuple[str, ...]:
    """The float32 activations to observe: all but masks and operands that only a ReLU reads."""
    graph = model.graph
    excluded = masked_tensors(model) | rectified_operands(model).keys()
    values = [*graph.inputs, *(out for node in graph for out in node.outputs)]
    return tuple(
        str(v.name)
        for v in values
        if v.dtype == ir.DataType.FLOAT and v.name and _used(v) and str(v.name) not in excluded
    )


def masked_tensors(model: ir.Model) -> frozenset[str]:
    """The activations that carry an attention mask; their readers compute in floating point."""
    masks = {value for value in model.graph.initializers.values() if _holds_mask(value)}
    constants = frozenset(masks)
    for node in model.graph:
        if node.op_type in MASK_CARRIERS and not masks.isdisjoint(node.inputs):
            masks.update(node.outputs)
    return frozenset(str(value.name) for value in masks - constants)


def int8_nodes(
    model: ir.Model, keep_float: frozenset[str] = frozenset()
) -> tuple[tuple[ir.Node, QuantizedOp], ...]:
    """The nodes that compute in INT8, with their rows of QUANTIZED_OPS.

    Left out: nodes that read or write masks, and those in `keep_float`.
    """
    masks = masked_tensors(model)
    nodes = []
    for node in model.graph:
        row = QUANTIZED_OPS.get(node.op_type)
        if row is None or node.domain != "" or str(node.name) in keep_float:
            continue
        tensors = (*node.inputs, *node.outputs)
        if not any(str(value.name) in masks for value in tensors if value is not None):
            nodes.append((node, row))
    return tuple(nodes)


def quantize(
    model: ir.Model,
    amax: Mapping[str, float],
    segment_of: Mapping[str, str],
    int8_segments: frozenset[str],
    *,
    keep_float: frozenset[str] = frozenset(),
    operands: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    writer: type[QdqWriter] = QdqWriter,
) -> QuantizedModel:
    """Return a copy of the model with Q/DQ, or as another `writer` leaves it.

    `amax` gives the range of each tensor; `segment_of` the segment of each node by name;
    `int8_segments` those whose boundaries are INT8 wherever a range is known (the DLA's).
    `keep_float` names nodes that compute in floating point: their weights stay as they are, and
    no activation is rounded for them; they read INT8 only where it crosses between processors.
    `operands`: node -> indices of the operands that it reads in INT8, instead of those of its row;
    () is a node in floating point (`toolkit.quantize.gpu_operands`).

    Raises BuildError: a tensor that must be quantized has no range.
    """
    inserter = _Inserter(model.clone(), amax, dict(segment_of), keep_float, writer)
    reads = int8_reads(inserter.model, keep_float, operands)
    for node, row in reads:
        inserter.quantize_node(node, row)
    inserter.quantize_boundaries(int8_segments)
    inserter.quantize_averages(int8_segments)
    inserter.insert()
    inserter.keep_ranges(node for node, _ in reads)
    inserter.graph.sort()
    return QuantizedModel(inserter.model, inserter.segment_of, inserter.scales)


def int8_reads(
    model: ir.Model, keep_float: frozenset[str], operands: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[ir.Node, QuantizedOp], ...]:
    """`int8_nodes`, with `operands` of `quantize` in place of those of the row."""
    known = dict(int8_nodes(model, keep_float))
    nodes = []
    for node in model.graph:
        row, indices = known.get(node), operands.get(str(node.name))
        if indices is not None:
            row = replace(row or QuantizedOp(node.op_type, ()), activations=indices)
        if indices == ():
            row = None
        if row is not None:
            nodes.append((node, row))
    return tuple(nodes)


class _Inserter:
    """Collects the uses of each tensor in INT8, then writes each Q and DQ node once."""

    def __init__(
        self,
        model: ir.Model,
        amax: Mapping[str, float],
        segment_of: dict[str, str],
        keep_float: frozenset[str],
        writer: type[QdqWriter],
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.amax = amax
        self.keep_float = keep_float
        self.segment_of = segment_of
        self.scales: dict[str, float] = {}
        self._writer = writer(self.graph)
        self._parameter_values: dict[str, ir.Value] = {}
        self._uses: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
        self._sole_readers: set[ir.Node] = set()  # of what is dequantized for them alone

    def quantize_node(self, node: ir.Node, row: QuantizedOp) -> None:
        """Mark a node's activations; replace its weight and bias by integers and DQ."""
        indexes = range(len(node.inputs)) if row.activations is None else row.activations
        for index in indexes:
            value = node.inputs[index]
            if value is not None and is_activation(value):
                self._require(node, value)
                self._read_in_int8(value, node, index)
        first, weight = node.inputs[0], constant_of(node, row.weight)
        # A vector has no output channels; operands of other types stay as they are.
        if weight is None or weight.ndim < 2 or first is None or not is_activation(first):
            return
        step = scale_of(self.amax[str(first.name)])
        axis = weight_axis(node, row, weight)
        bias = bias_per_channel(constant_of(node, row.bias), weight, axis)
        quantized = quantize_weight(weight, bias, axis, step)
        self._replace_constant(node, row.weight, quantized.stored, quantized.scale, axis)
        if quantized.bias is not None and quantized.bias_scale is not None:
            self._replace_constant(node, row.bias, quantized.bias, quantized.bias_scale, 0)

    def quantize_boundaries(self, int8_segments: frozenset[str]) -> None:
        """Mark the tensors that enter or leave INT8 segments."""
        for node in list(self.graph):
            for index, value in enumerate(node.inputs):
                if value is None or not is_activation(value) or str(value.name) not in self.amax:
                    continue
                producer = value.producer()
                source = self.segment_of[str(producer.name)] if producer else ""
                target = self.segment_of[str(node.name)]
                if source != target and {source, target} & int8_segments:
                    self._read_in_int8(value, node, index)

    def quantize_averages(self, int8_segments: frozenset[str]) -> None:
        """Mark the averages that layers in floating point read within INT8 segments.

        A DLA's pooling writes INT8 at the scale of its input, whatever reads it, so that the graph
        has to round there too.
        """
        for node in list(self.graph):
            segment, value = self.segment_of[str(node.name)], node.outputs[0]
            known = str(value.name) in self.amax and str(node.name) not in self.keep_float
            if segment not in int8_segments or node.op_type not in AVERAGES or not known:
                continue
            for reader, index in value.uses():
                moves = reader.op_type in QUANTIZED_OPS or reader.op_type in SCALE_MOVING_OPS
                if self.segment_of[str(reader.name)] == segment and not moves:
                    self._read_in_int8(value, reader, index)

    def insert(self) -> None:
        """Write the Q and DQ nodes for every marked use."""
        for value, uses in self._uses.items():
            scale = scale_of(self.amax[str(value.name)])
            by_segment: dict[str, list[tuple[ir.Node, int]]] = {}
            for node, index in uses:
                by_segment.setdefault(self.segment_of[str(node.name)], []).append((node, index))
            producer = value.producer()
            producer_segment = self.segment_of[str(producer.name)] if producer else None
            self._keep_scale_before(value, scale)
            stored: ir.Value | None = None
            for segment, members in by_segment.items():
                source = value
                if producer_segment not in {None, segment}:
                    stored = stored or self._quantized(value, scale, str(producer_segment))
                    source = self._dequantized(stored, value, scale, segment)
                if source is value or any(node.op_type in QUANTIZED_OPS for node, _ in members):
                    source = self._rounded(source, f"{value.name}_{segment}", scale, segment)
                for node, index in members:
                    _read(node, index, source, scale)
                    if len(members) == 1:
                        self._sole_readers.add(node)

    def keep_ranges(self, int8_nodes: Iterable[ir.Node]) -> None:
        """Note the ranges of INT8 nodes' results that no Q holds and no reader tells."""
        for node in int8_nodes:
            for value in self._read_in_float(node.outputs[0]):
                limit = self.amax.get(str(value.name))
                if limit is not None:
                    value.metadata_props[RESULT_AMAX] = repr(float(limit))

    def _read_in_float(self, value: ir.Value) -> tuple[ir.Value, ...]:
        """A result that floating point reads, or who runs the model, and what makes it of it."""
        if value in self._uses:
            return ()
        readers = [use.node for use in value.uses()]
        moves = [n for n in readers if n.op_type in SCALE_MOVING_OPS and INT8_READS not in n.meta]
        moved = [v for node in moves for v in self._read_in_float(node.outputs[0])]
        is_read = value.is_graph_output() or len(moves) < len(readers)
        return (value, *moved) if is_read or moved else ()

    def _keep_scale_before(self, value: ir.Value, scale: float) -> None:
        """Quantize the operand of a scale-keeping producer with the same scale."""
        producer = value.producer()
        if producer is None or producer.op_type not in SCALE_KEEPING_OPS:
            return
        operand = producer.inputs[0]
        sole = producer in self._sole_readers
        if operand is None or (not sole and (operand in self._uses or len(operand.uses()) != 1)):
            return
        if any(str(use.node.name) in self.keep_float for use in value.uses()):
            return  # this reader needs the unquantized result
        operand_producer = operand.producer()
        segment = self.segment_of[str(producer.name)]
        inside = operand_producer and self.segment_of[str(operand_producer.name)] == segment
        if not sole and not inside:
            return
        rounded = self._rounded(operand, f"{operand.name}_{segment}", scale, segment)
        _read(producer, 0, rounded, scale)

    def _quantized(self, value: ir.Value, scale: float, segment: str) -> ir.Value:
        """INT8 with zero point 0, for a value that leaves its segment."""
        parameters = self._parameters(value, scale, np.int8)
        name = f"{value.name}_int8"
        quantized = self._writer.quantize(value, parameters, name, dtype=ir.DataType.INT8)
        self.scales[str(quantized.name)] = scale
        crossing = quantized.producer()
        assert crossing is not None
        crossing.meta[INT8_READS] = {0: scale}
        return self._in(segment, quantized)

    def _dequantized(
        self, stored: ir.Value, value: ir.Value, scale: float, segment: str
    ) -> ir.Value:
        parameters = self._parameters(value, scale, np.int8)
        name = f"{value.name}_{segment}_restored"
        return self._in(segment, self._writer.dequantize(stored, parameters, name))

    def _rounded(self, value: ir.Value, name: str, scale: float, segment: str) -> ir.Value:
        """Q and DQ within a segment, stored as UINT8 with zero point 128 (see the module)."""
        parameters = self._parameters(value, scale, np.uint8)
        stored = self._writer.quantize(value, parameters, f"{name}_uint8", dtype=ir.DataType.UINT8)
        self._in(segment, stored)
        return self._in(segment, self._writer.dequantize(stored, parameters, name))

    def _in(self, segment: str, value: ir.Value) -> ir.Value:
        """Assign the producer of a value to a segment, if it has none."""
        producer = value.producer()
        if producer is not None:
            self.segment_of.setdefault(str(producer.name), segment)
        return value

    def _parameters(
        self, value: ir.Value, scale: float, stored: type[np.int8 | np.uint8]
    ) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of a value; shared by its Q and DQ nodes."""
        zero = 128 if stored is np.uint8 else 0
        return (
            self._shared(f"{value.name}_scale", np.array(scale, np.float32)),
            self._shared(f"zero_{np.dtype(stored).name}", np.array(zero, stored)),
        )

    def _shared(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self._parameter_values:
            self._parameter_values[name] = self._writer.constant(name, array)
        return self._parameter_values[name]

    def _require(self, node: ir.Node, value: ir.Value) -> None:
        if str(value.name) not in self.amax:
            raise BuildError(
                f"Tensor {value.name!r}, read by node {node.name!r} ({node.op_type}), has no range "
                "in the calibration table; INT8 without ranges is refused: calibrate again on "
                "this model."
            )

    def _read_in_int8(self, value: ir.Value, node: ir.Node, index: int) -> None:
        uses = self._uses.setdefault(value, [])
        if (node, index) not in uses:
            uses.append((node, index))

    def _replace_constant(
        self,
        node: ir.Node,
        index: int | None,
        stored: np.ndarray,
        scale: np.ndarray,
        axis: int | None,
    ) -> None:
        """Replace a constant operand by integers and their DQ."""
        assert index is not None
        source = node.inputs[index]
        assert source is not None
        parameters = [
            self._writer.constant(f"{source.name}_scale", scale),
            self._writer.constant(f"{source.name}_zero", np.zeros(scale.shape, stored.dtype)),
        ]
        integers = self._writer.constant(f"{source.name}_int{8 * stored.itemsize}", stored)
        integers.meta[INTEGERS_OF] = str(source.name)
        restored = self._writer.dequantize(
            integers, parameters, f"{source.name}_dequantized", axis=axis
        )
        node.replace_input_with(index, self._in(self.segment_of[str(node.name)], restored))
        if not source.uses() and not source.is_graph_output():
            self.graph.initializers.pop(str(source.name), None)


def _read(node: ir.Node, index: int, value: ir.Value, scale: float) -> None:
    """Let a node read an operand in INT8."""
    node.replace_input_with(index, value)
    scales = node.meta.setdefault(INT8_READS, {})
    scales[index] = max(scale, scales.get(index, 0.0))


def is_activation(value: ir.Value) -> bool:
    """True if a value is a float32 activation, which INT8 gives a range."""
    return value.const_value is None and value.dtype == ir.DataType.FLOAT


def _holds_mask(value: ir.Value) -> bool:
    if value.const_value is None or value.dtype != ir.DataType.FLOAT:
        return False
    return bool((np.abs(value.const_value.numpy()) > MASK).any())


def weight_axis(node: ir.Node, row: QuantizedOp, weight: np.ndarray) -> int | None:
    """The output-channel axis of a node's weight; None for a batch of matrices (one scale)."""
    if node.op_type == "MatMul" and weight.ndim > 2:
        return None
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        return 0
    return row.weight_axis


def _used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
