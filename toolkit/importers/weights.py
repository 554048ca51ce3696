"""Models without the bytes of their weights, for what would write all of them out."""

import math
from collections.abc import Iterable

import onnx
from google.protobuf.message import Message

_FEW = 1024  # elements; what holds no more is copied as it is
_TYPED = ("double_data", "float_data", "int32_data", "int64_data", "string_data", "uint64_data")


def without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose large initializers are empty: of size 0.

    Those that the checker of ONNX would refuse, but for their type, are copied as they are.
    """
    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _copy(light, field.name, value)
    light.graph.SetInParent()
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _copy(light.graph, field.name, value)
    for tensor in proto.graph.initializer:
        if _is_large(tensor):
            light.graph.initializer.add(
                name=tensor.name, data_type=tensor.data_type, dims=[0], raw_data=b""
            )
        else:
            light.graph.initializer.append(tensor)
    return light


def _is_large(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor has many elements, as raw bytes alone, of numbers, and its own sizes."""
    return (
        tensor.HasField("raw_data")
        and tensor.data_location == onnx.TensorProto.DEFAULT
        and tensor.data_type != onnx.TensorProto.STRING
        and all(size > 0 for size in tensor.dims)
        and math.prod(tensor.dims) > _FEW
        and not any(len(getattr(tensor, name)) for name in _TYPED)
    )


def _copy(target: Message, name: str, value: object) -> None:
    """Set a field of a message: one value, a message, or several of either."""
    if isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    elif isinstance(value, str | bytes | int | float):
        setattr(target, name, value)
    elif isinstance(value, Iterable):
        getattr(target, name).extend(value)
