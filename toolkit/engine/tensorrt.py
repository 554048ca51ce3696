"""A DLA segment -> its `tensorrt` implementation: two ONNX forms that share the file's weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from device.engine.manifest import TensorInfo
from device.engine.tensorrt_manifest import WEIGHTS_FILE, Form, Port, TensorRT, Weight
from toolkit.errors import BuildError, ImportModelError
from toolkit.export.half import rounded_up, to_half
from toolkit.gpu.ports import PortCompiler, Way
from toolkit.graph.extract import MIN_ENTRY_BYTES, ExtractedSegment
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.qdq.nodes import is_dequantize, quant_params_of
from toolkit.quantize.quantize import is_activation

Dtype = Literal["float32", "float16"]

_WAYS: tuple[Way, Way] = ("enter", "leave")  # of inputs, of outputs
_ALIGNMENT = 64  # of a weight in the file beside the ONNX


@dataclass(frozen=True, slots=True)
class TensorRTSegment:
    """A segment's `tensorrt` implementation with the entries that it adds to the engine file."""

    implementation: TensorRT
    entries: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A weight as the engine file has it: entry * scales along an axis, or the entry itself."""

    entry: str
    scales: np.ndarray | None = None
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class _Plain:
    """A segment in float. `amax`: of each tensor that INT8 reads; `half`: nodes in FP16.

    `stored`: its large weights, by their names in `model`.
    """

    model: ir.Model
    amax: Mapping[str, float] = field(default_factory=dict)
    half: tuple[str, ...] = ()
    stored: Mapping[str, _Stored] = field(default_factory=dict)


def tensorrt_segment(
    piece: ExtractedSegment,
    tensors: Mapping[str, TensorInfo],
    compile_port: PortCompiler | None = None,
) -> TensorRTSegment:
    """Return the `tensorrt` implementation of a DLA segment.

    `tensors`: those at its borders. `compile_port` None: no kernels are made for its ports. Raises
    BuildError: the segment has Q/DQ that no calibration cache can hold, or a weight beyond float16.
    """
    plain = _plain(piece)
    entries: dict[str, np.ndarray] = {}
    ports = [_ports(names, tensors, plain) for names in (piece.inputs, piece.outputs)]
    ranged = _form(f"{piece.name}.ranged", plain.model, plain.stored, "float32", entries)
    typed_model = _typed(plain, piece, tensors)
    typed = _form(f"{piece.name}.typed", typed_model, plain.stored, "float16", entries)
    kernels = [
        [] if compile_port is None
        else [compile_port(f"{piece.name}.{way}{index}", port, tensors[port.tensor], way)
              for index, port in enumerate(row)]
        for way, row in zip(_WAYS, ports, strict=True)
    ]  # fmt: skip
    for part in (*kernels[0], *kernels[1]):
        entries.update(part.entries)
    implementation = TensorRT(
        ranged=ranged,
        typed=typed,
        inputs=ports[0],
        outputs=ports[1],
        ranges=dict(plain.amax),
        half_nodes=plain.half,
        enter=tuple(part.implementation for part in kernels[0]),
        leave=tuple(part.implementation for part in kernels[1]),
    )
    return TensorRTSegment(implementation, entries)


def _plain(piece: ExtractedSegment) -> _Plain:
    """Take the Q/DQ out of a segment; integers at its borders become floats."""
    if not any(is_dequantize(node) for node in piece.model.graph):
        return _Plain(piece.model, stored={name: _Stored(name) for name in piece.weights})
    model = piece.model.clone()
    _float_borders(model.graph)
    try:
        plain = import_qdq(model, any_weight_scale=True)
    except ImportModelError as error:
        raise BuildError(f"Segment {piece.name} cannot be written for TensorRT: {error}") from error
    return _Plain(plain.model, plain.amax, plain.float_nodes, _stored(piece))


def _float_borders(graph: ir.Graph) -> None:
    """Give INT8 inputs a Q before them, and INT8 outputs a DQ behind them, under their names."""
    for value in [v for v in graph.inputs if v.dtype == ir.DataType.INT8]:
        reader = next(use.node for use in value.uses() if is_dequantize(use.node))
        real = ir.Value(
            name=str(value.name), shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT)
        )
        graph.inputs[list(graph.inputs).index(value)] = real
        stored = _node("QuantizeLinear", [real, *reader.inputs[1:]], f"{value.name}_stored")
        for use in list(value.uses()):
            use.node.replace_input_with(use.idx, stored.outputs[0])
        stored.outputs[0].type, stored.outputs[0].shape = value.type, value.shape
        graph.insert_before(graph[0], stored)
    for value in [v for v in graph.outputs if v.dtype == ir.DataType.INT8]:
        writer = value.producer()
        assert writer is not None  # a segment's output is made by it
        name = str(value.name)
        value.name = f"{name}_stored"
        restored = _node("DequantizeLinear", [value, *writer.inputs[1:]], name)
        restored.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        restored.outputs[0].shape = value.shape
        graph.append(restored)
        graph.outputs[list(graph.outputs).index(value)] = restored.outputs[0]


def _node(op: str, inputs: Sequence[ir.Value | None], output: str) -> ir.Node:
    return ir.Node("", op, inputs, outputs=[ir.Value(name=output)], name=f"{op}_{output}")


def _stored(piece: ExtractedSegment) -> dict[str, _Stored]:
    """The large weights of a segment by the name of their DQ's output."""
    stored = {name: _Stored(name) for name in piece.weights}
    for node in piece.model.graph:
        source = node.inputs[0] if is_dequantize(node) else None
        if source is None or str(source.name) not in piece.weights:
            continue
        params = quant_params_of(node)
        assert params is not None  # a build writes constant scales
        axis = params.axis if params.scale.ndim else None
        scales = params.scale.astype(np.float32)
        stored[str(node.outputs[0].name)] = _Stored(str(source.name), scales, axis)
    return stored


def _ports(
    names: Sequence[str], tensors: Mapping[str, TensorInfo], plain: _Plain
) -> tuple[Port, ...]:
    """INT8 where the tensor has a scale or a range, else FP16."""
    ports = []
    for name in names:
        scale = tensors[name].scale
        if scale is None and name in plain.amax:
            scale = float(np.float32(plain.amax[name] / 127))
        ports.append(
            Port(tensor=name, dtype="float16", format="chw16")
            if scale is None
            else Port(tensor=name, dtype="int8", format="chw32", scale=scale)
        )
    return tuple(ports)


def _typed(plain: _Plain, piece: ExtractedSegment, tensors: Mapping[str, TensorInfo]) -> ir.Model:
    """Return the segment as strongly typed TensorRT reads it: INT8 ports are INT8 tensors."""
    if not plain.amax:
        return to_half(plain.model, half_io=True)
    unranged = {
        str(node.name)
        for node in plain.model.graph
        for value in node.inputs
        if value is not None and is_activation(value) and str(value.name) not in plain.amax
    }
    keep = frozenset({*plain.half, *unranged})
    model = export_qdq(plain.model, plain.amax, "tensorrt-dla", keep_float=keep)
    half = to_half(model, half_io=True)
    graph = half.graph
    for value in list(graph.inputs):
        _store_input(graph, value)
    for value in list(graph.outputs):
        if tensors[str(value.name)].scale is not None:
            _store_output(graph, value, tensors[str(value.name)])
    graph.sort()
    return half


def _store_input(graph: ir.Graph, value: ir.Value) -> None:
    """Let an input that a Q reads first be what that Q makes."""
    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear":
        return
    (quantize,) = readers
    stored = quantize.outputs[0]
    name, index = str(value.name), list(graph.inputs).index(value)
    real = ir.Value(name=name, shape=value.shape, type=ir.TensorType(ir.DataType.INT8))
    for use in list(stored.uses()):
        use.node.replace_input_with(use.idx, real)
    graph.remove(quantize, safe=True)
    graph.inputs[index] = real


def _store_output(graph: ir.Graph, value: ir.Value, tensor: TensorInfo) -> None:
    """Let an output be INT8, as a Q makes it, under its name."""
    name = tensor.name
    value.name = f"{name}_real"
    scale = ir.Value(
        name=f"{name}_scale_out",
        const_value=ir.Tensor(
            rounded_up(np.array(tensor.scale, np.float32)), name=f"{name}_scale_out"
        ),
    )
    zero = ir.Value(
        name=f"{name}_zero_out",
        const_value=ir.Tensor(np.array(0, np.int8), name=f"{name}_zero_out"),
    )
    graph.register_initializer(scale)
    graph.register_initializer(zero)
    node = _node("QuantizeLinear", [value, scale, zero], name)
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT8), value.shape
    graph.append(node)
    graph.outputs[list(graph.outputs).index(value)] = node.outputs[0]


def _form(
    name: str,
    model: ir.Model,
    stored: Mapping[str, _Stored],
    dtype: Dtype,
    entries: dict[str, np.ndarray],
) -> Form:
    """Write a model, its large weights outside, into `entries`; a weight that is there stays."""
    copy = model.clone()
    weights: list[Weight] = []
    offset = 0
    for constant, value in copy.graph.initializers.items():
        tensor = value.const_value
        source = stored.get(str(constant))
        if source is None or tensor is None or tensor.nbytes < MIN_ENTRY_BYTES:
            continue
        if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            continue
        value.const_value = ir.ExternalTensor(
            location=WEIGHTS_FILE,
            offset=offset,
            length=tensor.nbytes,
            dtype=tensor.dtype,
            shape=ir.Shape(tensor.numpy().shape),
            name=str(constant),
        )
        scales = None
        if source.scales is not None:
            scales = f"tensorrt/{source.entry}.scales"
            entries[scales] = source.scales
        weights.append(
            Weight(entry=source.entry, dtype=dtype, offset=offset, scales=scales, axis=source.axis)
        )
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    entry = f"tensorrt/{name}.onnx"
    data = ir.to_proto(copy).SerializeToString(deterministic=True)
    entries[entry] = np.frombuffer(data, dtype=np.uint8)
    return Form(model=entry, weights=tuple(weights))
