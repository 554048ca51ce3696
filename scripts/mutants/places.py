"""Places in a model, drawn by chance."""

import random
from collections.abc import Iterator

import onnx

Proto = onnx.ModelProto


def graphs(proto: Proto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and all subgraphs."""
    waiting = [proto.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [inner for inner in (attribute.g, *attribute.graphs) if inner.node]


def some_graph(draw: random.Random, proto: Proto) -> onnx.GraphProto:
    return draw.choice(list(graphs(proto)))


def some_node(draw: random.Random, proto: Proto) -> onnx.NodeProto:
    return draw.choice(some_graph(draw, proto).node)


def values_of(graph: onnx.GraphProto) -> list[str]:
    names = [value.name for value in graph.input]
    names += [tensor.name for tensor in graph.initializer]
    return names + [name for node in graph.node for name in node.output if name]


def some_value(draw: random.Random, proto: Proto) -> str:
    return draw.choice(values_of(proto.graph))


def infos(proto: Proto) -> list[onnx.ValueInfoProto]:
    return [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
