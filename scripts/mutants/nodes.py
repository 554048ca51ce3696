"""Changes of nodes: dropped, repeated, moved, rewired, turned into others."""

import random

import onnx
from onnx import helper

from scripts.mutants.places import Proto, some_graph, some_node, some_value
from scripts.mutants.values import (
    OPS,
)


def drop_node(draw: random.Random, proto: Proto) -> None:
    graph = some_graph(draw, proto)
    del graph.node[draw.randrange(len(graph.node))]


def repeat_node(draw: random.Random, proto: Proto) -> None:
    graph = some_graph(draw, proto)
    copy = onnx.NodeProto()
    copy.CopyFrom(draw.choice(graph.node))
    if draw.random() < 0.7:
        for index, name in enumerate(copy.output):
            copy.output[index] = f"{name}_again" if name else ""
        if draw.random() < 0.5:
            copy.name += "_again"
        proto.graph.output.append(onnx.ValueInfoProto(name=copy.output[0]))
    graph.node.append(copy)


def move_node(draw: random.Random, proto: Proto) -> None:
    graph = some_graph(draw, proto)
    nodes = list(graph.node)
    node = nodes.pop(draw.randrange(len(nodes)))
    nodes.insert(draw.randrange(len(nodes) + 1), node)
    ordered = onnx.GraphProto(node=nodes)
    del graph.node[:]
    graph.node.extend(ordered.node)


def rewire(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    node.input[draw.randrange(len(node.input))] = some_value(draw, proto)


def swap_inputs(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    one, two = draw.randrange(len(node.input)), draw.randrange(len(node.input))
    node.input[one], node.input[two] = node.input[two], node.input[one]


def drop_input(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    index = draw.randrange(len(node.input))
    if draw.random() < 0.5:
        node.input[index] = ""
    else:
        del node.input[index]


def add_input(draw: random.Random, proto: Proto) -> None:
    some_node(draw, proto).input.append(draw.choice((some_value(draw, proto), "", "nowhere")))


def change_outputs(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    action = draw.randrange(4)
    if action == 0:
        del node.output[draw.randrange(len(node.output))]
    elif action == 1:
        node.output[draw.randrange(len(node.output))] = ""
    elif action == 2:
        node.output.append(f"{node.output[0]}_more")
    else:
        node.output[draw.randrange(len(node.output))] = some_value(draw, proto)


def change_op(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    node.op_type = draw.choice(OPS)
    if draw.random() < 0.5:
        del node.attribute[:]


def insert_op(draw: random.Random, proto: Proto) -> None:
    """Put an operator of the table between a value and one of its readers."""
    reader = some_node(draw, proto)
    index = draw.randrange(len(reader.input))
    inputs = [reader.input[index]]
    inputs += [some_value(draw, proto) for _ in range(draw.choice((0, 0, 1, 2)))]
    node = helper.make_node(draw.choice(OPS), inputs, [f"inserted_{draw.randrange(10**6)}"])
    reader.input[index] = node.output[0]
    proto.graph.node.append(node)  # the importer sorts
    move_node(draw, proto)


def change_domain(draw: random.Random, proto: Proto) -> None:
    some_node(draw, proto).domain = draw.choice(
        ("ai.onnx", "com.microsoft", "ai.onnx.ml", "own", "é")
    )


def rename(draw: random.Random, proto: Proto) -> None:
    some_node(draw, proto).name = draw.choice(
        ("", "same", "é\u2028", "a" * 5000, some_value(draw, proto))
    )
