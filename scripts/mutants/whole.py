"""Whole model files to damage: what commands meet where a download or a disk failed, or who made
the file wants harm.

Seven models: a detector, two classifiers of old opsets, branches and functions, recurrent layers,
Q/DQ, and weights in a file beside the model. They are the same on every machine.
"""

import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper
from onnx.checker import ValidationError

from scripts.golden_graphs import graph_named
from scripts.mutants.bases import DATA, Proto
from scripts.mutants.mutant import CHANGES, MAX_CHANGES, flipped

node = helper.make_node
ROBOT_OBJECTS = Path(__file__).parents[2] / "configs" / "models" / "robot-objects.onnx"
WEIGHTS = "weights.bin"  # of EXTERNAL, beside the model
WEIGHT_COUNT = 1024
SHARE_OF_BYTES = 0.35  # of the files, which are damaged as bytes; others as models
_IMAGE = [1, 3, 32, 32]


def _classifier(name: str) -> Proto:
    return onnx.load(DATA / "light" / f"{name}.onnx")


def _branches() -> Proto:
    """A convolution, a function that calls another twice, an If and a Loop."""
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("own", 1)]
    inner = helper.make_function(
        "own", "Inner", ["a"], ["b"], [node("Relu", ["a"], ["b"])], opsets[:1]
    )
    outer_nodes = [
        node("Inner", ["a"], ["m"], domain="own"),
        node("Inner", ["m"], ["b"], domain="own"),
    ]
    outer = helper.make_function("own", "Outer", ["a"], ["b"], outer_nodes, opsets)
    sides = [
        helper.make_graph(
            [node(op, ["f"], [f"{op}_of_f"], name=op)],
            op,
            [],
            [helper.make_tensor_value_info(f"{op}_of_f", 1, None)],
        )
        for op in ("Sigmoid", "Tanh")
    ]
    step = helper.make_graph(
        [
            node("Identity", ["go"], ["on"], name="go_on"),
            node("Add", ["state", "c"], ["next"], name="step"),
        ],
        "step",
        [
            helper.make_tensor_value_info("at", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", 1, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", 1, None),
        ],
    )
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        node("Outer", ["c"], ["f"], name="outer", domain="own"),
        node("ReduceMax", ["f"], ["m"], name="most", keepdims=0),
        node("Greater", ["m", "half"], ["large"], name="compare"),
        node("If", ["large"], ["i"], name="choose", then_branch=sides[0],
                         else_branch=sides[1]),
        node("Loop", ["trips", "", "i"], ["l"], name="repeat", body=step),
        node("GlobalAveragePool", ["l"], ["y"], name="mean"),
    ]  # fmt: skip
    chance = np.random.default_rng(4)
    constants = {
        "w": chance.standard_normal((8, 3, 3, 3), np.float32),
        "half": np.array(0.5, np.float32),
        "trips": np.array(3),
    }
    return _model(nodes, constants, [1, 8, 1, 1], functions=[inner, outer])


def _quantized() -> Proto:
    """Convolutions with Q/DQ before both operands, as tools for TensorRT write them."""
    chance = np.random.default_rng(5)
    constants = {
        "w": chance.standard_normal((16, 3, 3, 3), np.float32),
        "v": chance.standard_normal((8, 16, 3, 3), np.float32),
        "zero": np.array(0, np.int8),
    }
    nodes = []
    for name, largest in (("x", 4.0), ("w", None), ("r", 9.0), ("v", None)):
        amax = largest or float(np.abs(constants[name]).max())
        constants[f"{name}_scale"] = np.array(amax / 127, np.float32)
        ends = [f"{name}_scale", "zero"]
        nodes.append(node("QuantizeLinear", [name, *ends], [f"{name}_q"], name=f"{name}_quantize"))
        nodes.append(
            node("DequantizeLinear", [f"{name}_q", *ends], [f"{name}_d"], name=f"{name}_dequantize")
        )
    nodes[4:4] = [
        node("Conv", ["x_d", "w_d"], ["c"], name="one", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], name="relu"),
    ]
    nodes.append(node("Conv", ["r_d", "v_d"], ["y"], name="two", strides=[2, 2]))
    return _model(nodes, constants, [1, 8, 15, 15])


def _external() -> Proto:
    """A convolution whose weights are in the file beside the model."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], name="conv"),
        node("Add", ["c", "b"], ["y"], name="add"),
    ]
    proto = _model(nodes, {}, [1, 8, 30, 30])
    for name, dims, offset in (("w", [8, 3, 3, 3], 0), ("b", [1, 8, 1, 1], 4 * 216)):
        tensor = proto.graph.initializer.add(name=name, data_type=1, dims=dims, data_location=1)
        length = 4 * int(np.prod(dims))
        rows = {"location": WEIGHTS, "offset": str(offset), "length": str(length)}
        for key, value in rows.items():
            tensor.external_data.add(key=key, value=value)
    return proto


def _model(
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    result: list[int],
    functions: list[onnx.FunctionProto] | None = None,
) -> Proto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", 1, _IMAGE)],
        [helper.make_tensor_value_info("y", 1, result)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions or [])


MODELS = MappingProxyType(
    {
        "detector": lambda: onnx.load(ROBOT_OBJECTS),
        "squeezenet": lambda: _classifier("light_squeezenet"),
        "shufflenet": lambda: _classifier("light_shufflenet"),
        "branches": _branches,
        "recurrent": lambda: graph_named("recurrent"),
        "quantized": _quantized,
        "external": _external,
    }
)


@lru_cache(maxsize=len(MODELS))
def whole(name: str) -> bytes:
    """Return the file of a model, undamaged."""
    return bytes(MODELS[name]().SerializeToString(deterministic=True))


def weights() -> bytes:
    """Return the file beside the model `external`."""
    return np.linspace(-1, 1, WEIGHT_COUNT, dtype=np.float32).tobytes()


def name_of(seed: int) -> str:
    """Return which of MODELS a seed damages."""
    return random.Random(f"model {seed}").choice(sorted(MODELS))


def damaged(seed: int) -> bytes:
    """Return the damaged file of a seed; the same seed always gives the same bytes."""
    draw, data = random.Random(f"damage {seed}"), whole(name_of(seed))
    if draw.random() < SHARE_OF_BYTES:
        return broken(draw, data)
    proto = onnx.ModelProto.FromString(data)
    for _ in range(draw.choice(MAX_CHANGES)):
        change = draw.choice(CHANGES)
        try:
            change(draw, proto)
        except (IndexError, KeyError, ValueError, TypeError, DecodeError, ValidationError):
            continue  # the change has no place here
    return bytes(proto.SerializeToString(deterministic=True))


def broken(draw: random.Random, data: bytes) -> bytes:
    """Damage a file as bytes: cut, flipped, overwritten, a piece lost or there twice."""
    action, at = draw.randrange(6), draw.randrange(len(data))
    end = min(len(data), at + draw.choice((1, 4, 64, 4096)))
    if action == 0:
        return data[: draw.choice((at, 400, len(data) - 1, 0, 1))]
    if action == 1:
        return data[:at] + draw.randbytes(end - at) + data[end:]
    if action == 2:
        return data[:at] + bytes(end - at) + data[end:]
    if action == 3:
        return data[:at] + data[end:]
    if action == 4:
        return data[:end] + data[at:]
    head = draw.choice((64, 400, len(data)))  # where names, sizes and types are
    return flipped(draw, data[:head]) + data[head:]
