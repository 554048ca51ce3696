"""Damaged ONNX models for `scripts/fuzz_models.py`: a base model, changed in places by a seed.

A change knows ONNX's structure: it takes away, repeats and rewires nodes, and sets attributes,
shapes, types, opsets, constants, outputs and subgraphs to what no exporter writes. The bases are
small models of onnx's own tests, pieces of its light models, and graphs of many operators.
"""

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.checker import ValidationError

from scripts.golden_graphs import GRAPHS, graph_named

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
FOLDERS = ("pytorch-converted", "pytorch-operator", "simple")
PIECE_NODES = (1, 2, 3, 5, 8, 13)
MAX_BASE_BYTES = 4_000_000
MAX_CHANGES = (1, 1, 1, 2, 2, 3, 5)

SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 64, 255, 4096, -1, -2, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
INTEGERS = (*SIZES, -(2**31), -(2**63), -3, -4, -100, 100, 10_000)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 1e38, float("inf"), float("-inf"), float("nan"), 1e9)
TEXTS = ("", "x", "NOTSET", "SAME_UPPER", "VALID", "linear", "cubic", "nearest", "constant", "edge",
         "reflect", "bidirectional", "reverse", "round_prefer_ceil", "DCR", "é\u2028", "a" * 300,
         "ij,jk->ik", "...i->i", "ii->")  # fmt: skip
OPSETS = (*range(1, 30), 0, -1, 2**31, 2**62)
DTYPES = tuple(range(30))
PLAIN_DTYPES = (1, 2, 3, 6, 7, 9, 10, 11)
OPS = (
    "Abs", "Add", "And", "ArgMax", "AveragePool", "BatchNormalization", "Cast", "CastLike", "Ceil",
    "Clip", "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "Conv",
    "ConvInteger", "ConvTranspose", "CumSum", "DepthToSpace", "DequantizeLinear", "Det", "Div",
    "Dropout", "DynamicQuantizeLinear", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike",
    "Flatten", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool",
    "GlobalMaxPool", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Identity",
    "If", "InstanceNormalization", "IsNaN", "LRN", "LSTM", "LayerNormalization", "LeakyRelu",
    "Less", "Log", "LogSoftmax", "Loop", "LpNormalization", "MatMul", "MatMulInteger", "Max",
    "MaxPool", "MaxUnpool", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "NonMaxSuppression",
    "NonZero", "Not", "OneHot", "Optional", "PRelu", "Pad", "Pow", "QLinearConv", "QLinearMatMul",
    "QuantizeLinear", "RNN", "RandomNormalLike", "Range", "Reciprocal", "ReduceL2", "ReduceLogSum",
    "ReduceMax", "ReduceMean", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Resize",
    "ReverseSequence", "RoiAlign", "Round", "STFT", "Scan", "ScatterElements", "ScatterND", "Selu",
    "SequenceAt", "SequenceConstruct", "Shape", "Shrink", "Sigmoid", "Sign", "Size", "Slice",
    "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Split", "SplitToSequence", "Sqrt",
    "Squeeze", "StringNormalizer", "Sub", "Sum", "Tan", "Tanh", "TfIdfVectorizer",
    "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Upsample",
    "Where", "Xor",
)  # fmt: skip
GROWING = ("Concat", "Expand", "Tile", "ConstantOfShape", "Range", "Pad", "Resize", "OneHot")

Proto = onnx.ModelProto
Change = Callable[[random.Random, Proto], None]


@lru_cache(maxsize=1)
def base_files() -> tuple[Path, ...]:
    """Return the small model files of the onnx package."""
    files = [path for name in FOLDERS for path in sorted((DATA / name).glob("*/model.onnx"))]
    return tuple(path for path in files if path.stat().st_size < MAX_BASE_BYTES)


@lru_cache(maxsize=1)
def light_files() -> tuple[Path, ...]:
    """Return the light models of the onnx package."""
    return tuple(sorted((DATA / "light").glob("*.onnx")))


@lru_cache(maxsize=16)
def _inferred(path: Path) -> Proto:
    return onnx.shape_inference.infer_shapes(onnx.load(path))


def base(draw: random.Random) -> Proto:
    """Return a valid model: a small file, a piece of a light model, or a graph of the tables."""
    kind = draw.random()
    if kind < 0.45:
        return onnx.load(draw.choice(base_files()))
    if kind < 0.75:
        return piece(draw, _inferred(draw.choice(light_files())))
    return graph_named(draw.choice(sorted(GRAPHS)))


def piece(draw: random.Random, proto: Proto) -> Proto:
    """Cut a few neighbouring nodes out of a model; what they read from others becomes inputs."""
    count = draw.choice(PIECE_NODES)
    first = draw.randrange(len(proto.graph.node))
    nodes = list(proto.graph.node)[first : first + count]
    known = {value.name: value for value in (*proto.graph.value_info, *proto.graph.input)}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    made = [name for node in nodes for name in node.output if name]
    read = [name for node in nodes for name in node.input if name and name not in made]
    unread = [name for name in made if not any(name in node.input for node in nodes)]
    graph = helper.make_graph(
        nodes,
        "piece",
        [known[name] for name in dict.fromkeys(read) if name not in constants and name in known],
        [known.get(name, onnx.ValueInfoProto(name=name)) for name in unread or made],
        [constants[name] for name in dict.fromkeys(read) if name in constants],
        value_info=[known[name] for name in made if name in known],
    )
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=9)


def mutant(seed: int) -> bytes:
    """Return the model file of a seed; the same seed always gives the same bytes."""
    draw = random.Random(seed)
    while True:
        proto = onnx.ModelProto()
        proto.CopyFrom(base(draw))
        if proto.ByteSize() < MAX_BASE_BYTES:
            break
    for _ in range(draw.choice(MAX_CHANGES)):
        change = draw.choice(CHANGES)
        try:
            change(draw, proto)
        except (IndexError, KeyError, ValueError, TypeError, DecodeError, ValidationError):
            continue  # the change has no place here
    data = proto.SerializeToString(deterministic=True)
    return flipped(draw, data) if draw.random() < 0.03 else data


def flipped(draw: random.Random, data: bytes) -> bytes:
    """Flip a few bits of the file."""
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def graphs(proto: Proto) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and all subgraphs."""
    waiting = [proto.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [inner for inner in (attribute.g, *attribute.graphs) if inner.node]


def _graph(draw: random.Random, proto: Proto) -> onnx.GraphProto:
    return draw.choice(list(graphs(proto)))


def _node(draw: random.Random, proto: Proto) -> onnx.NodeProto:
    return draw.choice(_graph(draw, proto).node)


def _values(graph: onnx.GraphProto) -> list[str]:
    names = [value.name for value in graph.input]
    names += [tensor.name for tensor in graph.initializer]
    return names + [name for node in graph.node for name in node.output if name]


def _some_value(draw: random.Random, proto: Proto) -> str:
    return draw.choice(_values(proto.graph))


# Nodes


def drop_node(draw: random.Random, proto: Proto) -> None:
    graph = _graph(draw, proto)
    del graph.node[draw.randrange(len(graph.node))]


def repeat_node(draw: random.Random, proto: Proto) -> None:
    graph = _graph(draw, proto)
    copy = onnx.NodeProto()
    copy.CopyFrom(draw.choice(graph.node))
    if draw.random() < 0.7:
        for index, name in enumerate(copy.output):
            copy.output[index] = f"{name}_again" if name else ""
        if draw.random() < 0.5:
            copy.name += "_again"
        proto.graph.output.append(onnx.ValueInfoProto(name=copy.output[0]))
    graph.node.append(copy)


def move_node(draw: random.Random, proto: Proto) -> None:
    graph = _graph(draw, proto)
    nodes = list(graph.node)
    node = nodes.pop(draw.randrange(len(nodes)))
    nodes.insert(draw.randrange(len(nodes) + 1), node)
    ordered = onnx.GraphProto(node=nodes)
    del graph.node[:]
    graph.node.extend(ordered.node)


def rewire(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    node.input[draw.randrange(len(node.input))] = _some_value(draw, proto)


def swap_inputs(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    one, two = draw.randrange(len(node.input)), draw.randrange(len(node.input))
    node.input[one], node.input[two] = node.input[two], node.input[one]


def drop_input(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    index = draw.randrange(len(node.input))
    if draw.random() < 0.5:
        node.input[index] = ""
    else:
        del node.input[index]


def add_input(draw: random.Random, proto: Proto) -> None:
    _node(draw, proto).input.append(draw.choice((_some_value(draw, proto), "", "nowhere")))


def change_outputs(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    action = draw.randrange(4)
    if action == 0:
        del node.output[draw.randrange(len(node.output))]
    elif action == 1:
        node.output[draw.randrange(len(node.output))] = ""
    elif action == 2:
        node.output.append(f"{node.output[0]}_more")
    else:
        node.output[draw.randrange(len(node.output))] = _some_value(draw, proto)


def change_op(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    node.op_type = draw.choice(OPS)
    if draw.random() < 0.5:
        del node.attribute[:]


def insert_op(draw: random.Random, proto: Proto) -> None:
    """Put an operator of the table between a value and one of its readers."""
    reader = _node(draw, proto)
    index = draw.randrange(len(reader.input))
    inputs = [reader.input[index]]
    inputs += [_some_value(draw, proto) for _ in range(draw.choice((0, 0, 1, 2)))]
    node = helper.make_node(draw.choice(OPS), inputs, [f"inserted_{draw.randrange(10**6)}"])
    reader.input[index] = node.output[0]
    proto.graph.node.append(node)  # the importer sorts
    move_node(draw, proto)


def change_domain(draw: random.Random, proto: Proto) -> None:
    _node(draw, proto).domain = draw.choice(("ai.onnx", "com.microsoft", "ai.onnx.ml", "own", "é"))


def rename(draw: random.Random, proto: Proto) -> None:
    _node(draw, proto).name = draw.choice(
        ("", "same", "é\u2028", "a" * 5000, _some_value(draw, proto))
    )


# Attributes


def hostile_attribute(draw: random.Random, name: str) -> onnx.AttributeProto:
    kind = draw.randrange(6)
    values = {
        0: lambda: draw.choice(INTEGERS),
        1: lambda: draw.choice(FLOATS),
        2: lambda: draw.choice(TEXTS),
        3: lambda: [draw.choice(INTEGERS) for _ in range(draw.choice((1, 2, 3, 4, 5, 8, 40)))],
        4: lambda: [draw.choice(FLOATS) for _ in range(draw.choice((1, 2, 4)))],
        5: lambda: _tensor(draw, name),
    }
    return helper.make_attribute(name, values[kind]())


def change_attribute(draw: random.Random, proto: Proto) -> None:
    """Set an attribute to a hostile value, mostly of its own type."""
    nodes = [node for graph in graphs(proto) for node in graph.node if node.attribute]
    attribute = draw.choice(draw.choice(nodes).attribute)
    if attribute.type == AttributeProto.INT and draw.random() < 0.8:
        attribute.i = draw.choice(INTEGERS)
    elif attribute.type == AttributeProto.INTS and draw.random() < 0.8:
        action = draw.randrange(3)
        if action == 0:
            attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(INTEGERS)
        elif action == 1:
            del attribute.ints[draw.randrange(len(attribute.ints))]
        else:
            attribute.ints.append(draw.choice(INTEGERS))
    elif attribute.type == AttributeProto.FLOAT and draw.random() < 0.8:
        attribute.f = draw.choice(FLOATS)
    elif attribute.type == AttributeProto.STRING and draw.random() < 0.8:
        attribute.s = draw.choice((*(text.encode() for text in TEXTS), b"\xff\xfe"))
    else:
        attribute.CopyFrom(hostile_attribute(draw, attribute.name))


def drop_attribute(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    del node.attribute[draw.randrange(len(node.attribute))]


def known_attribute(draw: random.Random, proto: Proto) -> None:
    """Add an attribute that the operator knows, with a hostile value."""
    node = _node(draw, proto)
    if not onnx.defs.has(node.op_type):
        return
    known = onnx.defs.get_schema(node.op_type).attributes
    name = draw.choice(sorted(known))
    present = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(present)
    kind = known[name].type.value
    values = {
        AttributeProto.INT: lambda: draw.choice(INTEGERS),
        AttributeProto.FLOAT: lambda: draw.choice(FLOATS),
        AttributeProto.STRING: lambda: draw.choice(TEXTS),
        AttributeProto.INTS: lambda: [draw.choice(INTEGERS) for _ in range(draw.randrange(1, 6))],
        AttributeProto.FLOATS: lambda: [draw.choice(FLOATS) for _ in range(draw.randrange(1, 4))],
    }
    made = helper.make_attribute(name, values[kind]()) if kind in values else None
    node.attribute.append(made or hostile_attribute(draw, name))


def foreign_attribute(draw: random.Random, proto: Proto) -> None:
    node, other = _node(draw, proto), _node(draw, proto)
    node.attribute.append(draw.choice(other.attribute))


def repeat_attribute(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    node.attribute.append(draw.choice(node.attribute))


def attribute_type(draw: random.Random, proto: Proto) -> None:
    node = _node(draw, proto)
    draw.choice(node.attribute).type = draw.choice(sorted(AttributeProto.AttributeType.values()))


def reference_attribute(draw: random.Random, proto: Proto) -> None:
    draw.choice(_node(draw, proto).attribute).ref_attr_name = "alpha"


# Shapes and types


def _infos(proto: Proto) -> list[onnx.ValueInfoProto]:
    return [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]


def change_shape(draw: random.Random, proto: Proto) -> None:
    info = draw.choice(_infos(proto))
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
    draw.choice(_infos(proto)).type.tensor_type.elem_type = draw.choice((*DTYPES, *PLAIN_DTYPES))


def all_dtypes(draw: random.Random, proto: Proto) -> None:
    """Give the whole model another type, as a converter would."""
    dtype = draw.choice((TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16, 6, 7))
    for info in _infos(proto):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = dtype
    for index, tensor in enumerate(proto.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT and dtype != TensorProto.BFLOAT16:
            array = numpy_helper.to_array(tensor)
            converted = array.astype(helper.tensor_dtype_to_np_dtype(dtype))
            proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(converted, tensor.name))


def change_type(draw: random.Random, proto: Proto) -> None:
    info = draw.choice(_infos(proto))
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
    info = helper.make_tensor_value_info(_some_value(draw, proto), dtype, shape)
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


# Constants


def _tensor(draw: random.Random, name: str) -> onnx.TensorProto:
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
    tensor.CopyFrom(_tensor(draw, tensor.name))


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
        tensor.name = draw.choice(("", _some_value(draw, proto)))


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
    tensor = _tensor(draw, draw.choice(proto.graph.input).name)
    proto.graph.initializer.append(tensor)


def add_constant(draw: random.Random, proto: Proto) -> None:
    """Let a node read a new small constant: an axis, a size, a scale, a limit."""
    node, name = _node(draw, proto), f"added_{draw.randrange(10**6)}"
    proto.graph.initializer.append(_tensor(draw, name))
    if node.input and draw.random() < 0.5:
        node.input[draw.randrange(len(node.input))] = name
    else:
        node.input.append(name)


# Borders and subgraphs


def change_output(draw: random.Random, proto: Proto) -> None:
    outputs = proto.graph.output
    action = draw.randrange(4)
    if action == 0:
        del outputs[draw.randrange(len(outputs))]
    elif action == 1:
        outputs.append(onnx.ValueInfoProto(name=_some_value(draw, proto)))
    elif action == 2:
        draw.choice(outputs).name = draw.choice((_some_value(draw, proto), "nowhere", ""))
    else:
        name = _some_value(draw, proto)
        outputs.append(helper.make_tensor_value_info(name, draw.choice(PLAIN_DTYPES), None))


def change_input(draw: random.Random, proto: Proto) -> None:
    inputs = proto.graph.input
    action = draw.randrange(3)
    if action == 0:
        del inputs[draw.randrange(len(inputs))]
    elif action == 1:
        draw.choice(inputs).name = draw.choice((_some_value(draw, proto), "nowhere", "", "é\u2028"))
    else:
        inputs.append(helper.make_tensor_value_info(_some_value(draw, proto), 1, [1]))


def wrap(draw: random.Random, proto: Proto) -> None:
    """Put a node into a branch of `If`, or the body of `Loop` or `Scan`."""
    index = draw.randrange(len(proto.graph.node))
    node = onnx.NodeProto()
    node.CopyFrom(proto.graph.node[index])
    outer, inner = list(node.output), [f"{name}_inner" for name in node.output]
    node.output[:] = inner
    body = helper.make_graph(
        [node], f"body_{index}", [], [onnx.ValueInfoProto(name=name) for name in inner]
    )
    kind = draw.choice(("If", "If", "If", "Loop", "Scan"))
    if kind == "If":
        other = onnx.GraphProto()
        other.CopyFrom(body)
        if draw.random() < 0.3:
            del other.output[draw.randrange(len(other.output)) :]
        condition = f"condition_{index}"
        constant = draw.choice((np.array(True), np.array([True]), np.array(1), np.array([])))
        proto.graph.initializer.append(numpy_helper.from_array(constant, condition))
        wrapped = helper.make_node(
            "If", [condition], outer, name=node.name, then_branch=body, else_branch=other
        )
    else:
        wrapped = helper.make_node(
            kind, [_some_value(draw, proto) for _ in range(2)], outer, name=node.name, body=body
        )
        if kind == "Scan":
            wrapped.attribute.append(
                helper.make_attribute("num_scan_inputs", draw.choice(INTEGERS))
            )
    proto.graph.node[index].CopyFrom(wrapped)


def grow(draw: random.Random, proto: Proto) -> None:
    """Let a tensor double many times, or be made as large as a constant says."""
    source = _some_value(draw, proto)
    last, rounds = source, draw.choice((1, 3, 20, 33))
    for turn in range(rounds):
        node = helper.make_node("Concat", [last, last], [f"grown_{turn}"], axis=0)
        proto.graph.node.append(node)
        last = node.output[0]
    if draw.random() < 0.6:
        sizes = [
            draw.choice((1, 3, 1000, 2**20, 2**31, 2**40)) for _ in range(draw.randrange(1, 5))
        ]
        proto.graph.initializer.append(numpy_helper.from_array(np.array(sizes), "grown_sizes"))
        op = draw.choice(GROWING)
        inputs = ["grown_sizes"] if op == "ConstantOfShape" else [last, "grown_sizes"]
        proto.graph.node.append(helper.make_node(op, inputs, ["grown"]))
        last = "grown"
    proto.graph.output.append(onnx.ValueInfoProto(name=last))


def quantize_value(draw: random.Random, proto: Proto) -> None:
    """Put Q/DQ in front of an input of a node, with scales of all kinds."""
    node = _node(draw, proto)
    index, mark = draw.randrange(len(node.input)), draw.randrange(10**6)
    scale = draw.choice((0.02, 0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e38))
    shape = draw.choice(((), (1,), (3,), (16,), (1, 1)))
    scales = numpy_helper.from_array(np.full(shape, scale, np.float32), f"scale_{mark}")
    zero = np.full(shape, draw.choice((0, 0, 0, 3)), draw.choice((np.int8, np.uint8, np.int32)))
    proto.graph.initializer.extend([scales, numpy_helper.from_array(zero, f"zero_{mark}")])
    ends = [f"scale_{mark}", f"zero_{mark}"][: draw.choice((1, 2, 2))]
    value = node.input[index]
    quantized, read = f"quantized_{mark}", f"read_{mark}"
    axis = {} if draw.random() < 0.7 else {"axis": draw.choice((0, 1, -1, 7))}
    pair = [
        helper.make_node("QuantizeLinear", [value, *ends], [quantized], **axis),
        helper.make_node("DequantizeLinear", [quantized, *ends], [read], **axis),
    ]
    node.input[index] = read
    proto.graph.node.extend(pair)


def as_function(draw: random.Random, proto: Proto) -> None:
    """Make a local function of a node, now and then one that calls itself or lacks inputs."""
    node = draw.choice(proto.graph.node)
    body = onnx.NodeProto()
    body.CopyFrom(node)
    if draw.random() < 0.2:
        body.domain, body.op_type = "own", "Called"
    inputs = [name for name in dict.fromkeys(node.input) if name]
    if draw.random() < 0.2:
        inputs = inputs[:-1]
    proto.functions.append(
        helper.make_function(
            "own", "Called", inputs, list(node.output), [body], list(proto.opset_import)
        )
    )
    proto.opset_import.append(helper.make_opsetid("own", 1))
    node.domain, node.op_type = "own", "Called"
    node.input[:] = inputs


CHANGES: tuple[Change, ...] = (
    *(drop_node, repeat_node, move_node, rewire, rewire, swap_inputs, drop_input, add_input),
    *(change_outputs, change_op, change_op, insert_op, insert_op, change_domain, rename),
    *(change_attribute, change_attribute, change_attribute, drop_attribute, known_attribute),
    *(known_attribute, foreign_attribute, repeat_attribute, attribute_type, reference_attribute),
    *(change_shape, change_shape, change_dtype, all_dtypes, change_type, drop_info, false_info),
    *(change_versions, change_versions, change_constant, change_constant, replace_constant),
    *(false_constant, reshape_constant, retype_constant, drop_constant, input_as_constant),
    *(add_constant, change_output, change_input, wrap, grow, quantize_value, as_function),
)
