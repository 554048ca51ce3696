"""Models without the bytes of their weights, for what would write all of them out."""

import math
from collections.abc import Iterable

import onnx
from google.protobuf.message import Message

_FEW = 1024  # elements; what holds no more is copied as it is


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose large initializers are empty: of size 0."""
    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _copy(light, field.name, value)
    light.graph.SetInParent()
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _copy(light.graph, field.name, value)
    for tensor in proto.graph.initializer:
        if tensor.HasField("raw_data") and math.prod(tensor.dims) > _FEW:
            light.graph.initializer.add(
                name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b""
            )
        else:
            light.graph.initializer.append(tensor)
    return light


def _copy(target: Message, name: str, value: object) -> None:
    """Set a field of a message: one value, a message, or several of either."""
    if isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    elif isinstance(value, str | bytes | int | float):
        setattr(target, name, value)
    elif isinstance(value, Iterable):
        getattr(target, name).extend(value)
