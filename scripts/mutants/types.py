"""Changes of shapes, types and versions."""

import random

import onnx
from onnx import TensorProto, helper, numpy_helper

from scripts.mutants.places import Proto, infos, some_value
from scripts.mutants.values import (
    DTYPES,
    OPSETS,
    PLAIN_DTYPES,
    SIZES,
)


def change_shape(draw: random.Random, proto: Proto) -> None:
    info = draw.choice(infos(proto))
    shape = info.type.tensor_type.shape
    action = draw.randrange(6)
    if action == 0:
        draw.choice(shape.dim).dim_value = draw.choice(SIZES)
    elif action == 1:
        draw.choice(shape.dim).dim_param = draw.choice(("n", "batch", "", "?", "é", "n+1"))
    elif action == 2:
        del shape.dim[draw.randrange(len(shape.dim))]
    elif action == 3:
        shape.dim.add().dim_value = draw.choice(SIZES)
    elif action == 4:
        info.type.tensor_type.ClearField("shape")
    else:
        del shape.dim[:]


def change_dtype(draw: random.Random, proto: Proto) -> None:
    draw.choice(infos(proto)).type.tensor_type.elem_type = draw.choice((*DTYPES, *PLAIN_DTYPES))


def all_dtypes(draw: random.Random, proto: Proto) -> None:
    """Give the whole model another type, as a converter would."""
    dtype = draw.choice((TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16, 6, 7))
    for info in infos(proto):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = dtype
    for index, tensor in enumerate(proto.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT and dtype != TensorProto.BFLOAT16:
            array = numpy_helper.to_array(tensor)
            converted = array.astype(helper.tensor_dtype_to_np_dtype(dtype))
            proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(converted, tensor.name))


def change_type(draw: random.Random, proto: Proto) -> None:
    info = draw.choice(infos(proto))
    inner = onnx.TypeProto()
    inner.CopyFrom(info.type)
    info.type.ClearField("value")
    action = draw.randrange(3)
    if action == 0:
        info.type.sequence_type.elem_type.CopyFrom(inner)
    elif action == 1:
        info.type.optional_type.elem_type.CopyFrom(inner)


def drop_info(draw: random.Random, proto: Proto) -> None:
    del proto.graph.value_info[draw.randrange(len(proto.graph.value_info))]


def false_info(draw: random.Random, proto: Proto) -> None:
    """Note a wrong shape or type of an inner tensor, as exporters do."""
    shape = draw.choice(
        (None, [], [draw.choice(SIZES)], [1, 2, 3, 4], [1, draw.choice(SIZES), 8, 8])
    )
    dtype = draw.choice(PLAIN_DTYPES)
    info = helper.make_tensor_value_info(some_value(draw, proto), dtype, shape)
    proto.graph.value_info.append(info)


def change_versions(draw: random.Random, proto: Proto) -> None:
    action = draw.random()
    if action < 0.75:
        draw.choice(proto.opset_import).version = draw.choice(OPSETS)
    elif action < 0.85:
        proto.ir_version = draw.choice((0, 1, 3, 4, 8, 13, 14, 99, 2**40))
    elif action < 0.95:
        proto.opset_import.append(helper.make_opsetid(draw.choice(("", "own", "com.microsoft")), 3))
    else:
        del proto.opset_import[:]
