"""Builds small real networks, whole and cut into segments, and engine files of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from device.engine.file import write_engine
from device.engine.manifest import (
    FORMAT_VERSION,
    Buffer,
    Crossing,
    DimRange,
    Manifest,
    MemoryPlan,
    NodePlacement,
    Portable,
    Processor,
    Provenance,
    Segment,
    TensorInfo,
)

OPSET = [helper.make_opsetid("", 19)]
PROFILE = "orin-nano-8gb"
SCALE = 0.0625  # of the crossing: a power of two, so that every product with it is exact


@dataclass(frozen=True)
class Piece:
    """A segment to be: its processor, nodes and boundary tensors."""

    name: str
    processor: Processor
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Network:
    """Pieces in running order, the weights of all, and what passes between them."""

    pieces: tuple[Piece, ...]
    weights: Mapping[str, np.ndarray]
    tensors: tuple[TensorInfo, ...]
    dims: tuple[DimRange, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def tensor(self, name: str) -> TensorInfo:
        return next(one for one in self.tensors if one.name == name)


def value_info(tensor: TensorInfo) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(tensor.name, kind, tensor.shape)


def external(name: str, value: np.ndarray) -> onnx.TensorProto:
    """A weight without its values: those are entries of the engine file."""
    proto = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(value.dtype))
    proto.dims.extend(value.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "engine"), ("offset", "0"), ("length", str(value.nbytes))):
        proto.external_data.add(key=key, value=text)
    return proto


def read_weights(network: Network, nodes: Sequence[onnx.NodeProto]) -> dict[str, np.ndarray]:
    used = {name for node in nodes for name in node.input}
    return {name: value for name, value in network.weights.items() if name in used}


def piece_model(network: Network, piece: Piece) -> bytes:
    weights = read_weights(network, piece.nodes)
    graph = helper.make_graph(
        piece.nodes,
        piece.name,
        [value_info(network.tensor(name)) for name in piece.inputs],
        [value_info(network.tensor(name)) for name in piece.outputs],
        [external(name, value) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=OPSET, ir_version=9)
    return model.SerializeToString(deterministic=True)


def whole_model(network: Network) -> onnx.ModelProto:
    graph = helper.make_graph(
        [node for piece in network.pieces for node in piece.nodes],
        "whole",
        [value_info(network.tensor(name)) for name in network.inputs],
        [value_info(network.tensor(name)) for name in network.outputs],
        [numpy_helper.from_array(value, name) for name, value in network.weights.items()],
    )
    model = helper.make_model(graph, opset_imports=OPSET, ir_version=9)
    onnx.checker.check_model(model)
    return model


def biggest(network: Network, name: str) -> int | None:
    tensor = network.tensor(name)
    most = {dim.name: dim.max for dim in network.dims}
    size = np.dtype(tensor.dtype).itemsize
    for dim in tensor.shape:
        if dim is None:
            return None
        size *= most[dim] if isinstance(dim, str) else dim
    return size


def plan(network: Network) -> MemoryPlan:
    """Two halves taken in turn: in a chain, what one segment reads is dead when the next writes."""
    passed = [
        name
        for piece in network.pieces
        for name in piece.outputs
        if name not in network.outputs and biggest(network, name) is not None
    ]
    sizes = {name: biggest(network, name) or 0 for name in passed}
    second = -(-max((sizes[name] for name in passed[::2]), default=0) // 64) * 64
    buffers = tuple(
        Buffer(tensor=name, offset=place % 2 * second, bytes=sizes[name])
        for place, name in enumerate(passed)
    )
    return MemoryPlan(
        arena_bytes=max((one.offset + one.bytes for one in buffers), default=0), buffers=buffers
    )


def crossings(network: Network) -> tuple[Crossing, ...]:
    found = []
    for piece in network.pieces:
        for name in piece.outputs:
            targets = tuple(
                other.name
                for other in network.pieces
                if name in other.inputs and other.processor != piece.processor
            )
            if targets:
                found.append(
                    Crossing(
                        tensor=name,
                        source=piece.name,
                        targets=targets,
                        bytes=biggest(network, name),
                    )
                )
    return tuple(found)


def engine_parts(network: Network) -> tuple[Manifest, dict[str, np.ndarray]]:
    entries = dict(network.weights)
    segments = []
    for piece in network.pieces:
        model = f"portable/{piece.name}.onnx"
        entries[model] = np.frombuffer(piece_model(network, piece), np.uint8)
        weights = tuple(read_weights(network, piece.nodes))
        segments.append(
            Segment(
                name=piece.name,
                processor=piece.processor,
                inputs=piece.inputs,
                outputs=piece.outputs,
                nodes=tuple(node.name for node in piece.nodes),
                implementations=(Portable(model=model, weights=weights),),
            )
        )
    manifest = Manifest(
        format=FORMAT_VERSION,
        profile=PROFILE,
        inputs=network.inputs,
        outputs=network.outputs,
        tensors=network.tensors,
        dims=network.dims,
        segments=tuple(segments),
        crossings=crossings(network),
        memory=plan(network),
        plan=tuple(
            NodePlacement(
                node=node.name,
                op=node.op_type,
                processor=piece.processor,
                segment=piece.name,
                rule="",
                reason="the cheapest place",
                predicted_us=1.5,
            )
            for piece in network.pieces
            for node in piece.nodes
        ),
        provenance=Provenance(
            model="small.onnx",
            model_sha256="0" * 64,
            precision="int8",
            passes=("fold", "fuse"),
            versions={"tandem-edge": "0.1.0", "onnx": "1.17"},
        ),
    )
    return manifest, entries


def write_network(path: Path, network: Network) -> Path:
    manifest, entries = engine_parts(network)
    write_engine(path, manifest, entries)
    return path


def without_checksums(data: bytes) -> bytes:
    """An engine as an earlier Tandem wrote it."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"].pop("checksums")
    blob = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    blob += b" " * (-len(blob) % 8)
    return len(blob).to_bytes(8, "little") + blob + data[8 + length :]


def node(op: str, inputs: Sequence[str], output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], name=f"{op}:{output}", **attributes)


def small_weights(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "w1": draw.normal(0, 0.4, (8, 3, 3, 3)).astype(np.float32),
        "b1": draw.normal(0, 0.1, 8).astype(np.float32),
        "w2q": draw.integers(-127, 128, (16, 8, 3, 3), dtype=np.int8),
        "w2s": np.full(16, 2.0**-8, np.float32),
        "w2z": np.zeros(16, np.int8),
        "w3": draw.normal(0, 0.3, (16, 10)).astype(np.float32),
        "b3": draw.normal(0, 0.1, 10).astype(np.float32),
        "s": np.array(SCALE, np.float32),
        "z": np.array(0, np.int8),
    }


def split_network(batch: int | str = 1, most: int = 4) -> Network:
    """gpu, dla0, gpu, dla0: convolution, another behind an INT8 crossing, pool, classifier."""
    first = (
        node("Conv", ("x", "w1", "b1"), "c1", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ("c1",), "r1"),
        node("QuantizeLinear", ("r1", "s", "z"), "q1"),
    )
    second = (
        node("DequantizeLinear", ("q1", "s", "z"), "d1"),
        node("DequantizeLinear", ("w2q", "w2s", "w2z"), "w2", axis=0),
        node("Conv", ("d1", "w2"), "c2", pads=[1, 1, 1, 1]),
        node("Relu", ("c2",), "r2"),
    )
    third = (node("GlobalAveragePool", ("r2",), "p3"),)
    fourth = (
        node("Flatten", ("p3",), "f3"),
        node("Gemm", ("f3", "w3", "b3"), "y"),
    )
    return Network(
        pieces=(
            Piece("gpu.0", "gpu", first, ("x",), ("q1",)),
            Piece("dla0.0", "dla0", second, ("q1",), ("r2",)),
            Piece("gpu.1", "gpu", third, ("r2",), ("p3",)),
            Piece("dla0.1", "dla0", fourth, ("p3",), ("y",)),
        ),
        weights=small_weights(),
        tensors=(
            TensorInfo(name="x", dtype="float32", shape=(batch, 3, 16, 16)),
            TensorInfo(name="q1", dtype="int8", shape=(batch, 8, 8, 8), scale=SCALE),
            TensorInfo(name="r2", dtype="float32", shape=(batch, 16, 8, 8)),
            TensorInfo(name="p3", dtype="float32", shape=(batch, 16, 1, 1)),
            TensorInfo(name="y", dtype="float32", shape=(batch, 10)),
        ),
        dims=(DimRange(name=batch, min=1, opt=2, max=most),) if isinstance(batch, str) else (),
        inputs=("x",),
        outputs=("y",),
    )


def single_network(batch: int | str = 1) -> Network:
    """The same network in one segment on the GPU."""
    cut = split_network(batch)
    nodes = tuple(one for piece in cut.pieces for one in piece.nodes)
    return Network(
        pieces=(Piece("gpu.0", "gpu", nodes, ("x",), ("y",)),),
        weights=cut.weights,
        tensors=(cut.tensor("x"), cut.tensor("y")),
        dims=cut.dims,
        inputs=cut.inputs,
        outputs=cut.outputs,
    )


def picture(batch: int = 1, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (batch, 3, 16, 16)).astype(np.float32)
