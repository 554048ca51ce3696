"""The child of `toolkit.graph.native`: runs ONNX's C++ code, until its standard input ends.

    request   8 bytes length, 8 bytes length; JSON with the step and its options; a ModelProto
    answer    8 bytes length, 8 bytes length; "ok" or the name of an error; the result or message

Lengths are little endian. The first argument is the memory that the process may take, in bytes. A
request says how long it may occupy the processor, `cpu_seconds`: SIGPROF then ends the process, in
the middle of C++ code, too.
"""

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx.version_converter
from onnx import TensorProto, TypeProto, defs, helper, numpy_helper

from toolkit.graph.max_memory import address_space_bytes

# Elements of integer tensors whose values inference carries along: shapes, axes and indices have a
# few. A chain of 33 Concats of a tensor with itself would carry 2^33.
MAX_CARRIED = 1 << 20
MAX_INTEGERS = 1 << 24  # of one Concat: inference makes a dimension of each that Reshape reads
READY = b"+"  # said once, after start
# What a call takes at least. With less the dynamic loader itself may fail to bind a function, which
# ends the process with status 127 in the middle of a call.
MIN_ROOM_BYTES = 32 << 20
MAX_RANK = 64
INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64})
# Operators whose result may hold the elements of an operand: what shapes are computed with.
CARRIERS = frozenset(
    {"Abs", "Add", "Cast", "Concat", "Div", "Flatten", "Gather", "Identity", "Max", "Min", "Mod"}
    | {"Mul", "Neg", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze"}
    | {"Where"}
)
MAX_READ_ELEMENTS = 1024  # of constants that the check of a node reads: shapes, axes, scales
# CARRIERS whose values come from their first operand; the others are sizes, axes and indices.
FIRST_CARRIES = frozenset({"Reshape", "Slice", "Split", "Squeeze", "Unsqueeze"})
# Inputs that hold one number, by operator and position; inference does not look at all of them.
ONE_NUMBER: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "CumSum": (1,),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (2,),
    "Range": (0, 1, 2),
    "TopK": (1,),
    "Trilu": (1,),
}
# Inputs that hold a number for each axis; inference counts their elements alone.
ONE_AXIS: Mapping[str, tuple[int, ...]] = {"Resize": (2, 3), "Upsample": (1,)}
SKIPPED = frozenset({"Constant", "If", "Loop", "Scan", "SequenceMap"})


class TooLongError(Exception):
    """A node makes more integers than inference can carry; the message goes to the user."""


def infer(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Infer shapes; values are carried along only where they stay few."""
    check_integers(proto.graph)
    propagated = bool(options["data_prop"]) and carried_elements(proto.graph) <= MAX_CARRIED
    return onnx.shape_inference.infer_shapes(
        proto, check_type=False, strict_mode=bool(options["strict"]), data_prop=propagated
    ).SerializeToString()


def convert(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Convert to another opset."""
    converted = onnx.version_converter.convert_version(proto, int(options["opset"]))
    return bytes(converted.SerializeToString())


def valid(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Run the checker; it raises what is wrong."""
    onnx.checker.check_model(proto, full_check=False)
    return b""


def check(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Return (node, operator, reason) of the nodes that contradict their operators, as JSON."""
    return json.dumps(list(_bad_nodes(proto))).encode()


def check_integers(graph: onnx.GraphProto) -> None:
    """Raise TooLongError where a Concat makes more than MAX_INTEGERS: Reshape may read them."""
    for node, count in _concat_sizes(graph, INTEGERS):
        if count > MAX_INTEGERS:
            raise TooLongError(
                f"node {node.name!r} (Concat) makes {count} integers, the limit is "
                f"{MAX_INTEGERS}: the model is damaged, export it again"
            )


def carried_elements(graph: onnx.GraphProto) -> int:
    """Return how many values inference would at most carry along from node to node."""
    return sum(count for _, count in _concat_sizes(graph, None))


def _concat_sizes(
    graph: onnx.GraphProto, dtypes: frozenset[int] | None
) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield each Concat with how many elements of `dtypes` and of rank 1 it makes at most.

    It has the sum of its inputs, a Shape has at most a rank; other CARRIERS have no more than one
    input, and the rest makes values of its own.
    """
    counts: dict[str, int] = {}
    for tensor in graph.initializer:
        counts[tensor.name] = _count(tensor.data_type, tensor.dims, dtypes)
    for value in graph.input:
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        counts.setdefault(value.name, _count(kind.elem_type, dims, dtypes))
    for node in graph.node:
        parts = [counts.get(name, 0) for name in node.input if node.op_type in CARRIERS]
        if node.op_type == "Constant" and node.attribute:
            tensor = node.attribute[0].t
            parts = [_count(tensor.data_type, tensor.dims, dtypes)]
        elif node.op_type == "Shape":
            parts = [MAX_RANK]
        elif node.op_type == "ConstantOfShape":  # one value, however often
            parts = []
        elif node.op_type in FIRST_CARRIES:
            parts = parts[:1]
        count = sum(parts) if node.op_type == "Concat" else max(parts, default=0)
        counts.update(dict.fromkeys(node.output, count))
        if node.op_type == "Concat":
            yield node, count


def _count(dtype: int, dims: Sequence[int], dtypes: frozenset[int] | None) -> int:
    if len(dims) > 1 or (dtypes is not None and dtype not in dtypes):
        return 0
    return math.prod(max(1, dim) for dim in dims)


def _elements(tensor: onnx.TensorProto) -> int:
    return math.prod(max(0, dim) for dim in tensor.dims)


def _bad_nodes(proto: onnx.ModelProto) -> Iterator[tuple[str, str, str]]:
    graph = proto.graph
    types: dict[str, TypeProto] = {
        tensor.name: helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        for tensor in graph.initializer
    }
    types |= {
        value.name: value.type
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.WhichOneof("value")
    }
    data = {t.name: t for t in graph.initializer if _elements(t) <= MAX_READ_ELEMENTS}
    opsets = {opset.domain or "": opset.version for opset in proto.opset_import}
    for node in graph.node:
        if (node.op_type, node.domain) == ("Constant", "") and (reason := _bad_constant(node)):
            yield node.name, node.op_type, reason
        known = all(name in types for name in node.input if name)
        if node.domain not in ("", "ai.onnx") or node.op_type in SKIPPED or not known:
            continue
        reason = _contradiction(node, types, data, proto, opsets.get("", 1))
        if reason:
            yield node.name, node.op_type, reason


def _bad_constant(node: onnx.NodeProto) -> str:
    if not node.attribute:
        return "it has no value"
    if len(node.attribute) > 1:
        return f"it has {len(node.attribute)} values"
    if node.attribute[0].ref_attr_name:
        return "its value is that of a function, and it is in none"
    return ""


def _contradiction(
    node: onnx.NodeProto,
    types: Mapping[str, TypeProto],
    data: Mapping[str, onnx.TensorProto],
    proto: onnx.ModelProto,
    opset: int,
) -> str:
    """Return what is wrong with a node, "" where nothing is."""
    read = {name: types[name] for name in node.input if name}
    constants = {name: data[name] for name in read if name in data}
    try:
        schema = defs.get_schema(node.op_type, opset, "")
        checks = (_bad_attribute(node, schema), _bad_number(node, types))
        if reason := next(filter(None, checks), _bad_convolution(node, types)):
            return reason
        inferred = onnx.shape_inference.infer_node_outputs(
            schema, node, read, constants, opset_imports=list(proto.opset_import)
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as err:
        return str(err)
    except (defs.SchemaError, KeyError, RuntimeError, TypeError, ValueError):
        return ""  # not known to this onnx, or nothing that it can say of a node alone
    moved = _bad_view(node, types, inferred)
    return moved or _bad_result(inferred, types, {value.name for value in proto.graph.output})


def _bad_attribute(node: onnx.NodeProto, schema: defs.OpSchema) -> str:
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            return f"its attribute {attribute.name!r} is one of a function, and it is in none"
        if (node.op_type, attribute.name, attribute.i) == ("Cast", "to", TensorProto.UNDEFINED):
            return "it casts to no type"
        known = schema.attributes.get(attribute.name)
        if known is not None and _type_number(str(known.type)) != attribute.type:
            return f"its attribute {attribute.name!r} has the wrong type"
    return ""


def _type_number(name: str) -> int:
    """Return the number of an attribute's type such as AttrType.INT."""
    return int(onnx.AttributeProto.AttributeType.Value(name.rpartition(".")[2]))


def _bad_number(node: onnx.NodeProto, types: Mapping[str, TypeProto]) -> str:
    """Return which input has not one element, or not one axis, as it must; "" where all have."""
    for at in ONE_NUMBER.get(node.op_type, ()):
        name = node.input[at] if at < len(node.input) else ""
        if not name or not _is_known(types[name]):
            continue
        count = math.prod(dim.dim_value for dim in types[name].tensor_type.shape.dim)
        if count != 1:
            return f"its input {name!r} has {count} elements instead of one"
    for at in ONE_AXIS.get(node.op_type, ()):
        name = node.input[at] if at < len(node.input) else ""
        if name and _is_known(types[name]) and len(types[name].tensor_type.shape.dim) != 1:
            dims = [dim.dim_value for dim in types[name].tensor_type.shape.dim]
            return f"its input {name!r} has the sizes {dims} instead of one axis"
    fill = next((item.t for item in node.attribute if item.name == "value"), None)
    if node.op_type == "ConstantOfShape" and fill is not None and _elements(fill) != 1:
        return f"its value has {_elements(fill)} elements instead of one"
    return ""


def _bad_convolution(node: onnx.NodeProto, types: Mapping[str, TypeProto]) -> str:
    """Return what is wrong with ranks and groups of a convolution; inference misses both."""
    if node.op_type not in ("Conv", "ConvTranspose") or len(node.input) < 2:
        return ""
    kinds = [types[name].tensor_type for name in node.input[:2] if name in types]
    shapes = [[dim.dim_value for dim in kind.shape.dim] for kind in kinds if kind.HasField("shape")]
    groups = next((item.i for item in node.attribute if item.name == "group"), 1)
    if any(len(shape) < 3 for shape in shapes) or len({len(shape) for shape in shapes}) > 1:
        return f"its input and weights are {' and '.join(map(str, shapes))}"
    if groups < 1:
        return f"it has {groups} groups"
    if len(shapes) < 2 or not (shapes[0][1] and shapes[1][0] and shapes[1][1]):
        return ""  # a size is not known
    (_, channels, *_), (first, second, *_) = shapes
    expected = second * groups if node.op_type == "Conv" else first
    if first % groups or channels != expected:
        return f"{groups} groups and weights {shapes[1]} do not fit {channels} channels"
    return ""


def _bad_view(
    node: onnx.NodeProto, types: Mapping[str, TypeProto], inferred: Mapping[str, TypeProto]
) -> str:
    """Return what is wrong with a Reshape or Transpose; inference does not count."""
    source = types.get(node.input[0]) if node.op_type in ("Reshape", "Transpose") else None
    if source is None or not _is_known(source):
        return ""
    dims = [dim.dim_value for dim in source.tensor_type.shape.dim]
    result = inferred.get(node.output[0])
    if node.op_type == "Transpose":
        order = next((list(item.ints) for item in node.attribute if item.name == "perm"), None)
        if order is not None and sorted(order) != list(range(len(dims))):
            return f"its order {order} is none of the {len(dims)} axes of {dims}"
    elif result is not None and _is_known(result):
        shape = [dim.dim_value for dim in result.tensor_type.shape.dim]
        if math.prod(shape) != math.prod(dims):
            return f"it makes {math.prod(shape)} elements, {shape}, of {math.prod(dims)}, {dims}"
    return ""


def _bad_result(
    inferred: Mapping[str, TypeProto], noted: Mapping[str, TypeProto], outputs: Set[str]
) -> str:
    """Return which result is not what the graph says.

    Exporters misjudge the shapes of outputs, which is left to them where inference knows no better.
    """
    for name, kind in inferred.items():
        judged = name in noted and (name not in outputs or _is_known(kind))
        if judged and not _agree(noted[name], kind):
            return f"it makes {_text(kind)}, but {name!r} is noted as {_text(noted[name])}"
    return ""


def _is_known(kind: TypeProto) -> bool:
    tensor = kind.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _agree(noted: TypeProto, inferred: TypeProto) -> bool:
    """Whether two types can be those of one tensor; what one does not know, the other may."""
    if noted.WhichOneof("value") != "tensor_type" or inferred.WhichOneof("value") != "tensor_type":
        return True
    one, two = noted.tensor_type, inferred.tensor_type
    if one.elem_type and two.elem_type and one.elem_type != two.elem_type:
        return False
    if not one.HasField("shape") or not two.HasField("shape"):
        return True
    pairs = list(zip(one.shape.dim, two.shape.dim, strict=False))
    known = [(a.dim_value, b.dim_value) for a, b in pairs
             if a.HasField("dim_value") and b.HasField("dim_value")]  # fmt: skip
    return len(one.shape.dim) == len(two.shape.dim) and all(a == b for a, b in known)


def _text(kind: TypeProto) -> str:
    tensor = kind.tensor_type
    dims = [str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?"
            for dim in tensor.shape.dim]  # fmt: skip
    shape = f"[{','.join(dims)}]" if tensor.HasField("shape") else ""
    names = {number: name for name, number in TensorProto.DataType.items()}
    return f"{names.get(tensor.elem_type, str(tensor.elem_type)).lower()}{shape}"


def evaluate(proto: onnx.ModelProto, options: Mapping[str, Any]) -> bytes:
    """Run a graph of constants; return its results as the initializers of a GraphProto.

    Results that are no arrays are left out. Raises RuntimeError: they have more than `max_bytes`.
    """
    # Few models need it, and it takes long to import.
    from onnx.reference import ReferenceEvaluator

    names = [value.name for value in proto.graph.output]
    results = ReferenceEvaluator(proto).run(None, {})
    total = sum(result.nbytes for result in results if isinstance(result, np.ndarray))
    if total > options["max_bytes"]:
        raise RuntimeError(f"{total} bytes, at most {options['max_bytes']} are taken")
    tensors = [
        numpy_helper.from_array(result, name)
        for name, result in zip(names, results, strict=True)
        if isinstance(result, np.ndarray)
    ]
    return bytes(helper.make_graph([], "results", [], [], tensors).SerializeToString())


STEPS = {
    "infer": infer,
    "convert": convert,
    "check": check,
    "valid": valid,
    "evaluate": evaluate,
}


def answer_to(options: Mapping[str, Any], data: bytes) -> tuple[str, bytes]:
    """Run a step; second, its result, or the message of what it raised."""
    try:
        return "ok", STEPS[options["step"]](onnx.ModelProto.FromString(data), options)
    except MemoryError:
        return "MemoryError", b""
    except Exception as err:  # noqa: BLE001  (all of it goes to the parent by name)
        kind = ValueError if isinstance(err, UnicodeDecodeError) else type(err)  # a name in C++
        name = "MemoryError" if "bad_alloc" in str(err) else kind.__name__
        return name, str(err).encode(errors="replace")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until their stream ends."""
    while head := requests.read(16):
        sizes = [int.from_bytes(head[at : at + 8], "little") for at in (0, 8)]
        request, data = (requests.read(size) for size in sizes)
        options = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, options["cpu_seconds"])
        status, answer = answer_to(options, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        parts = (status.encode(), answer)
        answers.write(b"".join(len(part).to_bytes(8, "little") for part in parts))
        answers.write(b"".join(parts))
        answers.flush()


def main() -> None:
    """Serve the parent on standard input and output; what libraries print goes elsewhere.

    Ends without READY where the limit leaves no room for a call.
    """
    limit_bytes = int(sys.argv[1])
    if address_space_bytes() + MIN_ROOM_BYTES > limit_bytes:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > limit_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(READY)
    answers.flush()
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
