"""Calibration table + placement -> Q/DQ graph (INT8, symmetric, zero point 0).

    q = clip(round(x / s), -128, 127),  x' = q s,  s = amax / 127

Activations have one scale per tensor, weights one per output channel (s_w = max|w_c| / 127), and a
bias is INT32 with scale s_x s_w, so that Conv(x', w') + b is exact in integers. A rectifier keeps
its operand's scale: relu(Q'(x)) = Q'(relu(x)) for the same s, because rounding is monotone and
Q(0) = 0; quantizing on both sides of it costs nothing and lets runtimes fuse Conv and Q.

What crosses between processors is INT8: its Q lies in the segment that makes it, its DQ in each
segment that reads it. Within a segment the same grid is stored as UINT8 with zero point 128
(stored + 128), for which onnxruntime has integer kernels on every CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from calibration.table import scale_of
from toolkit.errors import BuildError

INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class QuantizedOp:
    """How an operator is quantized: which operands are activations, and where its weight is.

    `weight_axis` is the output-channel axis of the weight; -1 counts from the end.
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
        QuantizedOp("MatMul", (0, 1), weight=1, weight_axis=-1),
        QuantizedOp("Add", None),
        QuantizedOp("Sum", None),
        QuantizedOp("Concat", None),
        QuantizedOp("MaxPool", (0,)),
        QuantizedOp("AveragePool", (0,)),
        QuantizedOp("GlobalAveragePool", (0,)),
    )
}

# Operators f with f(Q'(x)) = Q'(f(x)) for the same scale.
SCALE_KEEPING_OPS = frozenset({"Relu"})


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The Q/DQ graph, the segment of every node in it, and the scale of every INT8 tensor."""

    model: ir.Model
    segment_of: Mapping[str, str]
    scales: Mapping[str, float]


def calibrated_tensors(model: ir.Model) -> tuple[str, ...]:
    """The float activations whose ranges a table has to hold: all that inputs influence."""
    graph = model.graph
    values = [*graph.inputs, *(out for node in graph for out in node.outputs)]
    return tuple(
        str(v.name) for v in values if v.dtype == ir.DataType.FLOAT and v.name and _used(v)
    )


def quantize(
    model: ir.Model,
    amax: Mapping[str, float],
    segment_of: Mapping[str, str],
    int8_segments: frozenset[str],
) -> QuantizedModel:
    """Return a copy of the model with Q/DQ.

    `amax` gives the range of each tensor; `segment_of` the segment of each node by name;
    `int8_segments` those whose boundaries are INT8 wherever a range is known (the DLA's).

    Raises BuildError: a tensor that must be quantized has no range.
    """
    inserter = _Inserter(model.clone(), amax, dict(segment_of))
    for node in list(inserter.graph):
        row = QUANTIZED_OPS.get(node.op_type)
        if row is not None and node.domain == "":
            inserter.quantize_node(node, row)
    inserter.quantize_boundaries(int8_segments)
    inserter.insert()
    inserter.graph.sort()
    return QuantizedModel(inserter.model, inserter.segment_of, inserter.scales)


class _Inserter:
    """Collects which uses read which tensor in INT8, then writes Q and DQ nodes once each."""

    def __init__(
        self, model: ir.Model, amax: Mapping[str, float], segment_of: dict[str, str]
    ) -> None:
        self.model = model
        self.graph = model.graph
        self.amax = amax
        self.segment_of = segment_of
        self.scales: dict[str, float] = {}
        self._uses: dict[ir.Value, list[tuple[ir.Node, int]]] = {}

    def quantize_node(self, node: ir.Node, row: QuantizedOp) -> None:
        """Mark a node's activations, and replace its weight and bias by integers and DQ."""
        indexes = range(len(node.inputs)) if row.activations is None else row.activations
        for index in indexes:
            value = node.inputs[index]
            if value is not None and _is_activation(value):
                self._require(node, value)
                self._read_in_int8(value, node, index)
        weight = node.inputs[row.weight] if row.weight is not None else None
        if row.weight is None or weight is None or weight.const_value is None:
            return
        if len(weight.shape or ()) < 2:  # a vector has no output channels to scale apart
            return
        axis = _weight_axis(node, row, weight)
        scale = self._quantize_weight(node, row.weight, weight, axis)
        first = node.inputs[0]
        if row.bias is not None and len(node.inputs) > row.bias and first is not None:
            self._quantize_bias(node, row.bias, scale * scale_of(self.amax[str(first.name)]))

    def quantize_boundaries(self, int8_segments: frozenset[str]) -> None:
        """Mark what enters or leaves INT8 segments from or to another segment."""
        for node in list(self.graph):
            for index, value in enumerate(node.inputs):
                if value is None or not _is_activation(value) or str(value.name) not in self.amax:
                    continue
                maker = value.producer()
                source = self.segment_of[str(maker.name)] if maker else ""
                target = self.segment_of[str(node.name)]
                if source != target and {source, target} & int8_segments:
                    self._read_in_int8(value, node, index)

    def insert(self) -> None:
        """Write the Q and DQ nodes for every marked use."""
        for value, uses in self._uses.items():
            scale = scale_of(self.amax[str(value.name)])
            by_segment: dict[str, list[tuple[ir.Node, int]]] = {}
            for node, index in uses:
                by_segment.setdefault(self.segment_of[str(node.name)], []).append((node, index))
            maker = value.producer()
            home = self.segment_of[str(maker.name)] if maker else None
            self._keep_scale_before(value, scale)
            stored: ir.Value | None = None
            for segment, members in by_segment.items():
                source = value
                if home not in {None, segment}:
                    stored = stored or self._stored(value, scale, str(home))
                    source = self._restored(stored, value, scale, segment)
                if source is value or any(node.op_type in QUANTIZED_OPS for node, _ in members):
                    source = self._rounded(source, f"{value.name}_{segment}", scale, segment)
                for node, index in members:
                    node.replace_input_with(index, source)

    def _keep_scale_before(self, value: ir.Value, scale: float) -> None:
        """Quantize the operand of a scale-keeping maker with the same scale."""
        maker = value.producer()
        if maker is None or maker.op_type not in SCALE_KEEPING_OPS:
            return
        operand = maker.inputs[0]
        if operand is None or operand in self._uses or len(list(operand.uses())) != 1:
            return
        inner = operand.producer()
        segment = self.segment_of[str(maker.name)]
        if inner is None or self.segment_of[str(inner.name)] != segment:
            return
        rounded = self._rounded(operand, f"{operand.name}_{segment}", scale, segment)
        maker.replace_input_with(0, rounded)

    def _stored(self, value: ir.Value, scale: float, segment: str) -> ir.Value:
        """INT8 of a value that leaves its segment; zero point 0, as processors pass it on."""
        quantized = self._node(
            "QuantizeLinear",
            [value, *self._parameters(value, scale, np.int8)],
            f"{value.name}_int8",
            segment,
            dtype=ir.DataType.INT8,
        )
        self.scales[str(quantized.name)] = scale
        return quantized

    def _restored(self, stored: ir.Value, value: ir.Value, scale: float, segment: str) -> ir.Value:
        return self._node(
            "DequantizeLinear",
            [stored, *self._parameters(value, scale, np.int8)],
            f"{value.name}_{segment}_restored",
            segment,
        )

    def _rounded(self, value: ir.Value, name: str, scale: float, segment: str) -> ir.Value:
        """Q and DQ within a segment, stored as UINT8 with zero point 128 (see the module)."""
        parameters = self._parameters(value, scale, np.uint8)
        quantized = self._node(
            "QuantizeLinear",
            [value, *parameters],
            f"{name}_uint8",
            segment,
            dtype=ir.DataType.UINT8,
        )
        return self._node("DequantizeLinear", [quantized, *parameters], name, segment)

    def _parameters(
        self, value: ir.Value, scale: float, stored: type[np.int8 | np.uint8]
    ) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of a value; shared by its Q and DQ nodes."""
        zero = 128 if stored is np.uint8 else 0
        return (
            self._initializer(f"{value.name}_scale", np.array(scale, np.float32)),
            self._initializer(f"zero_{np.dtype(stored).name}", np.array(zero, stored)),
        )

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

    def _quantize_weight(
        self, node: ir.Node, index: int, weight: ir.Value, axis: int
    ) -> np.ndarray:
        """Replace a weight by INT8 values and a per-channel DQ; returns the scales [channels]."""
        assert weight.const_value is not None
        array = weight.const_value.numpy().astype(np.float32)
        others = tuple(i for i in range(array.ndim) if i != axis)
        limit = np.abs(array).max(axis=others)
        # A dead channel has no range; any positive scale stores its zeros exactly.
        scale: np.ndarray = np.where(limit > 0, limit, INT8_MAX).astype(np.float32)
        scale /= np.float32(INT8_MAX)
        shape = [1] * array.ndim
        shape[axis] = -1
        stored = np.clip(np.rint(array / scale.reshape(shape)), -INT8_MAX, INT8_MAX)
        self._dequantized_constant(node, index, stored.astype(np.int8), scale, axis)
        return scale

    def _quantize_bias(self, node: ir.Node, index: int, scale: np.ndarray) -> None:
        bias = node.inputs[index]
        if bias is None or bias.const_value is None:
            return
        array = bias.const_value.numpy().astype(np.float64).reshape(-1)
        if array.shape != scale.shape:
            return  # a Gemm may broadcast its bias; it stays in floating point then
        limit = np.iinfo(np.int32)
        stored = np.clip(np.rint(array / scale), limit.min, limit.max).astype(np.int32)
        self._dequantized_constant(node, index, stored, scale.astype(np.float32), 0)

    def _dequantized_constant(
        self, node: ir.Node, index: int, stored: np.ndarray, scale: np.ndarray, axis: int
    ) -> None:
        source = node.inputs[index]
        assert source is not None
        name = f"{source.name}_{node.name}" if len(list(source.uses())) > 1 else str(source.name)
        restored = self._node(
            "DequantizeLinear",
            [
                self._initializer(f"{name}_int{8 * stored.itemsize}", stored),
                self._initializer(f"{name}_scale", scale),
                self._initializer(f"{name}_zero", np.zeros(scale.shape, stored.dtype)),
            ],
            f"{name}_dequantized",
            self.segment_of[str(node.name)],
            attributes=[ir.AttrInt64("axis", axis)],
        )
        node.replace_input_with(index, restored)

    def _node(
        self,
        op: str,
        inputs: list[ir.Value],
        output: str,
        segment: str,
        *,
        attributes: list[ir.Attr] | None = None,
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.Value:
        value = ir.Value(name=output, shape=inputs[0].shape, type=ir.TensorType(dtype))
        node = ir.Node("", op, inputs, attributes or [], outputs=[value], name=f"{op}_{output}")
        self.graph.append(node)
        self.segment_of[str(node.name)] = segment
        return value

    def _initializer(self, name: str, array: np.ndarray) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape = ir.Shape(array.shape)
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        self.graph.register_initializer(value)
        return value


def _is_activation(value: ir.Value) -> bool:
    return value.const_value is None and value.dtype == ir.DataType.FLOAT


def _weight_axis(node: ir.Node, row: QuantizedOp, weight: ir.Value) -> int:
    rank = len(weight.shape or ())
    if node.op_type == "Gemm":  # B is [K, N], or [N, K] when transposed
        transposed = node.attributes.get_int("transB", 0)
        return 0 if transposed else 1
    return row.weight_axis % rank if rank else 0


def _used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
