"""Model + ranges -> Q/DQ ONNX for TensorRT: INT8, symmetric, explicit quantization.

    x' = s clip(round(x / s), -128, 127)      s = float32(amax / 127), zero point 0, per tensor
    w' = s_c clip(round(w / s_c), -127, 127)  s_c = max|w_c| / 127, per output channel c

Each activation has one Q/DQ pair, read by all nodes that compute in INT8.

A weight stays a float32 initializer followed by Q and DQ. INT8 with DQ alone would be a quarter of
the size, but TensorRT 8 refuses it ("invalid weights type of Int8"), and every release folds the Q
during the build. The float weight also allows a reader to check s_c or to quantize again. Biases
stay float32: TensorRT refuses INT32 with DQ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from calibration.table import scale_of
from toolkit.errors import BuildError
from toolkit.quantize.block_floats.formats import FORMATS
from toolkit.quantize.block_floats.graph import exported
from toolkit.quantize.float8.model import float8_by_table
from toolkit.quantize.qdq.writer import QdqWriter
from toolkit.quantize.quantize import (
    QUANTIZED_OPS,
    int8_nodes,
    is_activation,
    masked_tensors,
    quantize,
    weight_axis,
    with_operands,
)
from toolkit.quantize.weights import MIN_SCALE, constant_of, quantize_weight

Use = tuple[ir.Node, int]
"""A node and the index of one of its operands."""


@dataclass(frozen=True, slots=True)
class QdqTarget:
    """A consumer of Q/DQ models.

    `min_opset`: oldest supported opset. `every_tensor`: all activations between nodes are INT8, not
    only the operands of QUANTIZED_OPS. `fused_add`: an Add fused with a convolution reads that
    operand in floating point; only the residual is INT8.
    """

    name: str
    since: str
    min_opset: int
    every_tensor: bool
    fused_add: bool


TARGETS: Mapping[str, QdqTarget] = {
    row.name: row
    for row in (
        QdqTarget("tensorrt-gpu", "TensorRT 8.0", 13, every_tensor=False, fused_add=True),
        QdqTarget("tensorrt-dla", "TensorRT 11.4.1", 19, every_tensor=True, fused_add=False),
    )
}

PORTABLE = "onnxruntime"
"""The form in engines for any CPU; onnxruntime computes the same bits from it as an engine of one
segment.
"""
FLOAT8_FORM = "tensorrt-fp8"
"""Q/DQ of FP8 around products, as `tandem build --precision fp8` has them; for Thor and newer."""
BLOCK_FORMS = {f"tensorrt-{one.name.lower()}": one for one in FORMATS}
"""MXFP8 and NVFP4 of products, for TensorRT from 10.8 on; for Thor and newer."""
FLOAT_FORMS = (FLOAT8_FORM, *BLOCK_FORMS)
FORMS = (*TARGETS, *FLOAT_FORMS, PORTABLE)

# Operators that read the shape of a tensor, not its values.
SHAPE_READERS = frozenset({"Shape", "Size"})


def qdq_target(name: str) -> QdqTarget:
    """The row of TARGETS; raises BuildError if there is none."""
    if name not in TARGETS:
        raise BuildError(
            f"There is no Q/DQ target {name!r}; choose one of: {', '.join(sorted(TARGETS))}."
        )
    return TARGETS[name]


def export_qdq(
    model: ir.Model,
    amax: Mapping[str, float],
    target: str = "tensorrt-gpu",
    *,
    keep_float: frozenset[str] = frozenset(),
) -> ir.Model:
    """Return a copy of a plain model with Q/DQ for a row of TARGETS.

    `model` as the passes leave it: constants are initializers, batch normalisation is folded.
    `amax`: the range of each activation. Nodes named in `keep_float` read no INT8.

    Raises BuildError: the model has Q/DQ already, too old an opset, or an activation that must be
    INT8 has no range or one that float32 cannot hold.
    """
    row = qdq_target(target)
    _check_source(model, row, keep_float)
    copy = model.clone()
    amax = with_operands(copy, amax)
    pairs = _Pairs(copy.graph)
    in_int8 = {node for node, _ in int8_nodes(copy, keep_float)}
    uses = _all_uses(copy, keep_float) if row.every_tensor else _product_uses(copy, row, in_int8)
    for value, readers in uses.items():
        restored = pairs.activation(value, _scale(value, readers[0][0], amax))
        for node, index in readers:
            node.replace_input_with(index, restored)
    for node in list(copy.graph):
        if node in in_int8:
            _quantize_weight(node, pairs)
    copy.graph.sort()
    return copy


def export_form(
    model: ir.Model,
    amax: Mapping[str, float],
    form: str,
    *,
    keep_float: frozenset[str] = frozenset(),
) -> ir.Model:
    """`export_qdq` for a row of TARGETS; for PORTABLE what an engine of one segment holds.

    For FLOAT_FORMS products in FP8, or in floats of 8 or 4 bits in blocks.

    PORTABLE stores the same values as UINT8 with zero point 128, has INT32 biases, quantizes before
    ReLUs, and leaves outputs in floating point.

    Raises BuildError, as `export_qdq` and `quantize` do.
    """
    if form == FLOAT8_FORM:
        return float8_by_table(model, amax, dict.fromkeys(keep_float, "")).model
    if form in BLOCK_FORMS:
        return exported(model, BLOCK_FORMS[form], amax, keep_float)
    if form != PORTABLE:
        return export_qdq(model, amax, form, keep_float=keep_float)
    segment_of = {str(node.name): PORTABLE for node in model.graph}
    return quantize(model, amax, segment_of, frozenset(), keep_float=keep_float).model


def weight_operand(node: ir.Node) -> tuple[int, int | None] | None:
    """The index of a node's constant float weight of rank >= 2, and its output-channel axis.

    The axis is None for a batch of matrices, which is quantized per tensor.
    """
    row = QUANTIZED_OPS.get(node.op_type) if node.domain == "" else None
    weight = constant_of(node, row.weight) if row is not None else None
    if row is None or row.weight is None or weight is None or weight.ndim < 2:
        return None
    return row.weight, weight_axis(node, row, weight)


def _check_source(model: ir.Model, row: QdqTarget, keep_float: frozenset[str]) -> None:
    opset = model.graph.opset_imports.get("", 0)
    if opset < row.min_opset:
        raise BuildError(
            f"The model has opset {opset}, but Q/DQ for {row.name} ({row.since}) need "
            f"{row.min_opset} or newer; export it again with a newer opset."
        )
    names = set()
    for node in model.graph.all_nodes():
        names.add(str(node.name))
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            raise BuildError(
                f"The model is quantized already (node {node.name!r} is {node.op_type}); "
                "import its Q/DQ first, or give the plain model."
            )
    unknown = sorted(keep_float - names)
    if unknown:
        raise BuildError(
            f"The model has no node {unknown[0]!r} that could stay in floating point; "
            "correct the name."
        )


def _all_uses(model: ir.Model, keep_float: frozenset[str]) -> dict[ir.Value, list[Use]]:
    """Every activation but masks -> the operands that read its values."""
    masks = masked_tensors(model)
    uses: dict[ir.Value, list[Use]] = {}
    for node in model.graph:
        if node.op_type in SHAPE_READERS or str(node.name) in keep_float:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and is_activation(value) and str(value.name) not in masks:
                uses.setdefault(value, []).append((node, index))
    return uses


def _product_uses(
    model: ir.Model, row: QdqTarget, int8_nodes: set[ir.Node]
) -> dict[ir.Value, list[Use]]:
    """Every activation that INT8 nodes read -> the operands that read it in INT8."""
    order = {node: position for position, node in enumerate(model.graph)}
    uses: dict[ir.Value, list[Use]] = {}
    for node in order:
        if node not in int8_nodes:
            continue
        operands = QUANTIZED_OPS[node.op_type].activations or tuple(range(len(node.inputs)))
        fused = _fused_operand(node, order, int8_nodes) if row.fused_add else None
        for index in operands:
            value = node.inputs[index]
            if index != fused and value is not None and is_activation(value):
                uses.setdefault(value, []).append((node, index))
    return uses


def _fused_operand(
    node: ir.Node, order: Mapping[ir.Node, int], int8_nodes: set[ir.Node]
) -> int | None:
    """The operand of an Add whose producer TensorRT fuses with the Add, if any.

    TensorRT fuses Conv and Add if nothing is between them. If both operands qualify (a projected
    shortcut), the later one is fused: the shortcut is computed first and read back.
    """
    if node.op_type != "Add" or not all(v is not None and is_activation(v) for v in node.inputs):
        return None  # a constant operand is a bias, not a residual
    positions: dict[int, int] = {}
    for index, value in enumerate(node.inputs):
        producer = value.producer() if value is not None else None
        if value is None or producer not in int8_nodes or value.is_graph_output():
            continue
        if producer is not None and len(value.uses()) == 1 and weight_operand(producer) is not None:
            positions[index] = order[producer]
    return max(positions, key=positions.__getitem__, default=None)


def _scale(value: ir.Value, reader: ir.Node, amax: Mapping[str, float]) -> np.ndarray:
    """float32(amax / 127) of an activation."""
    if str(value.name) not in amax:
        raise BuildError(
            f"Tensor {value.name!r}, read by node {reader.name!r} ({reader.op_type}), has no range "
            "in the calibration table; INT8 without ranges is refused: calibrate again on this "
            "model."
        )
    limit = amax[str(value.name)]
    with np.errstate(over="ignore"):
        scale = np.array(scale_of(limit), np.float32)
    if not MIN_SCALE <= scale < np.inf:
        raise BuildError(
            f"Tensor {value.name!r} has the range {limit}, whose scale {scale} is no normal "
            "float32; calibrate again on this model."
        )
    return scale


def _quantize_weight(node: ir.Node, pairs: "_Pairs") -> None:
    """Insert Q and DQ after the weight of a node whose activation is INT8."""
    weight_position = weight_operand(node)
    first = node.inputs[0]
    source = first.producer() if first is not None else None
    if weight_position is None or source is None or source.op_type != "DequantizeLinear":
        return
    index, axis = weight_position
    weight, activation_scale = node.inputs[index], constant_of(source, 1)
    assert weight is not None
    assert activation_scale is not None
    node.replace_input_with(index, pairs.weight(weight, axis, float(activation_scale)))


class _Pairs:
    """Adds Q/DQ pairs to a graph, each once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._writer = QdqWriter(graph)
        self._weights: dict[tuple[str, int | None], ir.Value] = {}

    def activation(self, value: ir.Value, scale: np.ndarray) -> ir.Value:
        """Q and DQ of an activation with one scale, []."""
        return self._pair(value, scale, None)

    def weight(self, value: ir.Value, axis: int | None, activation_scale: float) -> ir.Value:
        """Q and DQ of a weight, for an activation with scale `activation_scale`.

        The scale of a switched-off channel is raised until its product with `activation_scale` is
        a normal float32, because engines divide by it.
        """
        key = (str(value.name), axis)
        if key not in self._weights:
            assert value.const_value is not None
            scale = quantize_weight(value.const_value.numpy(), None, axis, activation_scale).scale
            self._weights[key] = self._pair(value, scale, axis)
        return self._weights[key]

    def _pair(self, value: ir.Value, scale: np.ndarray, axis: int | None) -> ir.Value:
        """Each pair has its own zero point: onnxruntime changes that of weights in place."""
        base = str(value.name)
        parameters = [
            self._writer.constant(f"{base}_scale", scale),
            self._writer.constant(f"{base}_zero", np.zeros(scale.shape, np.int8)),
        ]
        stored = self._writer.quantize(
            value, parameters, f"{base}_quantized", dtype=ir.DataType.INT8, axis=axis, label=base
        )
        return self._writer.dequantize(
            stored, parameters, f"{base}_dequantized", axis=axis, label=base
        )
