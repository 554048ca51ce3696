"""Valid models to damage: small files of onnx's tests, pieces of its light models, other graphs."""

import random
from functools import lru_cache
from pathlib import Path

import onnx
from onnx import helper

from scripts.golden_graphs import GRAPHS, graph_named

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
FOLDERS = ("pytorch-converted", "pytorch-operator", "simple")
PIECE_NODES = (1, 2, 3, 5, 8, 13)
MAX_BASE_BYTES = 4_000_000
Proto = onnx.ModelProto


@lru_cache(maxsize=1)
def base_files() -> tuple[Path, ...]:
    """Return the small model files of the onnx package."""
    files = [path for name in FOLDERS for path in sorted((DATA / name).glob("*/model.onnx"))]
    return tuple(path for path in files if path.stat().st_size < MAX_BASE_BYTES)


@lru_cache(maxsize=1)
def light_files() -> tuple[Path, ...]:
    """Return the light models of the onnx package."""
    return tuple(sorted((DATA / "light").glob("*.onnx")))


@lru_cache(maxsize=16)
def _inferred(path: Path) -> Proto:
    return onnx.shape_inference.infer_shapes(onnx.load(path))


def base(draw: random.Random) -> Proto:
    """Return a valid model: a small file, a piece of a light model, or a graph of the tables."""
    kind = draw.random()
    if kind < 0.45:
        return onnx.load(draw.choice(base_files()))
    if kind < 0.75:
        return piece(draw, _inferred(draw.choice(light_files())))
    return graph_named(draw.choice(sorted(GRAPHS)))


def piece(draw: random.Random, proto: Proto) -> Proto:
    """Cut a few neighbouring nodes out of a model; what they read from others becomes inputs."""
    count = draw.choice(PIECE_NODES)
    first = draw.randrange(len(proto.graph.node))
    nodes = list(proto.graph.node)[first : first + count]
    known = {value.name: value for value in (*proto.graph.value_info, *proto.graph.input)}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    outputs = [name for node in nodes for name in node.output if name]
    read = [name for node in nodes for name in node.input if name and name not in outputs]
    unread = [name for name in outputs if not any(name in node.input for node in nodes)]
    graph = helper.make_graph(
        nodes,
        "piece",
        [known[name] for name in dict.fromkeys(read) if name not in constants and name in known],
        [known.get(name, onnx.ValueInfoProto(name=name)) for name in unread or outputs],
        [constants[name] for name in dict.fromkeys(read) if name in constants],
        value_info=[known[name] for name in outputs if name in known],
    )
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=9)
