"""A piece of a graph on one processor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from device.engine.manifest import Processor

Place = Literal["dla", "gpu", "portable"]
"""Where a plan sees a segment run: on a DLA, by kernels of ours, or by ONNX Runtime."""


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A maximal piece of the graph in one place; nodes are in running order.

    `no_kernel`: nodes for which the GPU backend has no kernel, and why. `unpaid`: nodes that have
    one and run portable beside those, because kernels would not save their crossings. A segment of
    the GPU with either gets no kernels.
    """

    name: str
    processor: Processor
    nodes: tuple[str, ...]
    no_kernel: Mapping[str, str] = field(default_factory=dict)
    unpaid: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """Where it runs; what has no kernels is portable, on a board without a GPU all."""
        if self.processor.startswith("dla"):
            return "dla"
        if self.processor == "cpu" or self.no_kernel or self.unpaid:
            return "portable"
        return "gpu"
