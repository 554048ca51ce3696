"""Extracts the segments of a model as separate graphs and serializes them as ONNX.

Steps pass segments as `onnx_ir` models. `serialize_segment` writes the ONNX of one: large weights
are entries of the engine file, once each, and the ONNX refers to them as external data; small
constants stay inside the ONNX bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from toolkit.errors import BuildError
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.graph.node_view import subgraphs

# Below this a constant is cheaper inside the ONNX bytes than as an entry of its own.
MIN_ENTRY_BYTES = 1024
# Newer IR versions add nothing that a segment has, and older runtimes refuse them.
MAX_IR_VERSION = 10


@dataclass(frozen=True, slots=True)
class ExtractedSegment:
    """One segment as a separate, immutable model.

    `inputs` and `outputs` are tensor names; `weights` the large constants of `model` by name,
    which are entries of the engine file. `floating`: the segment without the Q/DQ that the build
    writes, as `toolkit.quantize.qdq.writer.FloatWriter` leaves it.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model: ir.Model
    weights: Mapping[str, np.ndarray]
    floating: ir.Model | None = None


def extract_segments(
    model: ir.Model, segment_of: Mapping[str, str], names: Sequence[str]
) -> tuple[ExtractedSegment, ...]:
    """Cut the model (Q/DQ included) along `segment_of`; `names` in running order.

    Constant nodes have no place in a plan; they go where they are read first.
    """
    reads = {node: values_read(node) for node in model.graph}
    node_segments = _homes(reads, segment_of, names)
    members: dict[str, list[ir.Node]] = {name: [] for name in names}
    leaving: set[ir.Value] = set(model.graph.outputs)
    for node, segment in node_segments.items():
        members[segment].append(node)
        for value in reads[node]:
            maker = value.producer()
            if maker is not None and node_segments[maker] != segment:
                leaving.add(value)
    return tuple(_extract(model, name, nodes, reads, leaving) for name, nodes in members.items())


def _homes(
    reads: dict[ir.Node, list[ir.Value]], segment_of: Mapping[str, str], names: Sequence[str]
) -> dict[ir.Node, str]:
    """Return the segment of each node; a node without one joins its first reader."""
    rank = {name: index for index, name in enumerate(names)}
    node_segments: dict[ir.Node, str] = {}
    for node in reversed(reads):  # readers come after what they read
        segment = segment_of.get(str(node.name))
        if segment is None:
            readers = [
                node_segments[r]
                for r in node_segments
                if any(v.producer() is node for v in reads[r])
            ]
            segment = min(readers, key=rank.__getitem__, default=None)
        if segment is not None:
            node_segments[node] = segment
    return {node: node_segments[node] for node in reads if node in node_segments}


def values_read(node: ir.Node) -> list[ir.Value]:
    """Return the values that a node reads, including those that its subgraphs capture."""
    inner = list(_nested(node))
    inner_values = {value for graph in inner for value in graph.inputs}
    inner_values |= {value for graph in inner for value in graph.initializers.values()}
    inner_values |= {value for graph in inner for member in graph for value in member.outputs}
    read = list(node.inputs)
    read += [value for graph in inner for member in graph for value in member.inputs]
    read += [value for graph in inner for value in graph.outputs]
    return [
        value for value in dict.fromkeys(read) if value is not None and value not in inner_values
    ]


def serialize_segment(segment: ExtractedSegment) -> bytes:
    """Return the ONNX of a segment, its `weights` as external data; equal segments, equal bytes."""
    model = segment.model.clone()
    external_weights(model.graph)
    return ir.to_proto(model).SerializeToString(deterministic=True)


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant is an entry of the engine file, not inside a segment's ONNX."""
    return tensor.nbytes >= MIN_ENTRY_BYTES and tensor.dtype in IO_DTYPES


def _extract(
    model: ir.Model,
    name: str,
    nodes: list[ir.Node],
    reads: Mapping[ir.Node, list[ir.Value]],
    leaving: set[ir.Value],
) -> ExtractedSegment:
    inside = set(nodes)
    inputs: dict[ir.Value, None] = {}
    constants: dict[ir.Value, None] = {}
    for node in nodes:
        for value in reads[node]:
            if value.is_initializer():
                constants[value] = None
            elif value.producer() not in inside:
                inputs[value] = None
    outputs = [value for node in nodes for value in node.outputs if value in leaving]
    for value in (*inputs, *outputs):
        _check_boundary(name, value)
    graph = ir.GraphView(
        list(inputs),
        outputs,
        nodes=nodes,
        initializers=list(constants),
        opset_imports=model.graph.opset_imports,
        name=name,
    ).clone()
    called = {node.op_identifier() for node in nodes}
    segment = ir.Model(
        graph,
        ir_version=min(model.ir_version, MAX_IR_VERSION),
        functions=[function for key, function in model.functions.items() if key in called],
    )
    return ExtractedSegment(
        name=name,
        inputs=tuple(str(v.name) for v in inputs),
        outputs=tuple(str(v.name) for v in outputs),
        model=segment,
        weights=_large_constants(graph),
    )


def _nested(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield all graphs in a node's attributes, nested ones included."""
    for graph in subgraphs(node):
        yield graph
        for inner in graph:
            yield from _nested(inner)


def _check_boundary(segment: str, value: ir.Value) -> None:
    if value.dtype not in IO_DTYPES:
        kind = value.dtype.name if value.dtype is not None else "an unknown type"
        raise BuildError(
            f"Tensor {value.name!r} at the border of segment {segment} has {kind}, which cannot "
            f"pass between segments; types that can: {', '.join(IO_DTYPES.values())}."
        )


def external_weights(graph: ir.Graph) -> dict[str, np.ndarray]:
    """Make the large constants of a graph external; returns them by name."""
    weights = _large_constants(graph)
    for name, array in weights.items():
        value = graph.initializers[name]
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            location="engine",
            offset=0,
            length=tensor.nbytes,
            dtype=tensor.dtype,
            shape=ir.Shape(array.shape),
            name=name,
        )
    return weights


def _large_constants(graph: ir.Graph) -> dict[str, np.ndarray]:
    return {
        name: np.ascontiguousarray(value.const_value.numpy())
        for name, value in graph.initializers.items()
        if value.const_value is not None and is_large(value.const_value)
    }
