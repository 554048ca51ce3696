"""Models without the bytes of their weights, for what would write all of them out."""

import math
from collections.abc import Iterable

import onnx
from google.protobuf.message import Message

_FEW = 1024  # elements; what holds no more is copied as it is
TYPED_FIELDS = (
    "double_data",
    "float_data",
    "int32_data",
    "int64_data",
    "string_data",
    "uint64_data",
)


def without_weights(
    proto: onnx.ModelProto, *, more_than: int = _FEW, keep_dims: bool = False
) -> onnx.ModelProto:
    """Return a copy of a model whose initializers of `more_than` elements have no data.

    They are of size 0, or of their own with `keep_dims`, which is no valid model.
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
        if _is_large(tensor, more_than):
            dims = tensor.dims if keep_dims else [0]
            light.graph.initializer.add(
                name=tensor.name, data_type=tensor.data_type, dims=dims, raw_data=b""
            )
        else:
            light.graph.initializer.append(tensor)
    return light


def replaced_but_weights(
    proto: onnx.ModelProto, light: onnx.ModelProto, *, more_than: int
) -> onnx.ModelProto:
    """Make a model in place what its light copy has become; large weights stay where they are.

    Weights are found by their names; those that the light copy no longer has are dropped.
    """
    order = {tensor.name: at for at, tensor in enumerate(light.graph.initializer)}
    tensors = proto.graph.initializer
    for at in reversed(range(len(tensors))):
        if not _is_large(tensors[at], more_than) or tensors[at].name not in order:
            del tensors[at]
    large = {tensor.name for tensor in tensors}
    tensors.extend(tensor for tensor in light.graph.initializer if tensor.name not in large)
    tensors.sort(key=lambda tensor: order[tensor.name])
    for message, changed in ((proto.graph, light.graph), (proto, light)):
        for field, _ in message.ListFields():
            if field.name not in ("graph", "initializer"):
                message.ClearField(field.name)
        for field, value in changed.ListFields():
            if field.name not in ("graph", "initializer"):
                _copy(message, field.name, value)
    return proto


def _is_large(tensor: onnx.TensorProto, more_than: int) -> bool:
    """Whether a tensor has many elements, as raw bytes alone, of numbers, and its own sizes."""
    return (
        tensor.HasField("raw_data")
        and tensor.data_location == onnx.TensorProto.DEFAULT
        and tensor.data_type != onnx.TensorProto.STRING
        and all(size > 0 for size in tensor.dims)
        and math.prod(tensor.dims) > more_than
        and not any(len(getattr(tensor, name)) for name in TYPED_FIELDS)
    )


def _copy(target: Message, name: str, value: object) -> None:
    """Set a field of a message: one value, a message, or several of either."""
    if isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    elif isinstance(value, str | bytes | int | float):
        setattr(target, name, value)
    elif isinstance(value, Iterable):
        getattr(target, name).extend(value)
