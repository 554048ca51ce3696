"""How the emulation stores a tensor of a Q/DQ segment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.dla_emulator.segment_graph import Node

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuantizedBuffer:
    """INT8 numbers in a buffer; real = scale * stored."""

    buffer: str
    scale: float


@dataclass(frozen=True, slots=True)
class FloatBuffer:
    """Floating-point numbers in a buffer (float32)."""

    buffer: str


@dataclass(frozen=True, slots=True)
class QuantizedConstant:
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


Form = QuantizedBuffer | FloatBuffer


def scale_of(node: Node, constants: Mapping[str, Array]) -> float | None:
    """Return the one scale of a Q or DQ node, None where it is no constant or one per channel."""
    scale = constants.get(node.inputs[1])
    return float(scale.reshape(())) if scale is not None and scale.size == 1 else None
