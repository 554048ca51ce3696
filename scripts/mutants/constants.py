"""Changes of constants: values, sizes, types, bytes."""

import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from scripts.mutants.places import Proto, some_node, some_value
from scripts.mutants.values import (
    DTYPES,
    FLOATS,
    INTEGERS,
    SIZES,
)


def small_tensor(draw: random.Random, name: str) -> onnx.TensorProto:
    shape = draw.choice(((), (0,), (1,), (2,), (4,), (8,), (3, 3), (1, 3, 2, 2)))
    dtype = draw.choice((np.float32, np.int64, np.int64, np.int32, np.uint8, np.int8, np.bool_))
    with np.errstate(all="ignore"):
        values = [draw.choice((*FLOATS, *INTEGERS)) for _ in range(int(np.prod(shape)))]
        if dtype is not np.float32:
            values = [draw.choice(INTEGERS) for _ in values]
            array = np.array(values, np.int64).astype(dtype).reshape(shape)
        else:
            array = np.array(values, np.float64).astype(dtype).reshape(shape)
    return numpy_helper.from_array(array, name)


def change_constant(draw: random.Random, proto: Proto) -> None:
    """Replace some elements of a constant, small ones first: those are sizes and axes."""
    tensors = sorted(proto.graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
    tensor = draw.choice(tensors[: draw.choice((2, 5, len(tensors)))])
    array = numpy_helper.to_array(tensor).copy()
    values = FLOATS if array.dtype.kind == "f" else INTEGERS
    flat = array.reshape(-1)
    for _ in range(draw.choice((1, 1, 2, 5))):
        with np.errstate(all="ignore"):
            flat[draw.randrange(len(flat))] = np.array(draw.choice(values)).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def replace_constant(draw: random.Random, proto: Proto) -> None:
    tensor = draw.choice(proto.graph.initializer)
    tensor.CopyFrom(small_tensor(draw, tensor.name))


def false_constant(draw: random.Random, proto: Proto) -> None:
    """Let a constant's type, sizes and bytes contradict each other."""
    tensor = draw.choice(proto.graph.initializer)
    action = draw.randrange(6)
    if action == 0:
        tensor.data_type = draw.choice(DTYPES)
    elif action == 1:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(SIZES)
    elif action == 2:
        tensor.dims.append(draw.choice(SIZES))
    elif action == 3:
        tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data) + 1)]
    elif action == 4:
        tensor.data_location = TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key = draw.choice(("location", "offset", "length", "x"))
        entry.value = draw.choice(("nowhere.bin", "../../etc/passwd", "-1", "/dev/zero", ""))
    else:
        tensor.name = draw.choice(("", some_value(draw, proto)))


def reshape_constant(draw: random.Random, proto: Proto) -> None:
    """Give a constant another rank or other sizes, with all of its bytes."""
    tensor = draw.choice(proto.graph.initializer)
    array = numpy_helper.to_array(tensor)
    shapes = [(-1,), (1, *array.shape), (*array.shape, 1), array.shape[::-1]]
    tensor.CopyFrom(numpy_helper.from_array(array.reshape(draw.choice(shapes)), tensor.name))


def retype_constant(draw: random.Random, proto: Proto) -> None:
    tensor = draw.choice(proto.graph.initializer)
    array = numpy_helper.to_array(tensor)
    kinds = (np.float16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_)
    with np.errstate(all="ignore"):
        array = array.astype(draw.choice(kinds))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def drop_constant(draw: random.Random, proto: Proto) -> None:
    tensor = draw.choice(proto.graph.initializer)
    if draw.random() < 0.5:  # it becomes an input
        proto.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    proto.graph.initializer.remove(tensor)


def input_as_constant(draw: random.Random, proto: Proto) -> None:
    tensor = small_tensor(draw, draw.choice(proto.graph.input).name)
    proto.graph.initializer.append(tensor)


def add_constant(draw: random.Random, proto: Proto) -> None:
    """Let a node read a new small constant: an axis, a size, a scale, a limit."""
    node, name = some_node(draw, proto), f"added_{draw.randrange(10**6)}"
    proto.graph.initializer.append(small_tensor(draw, name))
    if node.input and draw.random() < 0.5:
        node.input[draw.randrange(len(node.input))] = name
    else:
        node.input.append(name)
