"""Memory limits of a DLA core: loadables, their weights and intermediates.

These rules bind a `Core` or a `Loadable` (one segment on the DLA), not a node; the solver keeps
their limits.
"""

import math
from dataclasses import dataclass

from device.engine.manifest import Precision
from toolkit.dla.rules import ops as o
from toolkit.dla.rules.rule import (
    FLOOR,
    GUIDE,
    HEADER,
    NEWEST,
    AtMost,
    Fact,
    Generation,
    OneOf,
    Rule,
)
from toolkit.graph.node_view import NodeView, TensorView

KIB, MIB, GIB = 2**10, 2**20, 2**30
BYTES: dict[Precision, int] = {"fp32": 4, "fp16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Core:
    """A DLA core and its number of loadables."""

    name: str
    loadables: int
    op: str = "core"


@dataclass(frozen=True, slots=True)
class Loadable:
    """A segment on the DLA: the batches of its nodes, and its memory.

    `intermediate_bytes`: tensors that do not leave the segment; `weight_bytes`: stored constants.
    """

    name: str
    batches: tuple[int, ...]
    weight_bytes: int
    intermediate_bytes: int
    op: str = "loadable"


# fmt: off
def _loadables(core: Core) -> tuple[Fact, ...]:
    return (Fact(core.loadables, f"{core.loadables} loadables"),)


# The guide of 8.2 to 8.4 says 4, logs of TensorRT 5 to 7 say 8. Versions 8.0 and 8.1 are unknown
# and
# get the smaller number.
CORE_RULES: tuple[Rule[Core], ...] = (
    Rule(id="G6", ops=None, limit="a core holds {} loadables",
         facts=_loadables, allowed=AtMost(16), tensorrt=((8, 5), NEWEST), source=GUIDE),
    Rule(id="G6.8-4", ops=None, limit="up to TensorRT 8.4 a core holds {} loadables",
         facts=_loadables, allowed=AtMost(4), tensorrt=((8,), (8, 5)),
         source="TensorRT 8.2 to 8.4 developer guides"),
    Rule(id="G6.7", ops=None, limit="up to TensorRT 7 a core holds {} loadables",
         facts=_loadables, allowed=AtMost(8), tensorrt=(FLOOR, (8,)),
         source="TensorRT logs", certainty="observed"),
)


def _batches(loadable: Loadable) -> tuple[Fact, ...]:
    batches = sorted(set(loadable.batches))
    return (Fact(len(batches), f"batches {', '.join(map(str, batches))}"),) if batches else ()


LOADABLE_RULES: tuple[Rule[Loadable], ...] = (
    Rule(id="G7", ops=None, limit="all layers of a loadable must have one batch",
         facts=_batches, allowed=OneOf((1,)), source=GUIDE,
         hint="cut the segment where the batch changes"),
    Rule(id="G8", ops=None, limit="the intermediates of a loadable must be below 1 GiB",
         facts=lambda loadable: _size(loadable.intermediate_bytes, "intermediates"),
         allowed=AtMost(GIB - 1), source=HEADER, hint="cut the segment in two"),
    Rule(id="G9", ops=None, limit="the weights of a loadable must be below 512 MiB",
         facts=lambda loadable: _size(loadable.weight_bytes, "weights"),
         allowed=AtMost(512 * MIB - 1), source="NvInferRuntime.h 10.3",
         hint="cut the segment in two"),
)


def _size(count: int, content: str) -> tuple[Fact, ...]:
    return (Fact(count, f"{count} bytes of {content}"),)
# fmt: on


def stored_bytes(view: NodeView, precision: Precision, generation: Generation) -> int:
    """Return the bytes that the constants of a node take in a loadable.

    Weights of convolutions are stored in the precision. All other constants are FP19 in 4 bytes on
    Orin, their channels padded to 16 (FP16) or 32 (INT8) (TensorRT guide, inference on Orin).
    Biases count 4 bytes, because no source says less. Shapes, axes and bounds are not counted.
    """
    if view.op in o.WEIGHTED:
        kernel, *rest = [_elements(tensor) for tensor in view.constants] or [0]
        return kernel * BYTES[precision] + 4 * sum(rest)
    if view.op not in o.BINARY | o.ops("BatchNormalization PRelu"):
        return 0
    if generation == "v1":
        return sum(_elements(tensor) for tensor in view.constants) * BYTES[precision]
    channel_unit = 16 if precision == "fp16" else 32
    return sum(4 * _padded_elements(tensor, channel_unit) for tensor in view.constants)


def _elements(tensor: TensorView) -> int:
    return math.prod(size for size in tensor.shape or () if isinstance(size, int))


def _padded_elements(tensor: TensorView, unit: int) -> int:
    """Count elements with channels (third from the end, or all of a vector) padded to `unit`."""
    shape = tuple(size for size in tensor.shape or () if isinstance(size, int))
    channel_axis = -3 if len(shape) >= 3 else 0
    channels = shape[channel_axis] if len(shape) == 1 or len(shape) >= 3 else 1
    return _elements(tensor) // max(1, channels) * (-(-channels // unit) * unit)
