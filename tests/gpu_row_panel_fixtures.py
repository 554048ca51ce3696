"""Pointwise convolutions, and the tactics that they get."""

from dataclasses import replace

import numpy as np
from gpu_graphs import Case
from int8_graphs import Graph

from toolkit.gpu.lower import KernelProgram


def pointwise(
    rng: np.random.Generator,
    channels: int,
    filters: int,
    residual: bool,
    size: tuple[int, int],
    strides: tuple[int, int] = (1, 1),
    rectified: bool = True,
) -> Case:
    """A 1x1 convolution between others of INT8, with or without a rectifier and a residual."""
    graph = Graph(rng, {"x": (2, channels, *size)})
    x = graph.rounded("x")
    weights = (filters, channels, 1, 1)
    other = ""
    if residual:  # made first: the second is added where it is made
        other = graph.product("Conv", x, weights, strides=[*strides])
        other = graph.rounded(graph.add("Relu", other) if rectified else other)
    y = graph.product("Conv", x, weights, bias="int32", strides=[*strides])
    y = graph.add("Add", y, other) if residual else y
    y = graph.rounded(graph.add("Relu", y) if rectified else y, np.float32(0.03))
    return graph.case(graph.product("Conv", y, (4, filters, 1, 1)))


def tactics_of(segment: KernelProgram, kernel: str) -> list[KernelProgram]:
    """The segment once for each tactic of a kernel that leaves sums where lanes have them."""
    found = []
    for at, op in enumerate(segment.ops):
        for tactic in op.tactics:
            constants = dict(tactic[0].spec.constants)
            if tactic[0].spec.title == kernel and constants.get("MMA_WARPS", 1):
                chosen = list(segment.ops)
                chosen[at] = replace(op, tactics=(tactic,))
                found.append(replace(segment, ops=tuple(chosen)))
    return found
