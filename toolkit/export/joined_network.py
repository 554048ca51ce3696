"""Engine -> the whole network that its segments were cut from, in float, with INT8 ranges.

The portable implementations of an engine hold all of it: each is ONNX, with Q/DQ in INT8. They are
put together along the tensors that cross, and the Q/DQ become ranges again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx import ModelProto

from device.engine.file import Engine
from device.engine.manifest import DimRange, Portable, Precision, Processor, TensorInfo
from toolkit.errors import BuildError, ImportModelError
from toolkit.quantize.qdq.importer import import_qdq


@dataclass(frozen=True, slots=True)
class Network:
    """The network of an engine, without Q/DQ.

    `amax`: the range of each tensor that INT8 reads. `results`: of each other one that an INT8 node
    writes. `float_nodes`: what an INT8 engine computes in
    floating point. `processors`: where each node of `model` runs. `dims`: the dynamic dimensions.
    """

    name: str
    profile: str
    precision: Precision
    model: ir.Model
    amax: Mapping[str, float]
    results: Mapping[str, float]
    float_nodes: tuple[str, ...]
    processors: Mapping[str, Processor]
    dims: tuple[DimRange, ...]


def network_of(engine: Engine) -> Network:
    """Return the network of an engine. Raises BuildError: a segment cannot be read as ONNX."""
    manifest = engine.manifest
    joined = joined_model(engine)
    precision = manifest.provenance.precision
    amax: Mapping[str, float] = {}
    results: Mapping[str, float] = {}
    float_nodes: tuple[str, ...] = ()
    if precision == "int8":
        try:
            plain = import_qdq(joined, any_weight_scale=True)
        except ImportModelError as error:
            raise BuildError(f"{engine.path} cannot be exported: {error}") from error
        joined, amax, results = plain.model, plain.amax, plain.results
        float_nodes = plain.float_nodes
    places = {row.node: row.processor for row in manifest.plan}
    last: Processor = manifest.segments[-1].processor
    return Network(
        name=manifest.provenance.model,
        profile=manifest.profile,
        precision=precision,
        model=joined,
        amax=amax,
        results=results,
        float_nodes=float_nodes,
        processors={str(node.name): places.get(str(node.name), last) for node in joined.graph},
        dims=manifest.dims,
    )


def joined_model(engine: Engine) -> ir.Model:
    """Return the ONNX of all segments as one model, with its Q/DQ."""
    manifest = engine.manifest
    values: dict[str, ir.Value] = {}
    nodes: list[ir.Node] = []
    pieces = [_segment_model(engine, index) for index in range(len(manifest.segments))]
    for piece in pieces:
        for value in (*piece.graph.inputs, *piece.graph.initializers.values()):
            known = values.setdefault(str(value.name), value)
            if known is not value:
                _replace_uses(value, known)
        for node in list(piece.graph):
            piece.graph.remove(node)
            nodes.append(node)
            for output in node.outputs:
                values[str(output.name)] = output
    infos = {tensor.name: tensor for tensor in manifest.tensors}
    inputs = [values[name] if name in values else _unread(infos[name]) for name in manifest.inputs]
    initializers = [
        value for piece in pieces for name, value in piece.graph.initializers.items()
        if values[name] is value
    ]  # fmt: skip
    outputs = [values[name] for name in manifest.outputs]
    for piece in pieces:
        piece.graph.inputs.clear()
        piece.graph.outputs.clear()
        piece.graph.initializers.clear()
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports=dict(pieces[0].graph.opset_imports),
        name=manifest.provenance.model,
    )
    functions = {key: f for piece in pieces for key, f in piece.functions.items()}
    return ir.Model(graph, ir_version=pieces[0].ir_version, functions=list(functions.values()))


def _unread(info: TensorInfo) -> ir.Value:
    """Return an input that no segment reads."""
    dtype = ir.DataType.from_numpy(np.dtype(info.dtype))
    return ir.Value(name=info.name, shape=ir.Shape(info.shape), type=ir.TensorType(dtype))


def _replace_uses(value: ir.Value, by: ir.Value) -> None:
    for reader, operand in list(value.uses()):
        reader.replace_input_with(operand, by)


def _segment_model(engine: Engine, index: int) -> ir.Model:
    """The ONNX of a segment with its weights inside."""
    segment = engine.manifest.segments[index]
    portable = next((i for i in segment.implementations if isinstance(i, Portable)), None)
    if portable is None:
        raise BuildError(
            f"{engine.path}: segment {segment.name!r} has no portable implementation, which an "
            "export is made from; give the engine as 'tandem build' wrote it."
        )
    proto = ModelProto()
    try:
        proto.ParseFromString(engine.entry(portable.model).tobytes())
        model = ir.from_proto(proto)
    except (DecodeError, ValueError, TypeError, KeyError) as error:
        raise BuildError(
            f"{engine.path}: segment {segment.name!r} holds no valid ONNX ({error}); "
            "build the engine again."
        ) from error
    for name in portable.weights:
        value = model.graph.initializers.get(name)
        if value is not None:
            value.const_value = ir.Tensor(np.asarray(engine.entry(name)), name=name)
    return model
