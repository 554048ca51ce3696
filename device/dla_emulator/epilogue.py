"""The epilogue of a layer: its activation and where its result becomes INT8.

In a Q/DQ graph a number is rounded where Q follows; on the DLA the output stages of the layer that
computes it round it. So the epilogue of a layer reaches from its output over at most one
activation to the Q nodes behind it. A rectifier between Q/DQ pairs of one scale belongs to it too:
max(0, Q(x)) = Q(max(0, x)).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.arithmetic.layers import Activation
from device.dla_emulator.forms import scale_of
from device.dla_emulator.segment_graph import Node, SegmentGraph

Array = NDArray[Any]

ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "Tanh"})


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a layer's sum: activation, scale of the INT8 result, the nodes it absorbs.

    `tensor` is the last tensor in floating point, the one that is rounded; `stored` the outputs of
    the Q nodes that round it.
    """

    activation: Activation
    scale: float
    tensor: str
    stored: tuple[str, ...]
    absorbed: tuple[Node, ...]


def find_epilogue(tensor: str, graph: SegmentGraph, *, functions: bool) -> Epilogue | None:
    """Return the epilogue of the layer that computes `tensor`; None if its result is not INT8.

    `functions` allows PReLU, sigmoid and tanh, beside bounds.
    """
    activation, absorbed = Activation(), []
    readers = graph.readers.get(tensor, ())
    if tensor not in graph.outputs and len(readers) == 1 and readers[0].op in ACTIVATIONS:
        follower = activation_of(readers[0], graph.constants)
        if follower is not None and (functions or _is_bound(follower)):
            activation, tensor = follower, readers[0].outputs[0]
            absorbed.append(readers[0])
    epilogue = _rounded(Epilogue(activation, 0.0, tensor, (), tuple(absorbed)), graph)
    if epilogue is not None and not absorbed:
        return _with_rectifier(epilogue, graph)
    return epilogue


def _is_bound(activation: Activation) -> bool:
    return activation.slopes is None and activation.function is None


def activation_of(node: Node, constants: Mapping[str, Array]) -> Activation | None:
    """Return a node as an activation of the output stages; None if a bound is not constant."""
    if node.op == "Clip":
        return _clip(node, constants)
    if node.op == "PRelu":
        slopes = constants.get(node.inputs[1])
        if slopes is None or (slopes.ndim == 4 and slopes.shape[0] != 1):
            return None
        return Activation(slopes=slopes.astype(np.float64).reshape(slopes.shape[-3:]))
    if node.op == "LeakyRelu":
        return Activation(slopes=np.asarray(node.number("alpha", 0.01), np.float64))
    return FIXED[node.op]


FIXED: Mapping[str, Activation] = {
    "Relu": Activation(low=0.0),
    "Sigmoid": Activation(function="sigmoid"),
    "Tanh": Activation(function="tanh"),
}


def _clip(node: Node, constants: Mapping[str, Array]) -> Activation | None:
    bounds = [-np.inf, np.inf]
    for i, name in enumerate(node.inputs[1:3]):
        if name and (name not in constants or constants[name].size != 1):
            return None
        if name:
            bounds[i] = float(constants[name].reshape(()))
    return Activation(low=bounds[0], high=bounds[1])


def _rounded(epilogue: Epilogue, graph: SegmentGraph) -> Epilogue | None:
    """Add the Q nodes that read its tensor to an epilogue; None if others do, or at two scales."""
    readers = graph.readers.get(epilogue.tensor, ())
    if not readers or epilogue.tensor in graph.outputs:
        return None
    scales = {
        scale_of(node, graph.constants) if node.op == "QuantizeLinear" else None for node in readers
    }
    scale = scales.pop()
    if scale is None or scales:
        return None
    stored = tuple(node.outputs[0] for node in readers)
    absorbed = (*epilogue.absorbed, *readers)
    return replace(epilogue, scale=scale, stored=stored, absorbed=absorbed)


def _with_rectifier(epilogue: Epilogue, graph: SegmentGraph) -> Epilogue:
    """Absorb a rectifier behind Q and DQ, if nothing else reads them and its scale is the same."""
    if len(epilogue.stored) != 1 or epilogue.stored[0] in graph.outputs:
        return epilogue
    restored = graph.readers.get(epilogue.stored[0], ())
    if len(restored) != 1 or restored[0].op != "DequantizeLinear":
        return epilogue
    inner = restored[0].outputs[0]
    readers = graph.readers.get(inner, ())
    if inner in graph.outputs or len(readers) != 1 or readers[0].op != "Relu":
        return epilogue
    absorbed = (*epilogue.absorbed, restored[0], readers[0])
    rectifier = Epilogue(Activation(low=0.0), 0.0, readers[0].outputs[0], (), absorbed)
    rectified = _rounded(rectifier, graph)
    if rectified is None or rectified.scale != epilogue.scale:
        return epilogue
    return rectified
