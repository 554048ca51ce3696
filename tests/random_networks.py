"""Random networks of convolutions, poolings and joins, with nodes that no DLA takes."""

from itertools import product

import numpy as np
from legalize_graphs import Net, floats, node

REFUSED = ("Erf", "Softplus", "Sin")
TAKEN = ("Relu", "Sigmoid", "Tanh", "Abs")


class Growing:
    """A graph that grows at random; `open_` are tensors, with channels and side, that a node may
    read.
    """

    CHANNELS: tuple[int, ...] = (3, 64, 256)
    SIDES: tuple[int, ...] = (33, 56, 112)
    WIDTHS: tuple[int, ...] = (48, 128, 256, 512)
    NODES = (5, 25)

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        channels, side = int(rng.choice(self.CHANNELS)), int(rng.choice(self.SIDES))
        self.nodes: list = []
        self.weights: dict[str, np.ndarray] = {}
        self.open_ = [("x", channels, side)]
        self.inputs = {"x": (1, channels, side, side)}

    def net(self) -> Net:
        """Grow to a number of nodes within NODES."""
        count = int(self.rng.integers(self.NODES[0], self.NODES[1] + 1))
        steps = (self.conv, self.conv, self.conv, self.pool, self.pointwise, self.refused)
        while len(self.nodes) < count:
            join = self.pair() if self.rng.random() < 0.25 else None
            if join is not None:
                self.join(*join)
            else:
                self.rng.choice(steps)()
        return Net(self.nodes, self.inputs, self.weights)

    def pick(self) -> tuple[str, int, int]:
        """A tensor to read, one of the latest more often than not."""
        recent = self.open_[-2:] if self.rng.random() < 0.8 else self.open_
        return recent[int(self.rng.integers(len(recent)))]

    def made(self, op: str, reads: str, channels: int, side: int, **given) -> None:
        """Add a node and its result."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(node(op, reads, name, **given))
        self.open_.append((name, channels, side))

    def conv(self) -> None:
        name, channels, side = self.pick()
        kernel, stride = int(self.rng.choice((1, 3, 5))), int(self.rng.choice((1, 1, 2)))
        grouped = channels if self.rng.random() < 0.15 else 1
        wide = channels if grouped > 1 else int(self.rng.choice(self.WIDTHS))
        weight = f"w{len(self.nodes)}"
        self.weights[weight] = floats(self.rng, wide, channels // grouped, kernel, kernel)
        self.made(
            "Conv",
            f"{name} {weight}",
            wide,
            (side - 1) // stride + 1,
            pads=[kernel // 2] * 4,
            strides=[stride] * 2,
            group=grouped,
        )

    def pool(self) -> None:
        name, channels, side = self.pick()
        op = str(self.rng.choice(("MaxPool", "AveragePool")))
        self.made(op, name, channels, side, kernel_shape=[3, 3], pads=[1] * 4)

    def pointwise(self) -> None:
        name, channels, side = self.pick()
        self.made(str(self.rng.choice(TAKEN)), name, channels, side)

    def refused(self) -> None:
        name, channels, side = self.pick()
        self.made(str(self.rng.choice(REFUSED)), name, channels, side)

    def pair(self) -> tuple | None:
        """Two tensors of one size."""
        pairs = [(a, b) for a, b in product(self.open_, self.open_) if a[2] == b[2] and a[0] < b[0]]
        return pairs[int(self.rng.integers(len(pairs)))] if pairs else None

    def join(self, one: tuple, other: tuple) -> None:
        if one[1] == other[1]:
            self.made("Add", f"{one[0]} {other[0]}", one[1], one[2])
        else:
            self.made("Concat", f"{one[0]} {other[0]}", one[1] + other[1], one[2], axis=1)


class Small(Growing):
    """Networks that run in milliseconds in the emulation of the DLA."""

    CHANNELS = (3, 8, 16)
    SIDES = (7, 12)
    WIDTHS = (4, 8, 16)
    NODES = (3, 9)
