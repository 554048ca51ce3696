"""Changes of inputs, outputs, subgraphs and functions, and nodes that make tensors large."""

import random
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from scripts.mutants.places import Proto, some_node, some_value
from scripts.mutants.values import (
    GROWING,
    INTEGERS,
    PLAIN_DTYPES,
)


def change_output(draw: random.Random, proto: Proto) -> None:
    outputs = proto.graph.output
    action = draw.randrange(4)
    if action == 0:
        del outputs[draw.randrange(len(outputs))]
    elif action == 1:
        outputs.append(onnx.ValueInfoProto(name=some_value(draw, proto)))
    elif action == 2:
        draw.choice(outputs).name = draw.choice((some_value(draw, proto), "nowhere", ""))
    else:
        name = some_value(draw, proto)
        outputs.append(helper.make_tensor_value_info(name, draw.choice(PLAIN_DTYPES), None))


def change_input(draw: random.Random, proto: Proto) -> None:
    inputs = proto.graph.input
    action = draw.randrange(3)
    if action == 0:
        del inputs[draw.randrange(len(inputs))]
    elif action == 1:
        draw.choice(inputs).name = draw.choice((some_value(draw, proto), "nowhere", "", "é\u2028"))
    else:
        inputs.append(helper.make_tensor_value_info(some_value(draw, proto), 1, [1]))


def wrap(draw: random.Random, proto: Proto) -> None:
    """Put a node into a branch of `If`, or the body of `Loop` or `Scan`."""
    index = draw.randrange(len(proto.graph.node))
    node = onnx.NodeProto()
    node.CopyFrom(proto.graph.node[index])
    outer, inner = list(node.output), [f"{name}_inner" for name in node.output]
    node.output[:] = inner
    body = helper.make_graph(
        [node], f"body_{index}", [], [onnx.ValueInfoProto(name=name) for name in inner]
    )
    kind = draw.choice(("If", "If", "If", "Loop", "Scan"))
    if kind == "If":
        else_branch = onnx.GraphProto()
        else_branch.CopyFrom(body)
        if draw.random() < 0.3:
            del else_branch.output[draw.randrange(len(else_branch.output)) :]
        condition = f"condition_{index}"
        constant = draw.choice((np.array(True), np.array([True]), np.array(1), np.array([])))
        proto.graph.initializer.append(numpy_helper.from_array(constant, condition))
        wrapped = helper.make_node(
            "If", [condition], outer, name=node.name, then_branch=body, else_branch=else_branch
        )
    else:
        wrapped = helper.make_node(
            kind, [some_value(draw, proto) for _ in range(2)], outer, name=node.name, body=body
        )
        if kind == "Scan":
            wrapped.attribute.append(
                helper.make_attribute("num_scan_inputs", draw.choice(INTEGERS))
            )
    proto.graph.node[index].CopyFrom(wrapped)


def grow(draw: random.Random, proto: Proto) -> None:
    """Let a tensor double many times, or be made as large as a constant says."""
    source = some_value(draw, proto)
    last, rounds = source, draw.choice((1, 3, 20, 33))
    for turn in range(rounds):
        node = helper.make_node("Concat", [last, last], [f"grown_{turn}"], axis=0)
        proto.graph.node.append(node)
        last = node.output[0]
    if draw.random() < 0.6:
        sizes = [
            draw.choice((1, 3, 1000, 2**20, 2**31, 2**40)) for _ in range(draw.randrange(1, 5))
        ]
        proto.graph.initializer.append(numpy_helper.from_array(np.array(sizes), "grown_sizes"))
        op = draw.choice(GROWING)
        inputs = ["grown_sizes"] if op == "ConstantOfShape" else [last, "grown_sizes"]
        proto.graph.node.append(helper.make_node(op, inputs, ["grown"]))
        last = "grown"
    proto.graph.output.append(onnx.ValueInfoProto(name=last))


def quantize_value(draw: random.Random, proto: Proto) -> None:
    """Put Q/DQ in front of an input of a node, with scales of all kinds."""
    node = some_node(draw, proto)
    index, mark = draw.randrange(len(node.input)), draw.randrange(10**6)
    scale = draw.choice((0.02, 0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e38))
    shape = draw.choice(((), (1,), (3,), (16,), (1, 1)))
    scales = numpy_helper.from_array(np.full(shape, scale, np.float32), f"scale_{mark}")
    zero = np.full(shape, draw.choice((0, 0, 0, 3)), draw.choice((np.int8, np.uint8, np.int32)))
    proto.graph.initializer.extend([scales, numpy_helper.from_array(zero, f"zero_{mark}")])
    ends = [f"scale_{mark}", f"zero_{mark}"][: draw.choice((1, 2, 2))]
    value = node.input[index]
    quantized, read = f"quantized_{mark}", f"read_{mark}"
    axis: dict[str, Any] = {} if draw.random() < 0.7 else {"axis": draw.choice((0, 1, -1, 7))}
    pair = [
        helper.make_node("QuantizeLinear", [value, *ends], [quantized], **axis),
        helper.make_node("DequantizeLinear", [quantized, *ends], [read], **axis),
    ]
    node.input[index] = read
    proto.graph.node.extend(pair)


def as_function(draw: random.Random, proto: Proto) -> None:
    """Make a local function of a node, now and then one that calls itself or lacks inputs."""
    node = draw.choice(proto.graph.node)
    body = onnx.NodeProto()
    body.CopyFrom(node)
    if draw.random() < 0.2:
        body.domain, body.op_type = "own", "Called"
    inputs = [name for name in dict.fromkeys(node.input) if name]
    if draw.random() < 0.2:
        inputs = inputs[:-1]
    proto.functions.append(
        helper.make_function(
            "own", "Called", inputs, list(node.output), [body], list(proto.opset_import)
        )
    )
    proto.opset_import.append(helper.make_opsetid("own", 1))
    node.domain, node.op_type = "own", "Called"
    node.input[:] = inputs
