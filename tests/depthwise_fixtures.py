"""A depthwise network as MobileNetV2 builds it, with channels spread over two decades."""

from pathlib import Path

import numpy as np
import onnx
from model_fixtures import save
from onnx import helper

DECADES = 2.0
INPUT = (1, 3, 32, 32)


class _Builder:
    """Appends Conv -> BatchNormalization -> activation blocks.

    The normalisation of a spread block multiplies channel c by t_c = 10^u, u uniform over
    `DECADES`, and whatever reads it next divides by t_c: what training does where nothing holds the
    scale of a channel, because rectifiers pass it on.
    """

    def __init__(self, rng: np.random.Generator, activation: str) -> None:
        self.rng, self.activation = rng, activation
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {
            "low": np.array(0, np.float32),
            "high": np.array(6, np.float32),
            "slope": np.array(0.1, np.float32).reshape(1, 1, 1),
        }
        self.value = "x"
        self.spread = np.ones(INPUT[1])

    def block(
        self,
        outputs: int,
        *,
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        linear: bool = False,
    ) -> None:
        """One block; a `linear` one has neither activation nor spread."""
        inputs, number = self.spread.size, len(self.nodes)
        shape = (outputs, inputs // groups, kernel, kernel)
        weight = self.rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        by_group = np.repeat(self.spread.reshape(groups, -1), outputs // groups, axis=0)
        weight = weight / by_group[:, :, None, None]
        half = DECADES / 2
        spread = np.ones(outputs) if linear else 10 ** self.rng.uniform(-half, half, outputs)
        name = f"n{number}"
        constants = {
            f"{name}_w": weight,
            f"{name}_gamma": spread * self.rng.uniform(0.7, 1.3, outputs),
            f"{name}_beta": spread * self.rng.normal(size=outputs) * 0.2,
            f"{name}_mean": self.rng.normal(size=outputs) * 0.1,
            f"{name}_var": self.rng.uniform(0.5, 1.5, outputs),
        }
        self.weights |= {key: array.astype(np.float32) for key, array in constants.items()}
        attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": groups}
        self._add("Conv", [self.value, f"{name}_w"], f"{name}_c", **attributes)
        statistics = [f"{name}_{part}" for part in ("gamma", "beta", "mean", "var")]
        self._add("BatchNormalization", [self.value, *statistics], f"{name}_b")
        if not linear:
            extra = {"Clip": ["low", "high"], "PRelu": ["slope"]}.get(self.activation, [])
            self._add(self.activation, [self.value, *extra], f"{name}_a")
        self.spread = spread

    def residual(self, value: str) -> None:
        """Add an earlier value."""
        self._add("Add", [self.value, value], f"{self.value}_sum")

    def head(self, classes: int) -> None:
        """Pool and classify; the output is y."""
        weight = self.rng.normal(size=(self.spread.size, classes)) / np.sqrt(self.spread.size)
        weight = weight / self.spread[:, None]
        self.weights["fc"] = weight.astype(np.float32)
        self._add("GlobalAveragePool", [self.value], "pooled")
        self._add("Flatten", [self.value], "flat")
        self._add("Gemm", [self.value, "fc"], "y")

    def _add(self, op: str, inputs: list[str], output: str, **attributes: object) -> None:
        self.nodes.append(
            helper.make_node(op, inputs, [output], name=f"{op}_{output}", **attributes)
        )
        self.value = output


def depthwise_net(
    path: Path, rng: np.random.Generator, activation: str = "Relu", classes: int = 10
) -> Path:
    """Write the network: input x [1, 3, 32, 32], output y [1, classes]; return its path."""
    net = _Builder(rng, activation)
    net.block(16, kernel=3, stride=2)
    net.block(16, kernel=3, groups=16)
    net.block(16, linear=True)
    for width, stride, residual in ((24, 2, False), (24, 1, True), (32, 2, False), (32, 1, True)):
        before, expanded = net.value, 4 * net.spread.size
        net.block(expanded)
        net.block(expanded, kernel=3, stride=stride, groups=expanded)
        net.block(width, linear=True)
        if residual:
            net.residual(before)
    net.block(64)
    net.head(classes)
    return save(path, net.nodes, {"x": INPUT}, {"y": [1, classes]}, net.weights)
