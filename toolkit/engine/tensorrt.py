"""A DLA segment -> its `tensorrt` implementation: two ONNX forms that share the file's weights.

`toolkit.engine.tensorrt_gpu` makes those of GPU segments of the same steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from device.engine.manifest import TensorInfo
from device.engine.tensorrt_manifest import (
    WEIGHTS_FILE,
    Form,
    Port,
    TensorRT,
    TensorRTGpu,
    Weight,
)
from toolkit.errors import BuildError, ImportModelError
from toolkit.export.half import MIN_SCALE, beyond_scales, rounded_up, to_half
from toolkit.gpu.ports import Direction, PortCompiler
from toolkit.graph.extract import MIN_ENTRY_BYTES, ExtractedSegment
from toolkit.quantize.qdq.export import export_qdq
from toolkit.quantize.qdq.float_segment import float_segment
from toolkit.quantize.qdq.importer import import_qdq
from toolkit.quantize.qdq.nodes import is_dequantize, is_quantize
from toolkit.quantize.quantize import is_activation
from toolkit.quantize.weights import StoredWeight

Dtype = Literal["float32", "float16"]

_DIRECTIONS: tuple[Direction, Direction] = ("enter", "leave")  # of inputs, of outputs
_MIN_RANK = 3  # NvInferRuntime.h, TensorFormat::kCHW16: "requires at least three dimensions"
_ALIGNMENT = 64  # of a weight in the file beside the ONNX


@dataclass(frozen=True, slots=True)
class TensorRTSegment:
    """A segment through TensorRT, with the entries that it adds to the engine file."""

    implementation: TensorRT | TensorRTGpu
    entries: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class PlainSegment:
    """A segment in float. `amax`: of each tensor that INT8 reads; `half`: nodes in FP16.

    `results`: ranges of what INT8 nodes write for floating point alone, which a release with ranges
    needs to run them in INT8. `stored`: its large weights, by their names in `model`.
    """

    model: ir.Model
    amax: Mapping[str, float] = field(default_factory=dict)
    half: tuple[str, ...] = ()
    stored: Mapping[str, StoredWeight] = field(default_factory=dict)
    results: Mapping[str, float] = field(default_factory=dict)


def tensorrt_segment(
    piece: ExtractedSegment,
    tensors: Mapping[str, TensorInfo],
    compile_port: PortCompiler | None = None,
    *,
    take_turns: bool = False,
) -> TensorRTSegment:
    """Return the `tensorrt` implementation of a DLA segment.

    `tensors`: those at its borders. `compile_port` None: no kernels are made for its ports. Raises
    BuildError: the segment has Q/DQ that no calibration cache can hold, or a weight beyond float16.
    """
    plain = plain_segment(piece)
    entries: dict[str, np.ndarray] = {}
    ports = [_ports(names, tensors, plain) for names in (piece.inputs, piece.outputs)]
    ranged = write_form(f"{piece.name}.ranged", plain.model, plain.stored, "float32", entries)
    typed_model = _typed(plain, (*ports[0], *ports[1]))
    typed = write_form(f"{piece.name}.typed", typed_model, plain.stored, "float16", entries)
    kernels = [
        [] if compile_port is None
        else [compile_port(f"{piece.name}.{end}{index}", port, tensors[port.tensor], end)
              for index, port in enumerate(row)]
        for end, row in zip(_DIRECTIONS, ports, strict=True)
    ]  # fmt: skip
    for part in (*kernels[0], *kernels[1]):
        entries.update(part.entries)
    implementation = TensorRT(
        ranged=ranged,
        typed=typed,
        inputs=ports[0],
        outputs=ports[1],
        ranges={**plain.amax, **plain.results},
        half_nodes=plain.half,
        take_turns=take_turns,
        ranged_problem=_rank_problem((*ports[0], *ports[1]), tensors),
        typed_problem=_rank_problem((*ports[0], *ports[1]), tensors)
        or scale_problem({port.tensor: port.scale for port in (*ports[0], *ports[1])}),
        enter=tuple(part.implementation for part in kernels[0]),
        leave=tuple(part.implementation for part in kernels[1]),
    )
    return TensorRTSegment(implementation, entries)


def plain_segment(piece: ExtractedSegment) -> PlainSegment:
    """Return a segment without Q/DQ; integers at its borders are floats.

    The Q/DQ that a build writes is known; that of a model which keeps its own is imported. Raises
    BuildError: Q/DQ that no range can say.
    """
    stored = {name: StoredWeight(name) for name in piece.weights}
    if not any(is_dequantize(node) or is_quantize(node) for node in piece.model.graph):
        return PlainSegment(piece.model, stored=stored)
    try:
        plain = (
            import_qdq(piece.model, any_weight_scale=True, int8_borders=True)
            if piece.floating is None
            else float_segment(piece)
        )
    except ImportModelError as error:
        raise BuildError(f"Segment {piece.name} cannot be written for TensorRT: {error}") from error
    for name, weight in plain.integers.items():
        # UINT8 has a zero point, which `Weight` does not: it stays inside the ONNX.
        if weight.entry in piece.weights and piece.weights[weight.entry].dtype == np.int8:
            stored[name] = weight
    return PlainSegment(plain.model, plain.amax, plain.float_nodes, stored, plain.results)


def _node(op: str, inputs: Sequence[ir.Value | None], output: str) -> ir.Node:
    return ir.Node("", op, inputs, outputs=[ir.Value(name=output)], name=f"{op}_{output}")


def _ports(
    names: Sequence[str], tensors: Mapping[str, TensorInfo], plain: PlainSegment
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


def _rank_problem(ports: Sequence[Port], tensors: Mapping[str, TensorInfo]) -> str:
    """Return why TensorRT cannot have these ports in a format of vectors, "" if it can."""
    for port in ports:
        rank = len(tensors[port.tensor].shape)
        if rank < _MIN_RANK:
            return (
                f"tensor {port.tensor!r} has {rank} dimensions, and TensorRT's {port.format} takes "
                f"{_MIN_RANK} or more; write the Gemm beside it as a 1x1 Conv, or keep it off with "
                "`tandem build --force-gpu`"
            )
    return ""


def scale_problem(scales: Mapping[str, float | None]) -> str:
    """Return why strongly typed TensorRT cannot have tensors of these scales, "" if it can."""
    for tensor, scale in scales.items():
        if scale is not None and scale < MIN_SCALE:
            return (
                f"tensor {tensor!r} has the INT8 scale {scale:.3g}, and strongly typed "
                f"TensorRT has scales in FP16, from {MIN_SCALE:.3g} on; build with "
                "`tandem build --keep-float` for the nodes beside it, or for JetPack 6"
            )
    return ""


def _typed(plain: PlainSegment, ports: Sequence[Port]) -> ir.Model:
    """Return the segment as strongly typed TensorRT reads it: INT8 ports are INT8 tensors."""
    if not plain.amax:
        return to_half(plain.model, half_io=True)
    half = to_half(quantized(plain, "tensorrt-dla"), half_io=True)
    store_borders(half.graph, {port.tensor: port.scale for port in ports}, half=True)
    return half


def quantized(plain: PlainSegment, target: str) -> ir.Model:
    """Return the segment with Q/DQ for a row of `toolkit.quantize.qdq.export.TARGETS`."""
    unranged = {
        str(node.name)
        for node in plain.model.graph
        for value in node.inputs
        if value is not None and is_activation(value) and str(value.name) not in plain.amax
    }
    keep = frozenset({*plain.half, *unranged, *beyond_scales(plain.model, plain.amax)})
    return export_qdq(plain.model, plain.amax, target, keep_float=keep)


def store_borders(graph: ir.Graph, scales: Mapping[str, float | None], *, half: bool) -> None:
    """Let inputs and outputs be INT8 that have a scale. `half`: the graph is in FP16 already."""
    dtype = np.dtype(np.float16 if half else np.float32)
    for value in list(graph.inputs):
        scale = scales.get(str(value.name))
        if scale is not None:
            _store_input(graph, value, scale, dtype)
    for value in list(graph.outputs):
        scale = scales.get(str(value.name))
        if scale is not None:
            _store_output(graph, value, scale, dtype)
    graph.sort()


def _store_input(graph: ir.Graph, value: ir.Value, scale: float, dtype: "np.dtype") -> None:
    """Let an input be INT8: what a Q made of it, and behind a DQ for nodes in floating point."""
    name, index = str(value.name), list(graph.inputs).index(value)
    stored = ir.Value(name=name, shape=value.shape, type=ir.TensorType(ir.DataType.INT8))
    for quantize in {use.node for use in value.uses() if use.node.op_type == "QuantizeLinear"}:
        for use in list(quantize.outputs[0].uses()):
            use.node.replace_input_with(use.idx, stored)
        graph.remove(quantize, safe=True)
    readers = list(value.uses())
    if readers:
        operands = [stored, *_pair(graph, name, scale, dtype)]
        node = _node("DequantizeLinear", operands, f"{name}_real")
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.insert_before(graph[0], node)
        for use in readers:
            use.node.replace_input_with(use.idx, node.outputs[0])
    graph.inputs[index] = stored


def _store_output(graph: ir.Graph, value: ir.Value, scale: float, dtype: "np.dtype") -> None:
    """Let an output be INT8, as a Q makes it, under its name."""
    name = str(value.name)
    value.name = f"{name}_real"
    node = _node("QuantizeLinear", [value, *_pair(graph, name, scale, dtype)], name)
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.INT8), value.shape
    graph.append(node)
    graph.outputs[list(graph.outputs).index(value)] = node.outputs[0]


def _pair(graph: ir.Graph, name: str, scale: float, dtype: "np.dtype") -> tuple[ir.Value, ir.Value]:
    """Add the scale of a port and its zero point."""
    single = np.array(scale, np.float32)
    constants = (
        (f"{name}_port_scale", rounded_up(single) if dtype == np.float16 else single),
        (f"{name}_port_zero", np.array(0, np.int8)),
    )
    first, second = (
        ir.Value(name=key, const_value=ir.Tensor(array, name=key)) for key, array in constants
    )
    graph.register_initializer(first)
    graph.register_initializer(second)
    return first, second


def write_form(
    name: str,
    model: ir.Model,
    stored: Mapping[str, StoredWeight],
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
