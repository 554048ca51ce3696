"""Changes of attributes."""

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, helper

from scripts.mutants.constants import small_tensor
from scripts.mutants.places import Proto, graphs, some_node
from scripts.mutants.values import (
    FLOATS,
    INTEGERS,
    TEXTS,
)


def hostile_attribute(draw: random.Random, name: str) -> onnx.AttributeProto:
    kind = draw.randrange(6)
    values: dict[int, Callable[[], object]] = {
        0: lambda: draw.choice(INTEGERS),
        1: lambda: draw.choice(FLOATS),
        2: lambda: draw.choice(TEXTS),
        3: lambda: [draw.choice(INTEGERS) for _ in range(draw.choice((1, 2, 3, 4, 5, 8, 40)))],
        4: lambda: [draw.choice(FLOATS) for _ in range(draw.choice((1, 2, 4)))],
        5: lambda: small_tensor(draw, name),
    }
    return helper.make_attribute(name, values[kind]())


def change_attribute(draw: random.Random, proto: Proto) -> None:
    """Set an attribute to a hostile value, mostly of its own type."""
    nodes = [node for graph in graphs(proto) for node in graph.node if node.attribute]
    attribute = draw.choice(draw.choice(nodes).attribute)
    if attribute.type == AttributeProto.INT and draw.random() < 0.8:
        attribute.i = draw.choice(INTEGERS)
    elif attribute.type == AttributeProto.INTS and draw.random() < 0.8:
        action = draw.randrange(3)
        if action == 0:
            attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(INTEGERS)
        elif action == 1:
            del attribute.ints[draw.randrange(len(attribute.ints))]
        else:
            attribute.ints.append(draw.choice(INTEGERS))
    elif attribute.type == AttributeProto.FLOAT and draw.random() < 0.8:
        attribute.f = draw.choice(FLOATS)
    elif attribute.type == AttributeProto.STRING and draw.random() < 0.8:
        attribute.s = draw.choice((*(text.encode() for text in TEXTS), b"\xff\xfe"))
    else:
        attribute.CopyFrom(hostile_attribute(draw, attribute.name))


def drop_attribute(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    del node.attribute[draw.randrange(len(node.attribute))]


def known_attribute(draw: random.Random, proto: Proto) -> None:
    """Add an attribute that the operator knows, with a hostile value."""
    node = some_node(draw, proto)
    if not onnx.defs.has(node.op_type):
        return
    known = onnx.defs.get_schema(node.op_type).attributes
    name = draw.choice(sorted(known))
    present = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(present)
    kind = AttributeProto.AttributeType.Value(str(known[name].type).rpartition(".")[2])
    values: dict[int, Callable[[], object]] = {
        AttributeProto.INT: lambda: draw.choice(INTEGERS),
        AttributeProto.FLOAT: lambda: draw.choice(FLOATS),
        AttributeProto.STRING: lambda: draw.choice(TEXTS),
        AttributeProto.INTS: lambda: [draw.choice(INTEGERS) for _ in range(draw.randrange(1, 6))],
        AttributeProto.FLOATS: lambda: [draw.choice(FLOATS) for _ in range(draw.randrange(1, 4))],
    }
    replacement = helper.make_attribute(name, values[kind]()) if kind in values else None
    node.attribute.append(replacement or hostile_attribute(draw, name))


def foreign_attribute(draw: random.Random, proto: Proto) -> None:
    node, second = some_node(draw, proto), some_node(draw, proto)
    node.attribute.append(draw.choice(second.attribute))


def repeat_attribute(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    node.attribute.append(draw.choice(node.attribute))


def attribute_type(draw: random.Random, proto: Proto) -> None:
    node = some_node(draw, proto)
    kind = draw.choice(sorted(AttributeProto.AttributeType.values()))
    draw.choice(node.attribute).type = kind  # type: ignore[assignment]  (ints, as protobuf has them)


def reference_attribute(draw: random.Random, proto: Proto) -> None:
    draw.choice(some_node(draw, proto).attribute).ref_attr_name = "alpha"
