"""Two products one behind the other."""

from dataclasses import dataclass

import numpy as np
from gpu_graphs import Case
from int8_graphs import Graph

from device.engine.manifest import DimRange

BATCH = DimRange(name="batch", min=1, opt=4, max=7)


@dataclass(frozen=True)
class Pair:
    """A 1x1 convolution with a residual, and the one that reads what it makes."""

    channels: int = 64
    filters: int = 256
    second: int = 64
    residual: bool = True
    stride: int = 1
    taps: int = 1
    added: bool = False  # a residual to the second


def chain_of(
    rng: np.random.Generator, pair: Pair, batch: int | str = 2, size: tuple[int, int] = (11, 10)
) -> Case:
    """Two residual blocks in a row, all on grids; each result is the next residual."""
    graph = Graph(rng, {"x": (batch, pair.channels, *size)})  # type: ignore[dict-item]
    x = graph.rounded("x")
    found = graph.rounded(graph.product("Conv", x, (pair.filters, pair.channels, 1, 1)))
    for _ in range(2):
        y = graph.product("Conv", x, (pair.filters, pair.channels, 1, 1), bias="int32")
        y = graph.add("Add", y, found) if pair.residual else y
        found = graph.rounded(graph.add("Relu", y), np.float32(0.03))
        z = graph.product(
            "Conv",
            found,
            (pair.second, pair.filters, pair.taps, pair.taps),
            bias="int32",
            strides=[pair.stride] * 2,
            pads=[pair.taps // 2] * 4,
        )
        z = graph.add("Add", z, x) if pair.added else z
        z = graph.rounded(graph.add("Relu", z), np.float32(0.02))
        if pair.second != pair.channels or pair.stride > 1:
            break
        x = z
    return graph.case(graph.product("Conv", z, (4, pair.second, 1, 1)), found)
