"""How a tensor of a Q/DQ segment lives in the emulation, and where its INT8 form is decided.

In a Q/DQ graph a number is rounded where Q follows; on the DLA the output stages of the layer that
makes it round it. So the end of a layer is found by walking from its output over at most one
activation to the Q nodes behind it: `find_ending`. A rectifier between Q/DQ pairs of one scale
belongs to the layer too: max(0, Q(x)) = Q(max(0, x)).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.runtime.dla.layers import Activation
from device.runtime.emulation.segment_graph import Graph, Node

Array = NDArray[Any]

ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "Sigmoid", "Tanh"})


@dataclass(frozen=True, slots=True)
class Grid:
    """INT8 numbers in a buffer; real = scale * stored."""

    buffer: str
    scale: float


@dataclass(frozen=True, slots=True)
class Real:
    """Floating-point numbers in a buffer (float32)."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Integers:
    """A constant in integers behind DQ: real = stored * scale along `axis` (None: one scale)."""

    stored: Array
    scale: NDArray[np.float64]
    axis: int | None

    def real(self) -> NDArray[np.float32]:
        """Return the numbers in float32."""
        shape = [1] * self.stored.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        product = self.stored.astype(np.float64) * self.scale.reshape(shape)
        return product.astype(np.float32)


Form = Grid | Real


@dataclass(frozen=True, slots=True)
class Ending:
    """How a layer ends: what follows its sum, the scale of its result, which nodes that takes in.

    `tensor` is the last tensor in floating point, the one that is rounded; `stored` the outputs of
    the Q nodes that round it.
    """

    activation: Activation
    scale: float
    tensor: str
    stored: tuple[str, ...]
    absorbed: tuple[Node, ...]


def scale_of(node: Node, constants: Mapping[str, Array]) -> float | None:
    """Return the one scale of a Q or DQ node, None where it is no constant or one per channel."""
    scale = constants.get(node.inputs[1])
    return float(scale.reshape(())) if scale is not None and scale.size == 1 else None


def find_ending(tensor: str, graph: Graph, *, functions: bool) -> Ending | None:
    """Return how the layer that makes `tensor` ends; None if its result is not INT8.

    `functions` allows PReLU, sigmoid and tanh, beside bounds.
    """
    activation, absorbed = Activation(), []
    readers = graph.readers.get(tensor, ())
    if tensor not in graph.outputs and len(readers) == 1 and readers[0].op in ACTIVATIONS:
        found = activation_of(readers[0], graph.constants)
        if found is not None and (functions or (found.slopes is None and found.function is None)):
            activation, tensor = found, readers[0].outputs[0]
            absorbed.append(readers[0])
    ending = _rounded(Ending(activation, 0.0, tensor, (), tuple(absorbed)), graph)
    if ending is not None and not absorbed:
        return _with_rectifier(ending, graph)
    return ending


def activation_of(node: Node, constants: Mapping[str, Array]) -> Activation | None:
    """Return an activation node as the output stages know it; None if a bound is not constant."""
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


def _rounded(ending: Ending, graph: Graph) -> Ending | None:
    """Complete an ending by the Q nodes that read its tensor, if they alone do, at one scale."""
    readers = graph.readers.get(ending.tensor, ())
    if not readers or ending.tensor in graph.outputs:
        return None
    scales = {
        scale_of(one, graph.constants) if one.op == "QuantizeLinear" else None for one in readers
    }
    scale = scales.pop()
    if scale is None or scales:
        return None
    stored = tuple(one.outputs[0] for one in readers)
    absorbed = (*ending.absorbed, *readers)
    return replace(ending, scale=scale, stored=stored, absorbed=absorbed)


def _with_rectifier(ending: Ending, graph: Graph) -> Ending:
    """Take in a rectifier behind Q and DQ, if nothing else reads them and its scale is the same."""
    if len(ending.stored) != 1 or ending.stored[0] in graph.outputs:
        return ending
    restored = graph.readers.get(ending.stored[0], ())
    if len(restored) != 1 or restored[0].op != "DequantizeLinear":
        return ending
    inner = restored[0].outputs[0]
    readers = graph.readers.get(inner, ())
    if inner in graph.outputs or len(readers) != 1 or readers[0].op != "Relu":
        return ending
    absorbed = (*ending.absorbed, restored[0], readers[0])
    rectifier = Ending(Activation(low=0.0), 0.0, readers[0].outputs[0], (), absorbed)
    behind = _rounded(rectifier, graph)
    return behind if behind is not None and behind.scale == ending.scale else ending
