"""Reads a segment's ONNX into plain values: nodes, constants as arrays, and who reads what.

onnx is imported only when a segment is opened: it is a package of the host, and the emulation of
the DLA is the one thing on this side that needs it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from device.engine.file import Engine
from device.engine.manifest import Portable
from device.errors import SessionError
from device.install_advice import why_missing

if TYPE_CHECKING:
    from onnx import ModelProto

Array = NDArray[Any]
AttributeValue = int | float | bytes | list[int] | list[float]


@dataclass(frozen=True, slots=True)
class Node:
    """One ONNX node; absent optional inputs are ""."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue]

    def integer(self, key: str, default: int) -> int:
        """Return an attribute that holds one whole number."""
        value = self.attributes.get(key, default)
        return value if isinstance(value, int) else default

    def number(self, key: str, default: float) -> float:
        """Return an attribute that holds one number."""
        value = self.attributes.get(key, default)
        return float(value) if isinstance(value, int | float) else default

    def text(self, key: str, default: str) -> str:
        """Return an attribute that holds a word."""
        value = self.attributes.get(key)
        return value.decode() if isinstance(value, bytes) else default

    def integers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return an attribute that holds whole numbers."""
        value = self.attributes.get(key)
        return tuple(int(item) for item in value) if isinstance(value, list) else default


@dataclass(frozen=True, slots=True)
class SegmentGraph:
    """A segment: nodes in running order, constants by name, and the readers of each tensor."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Array]
    readers: Mapping[str, tuple[Node, ...]]
    outputs: frozenset[str]


def why_not() -> str | None:
    """Return why segments cannot be read here, or None if they can."""
    return why_missing("onnx", "host")


def read_graph(engine: Engine, implementation: Portable, where: str) -> SegmentGraph:
    """Return the graph of a portable implementation, its weights read in place.

    Raises SessionError if the bytes are not an ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_from_string(engine.entry(implementation.model).tobytes())
    except DecodeError as error:
        raise SessionError(f"{where} holds no readable ONNX model; build it again") from error
    return graph_of(model, engine.entry)


def graph_of(model: "ModelProto", entry: Callable[[str], Array]) -> SegmentGraph:
    """Return the graph of an ONNX model; `entry` gives the weights that lie outside it."""
    import onnx
    from google.protobuf.message import Message
    from onnx import numpy_helper

    constants: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        constants[tensor.name] = entry(tensor.name) if external else numpy_helper.to_array(tensor)
    nodes = []
    for proto in model.graph.node:
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in proto.attribute}
        if proto.op_type == "Constant" and "value" in attributes:
            constants[proto.output[0]] = np.asarray(numpy_helper.to_array(attributes["value"]))
            continue
        nodes.append(
            Node(
                proto.op_type,
                proto.name,
                tuple(proto.input),
                tuple(proto.output),
                {
                    key: _plain(value)
                    for key, value in attributes.items()
                    if not isinstance(value, Message)  # branches, and constants with a shape
                },
            )
        )
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in dict.fromkeys(node.inputs):
            readers.setdefault(name, []).append(node)
    return SegmentGraph(
        tuple(nodes),
        constants,
        {name: tuple(nodes_of) for name, nodes_of in readers.items()},
        frozenset(item.name for item in model.graph.output),
    )


def _plain(value: Any) -> AttributeValue:  # noqa: ANN401
    """Return an attribute's value; lists of protobuf's own become Python's."""
    if isinstance(value, int | float | bytes):
        return value
    return list(value)
