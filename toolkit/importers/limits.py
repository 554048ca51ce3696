"""How large a model may be: judged from what its file says, before anything of that size is made.

nodes   of the graph with every call of a function in its place: 24 functions that call the next
        one twice are 1 KB and 2^24 nodes
copies  of what functions hold, one for each call: a node of 10,000 operands takes megabytes
bytes   of the file, and of the weights beside it
"""

import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx_ir as ir

from toolkit.errors import ImportModelError, printable
from toolkit.graph.max_memory import max_memory_bytes, size_text

MAX_NODES = 50_000  # several times those of the largest networks that boards run
MAX_COUNTED = 10**15  # of what functions multiply; their calls can make numbers of any length
MAX_RANK = 32  # NumPy 1 has no more
MAX_NAME = 4096  # characters; messages and tables repeat names
MAX_ELEMENTS = 1 << 59  # NumPy counts the bytes of an array, of up to 16 an element, in 63 bits
MAX_COPIED_BYTES = 32 << 20
OPERAND_BYTES = 32  # of an operand, beside its name
TENSOR_SHARE = 32  # a byte of so many: copies of a node share its tensors, but each is looked at

# Types whose elements have a number of bits.
KNOWN_DTYPES = frozenset(
    dtype.value for dtype in ir.DataType if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
)

Key = tuple[str, str, str]
"""A function: domain, name, overload."""


def check_node_count(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse a model that has more than MAX_NODES nodes once its functions are inlined.

    Raises ImportModelError: it has, its functions call themselves, or copies take too much.
    """
    functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
    calls = {key: tuple(all_nodes(function.node)) for key, function in functions.items()}
    sizes: dict[Key, int] = {}
    copied: dict[Key, int] = {}
    try:
        order = TopologicalSorter(
            {key: {_key(node) for node in nodes} & functions.keys() for key, nodes in calls.items()}
        ).static_order()
        for key in order:
            sizes[key] = _size(calls[key], sizes)
            copied[key] = _copied(calls[key], copied) + sum(map(_weight, calls[key]))
    except CycleError as err:
        names = " -> ".join(printable("::".join(filter(None, key))) for key in err.args[1])
        raise ImportModelError(
            f"{path.name}: its functions call themselves ({names}); export the model again."
        ) from err
    count = _size(all_nodes(proto.graph.node), sizes)
    if count > MAX_NODES:
        more = " or more" if count == MAX_COUNTED else ""
        raise ImportModelError(
            f"{path.name} has {count:,}{more} nodes once its {len(functions)} functions are in "
            f"their places, more than {MAX_NODES:,}; export it again, or in parts."
        )
    copies = _copied(all_nodes(proto.graph.node), copied)
    if copies > MAX_COPIED_BYTES:
        raise ImportModelError(
            f"{path.name}: its {len(functions)} functions take {size_text(copies)} in the places "
            f"of their calls, more than {size_text(MAX_COPIED_BYTES)}; "
            "export it again, or in parts."
        )


def _size(nodes: Iterable[onnx.NodeProto], sizes: Mapping[Key, int]) -> int:
    """Return how many nodes there are with calls in their places; a call counts itself, too."""
    return min(MAX_COUNTED, sum(1 + sizes.get(_key(node), 0) for node in nodes))


def _copied(nodes: Iterable[onnx.NodeProto], copied: Mapping[Key, int]) -> int:
    """Return what the functions that the nodes call weigh."""
    return min(MAX_COUNTED, sum(copied.get(_key(node), 0) for node in nodes))


def _weight(node: onnx.NodeProto) -> int:
    """Return about how many bytes a copy of a node takes, without the nodes of its branches."""
    node_bytes = node.ByteSize() + OPERAND_BYTES * (len(node.input) + len(node.output))
    for attribute in node.attribute:
        node_bytes -= attribute.g.ByteSize() + sum(graph.ByteSize() for graph in attribute.graphs)
        tensors = attribute.t.ByteSize() + sum(tensor.ByteSize() for tensor in attribute.tensors)
        node_bytes -= tensors - tensors // TENSOR_SHARE
    return node_bytes


def _key(node: onnx.NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their branches and bodies."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from all_nodes(graph.node)


def read_model_bytes(path: Path) -> bytes:
    """Return the bytes of an ONNX file.

    Raises ImportModelError: it is missing, no plain file (which may never end), or larger than an
    ONNX file or `--max-memory` can be.
    """
    limit = min(onnx.checker.MAXIMUM_PROTOBUF, max_memory_bytes())
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImportModelError(f"Cannot read the model {path}: it is no file; check the path.")
        if status.st_size > limit:
            raise ImportModelError(
                f"{path} has {size_text(status.st_size)}, and an ONNX file at most "
                f"{size_text(limit)} here: keep its weights in files beside it, or raise the limit "
                "with `tandem build --max-memory`."
            )
        with path.open("rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the path
        why = getattr(err, "strerror", None) or err
        raise ImportModelError(f"Cannot read the model {path}: {why}; check the path.") from err


def check_array_sizes(
    proto: onnx.ModelProto, constants: Iterable[onnx.TensorProto], path: Path
) -> None:
    """Refuse constants and tensors whose axes or sizes no array can have, even one of no elements.

    Raises ImportModelError.
    """
    for tensor in constants:
        _check_sizes(f"the constant {printable(tensor.name)!r}", tensor.dims, path)
    inner = (
        graph
        for nodes in (proto.graph.node, *(function.node for function in proto.functions))
        for node in all_nodes(nodes)
        for attribute in node.attribute
        for graph in (attribute.g, *attribute.graphs)
    )
    for graph in (proto.graph, *inner):
        for value in (*graph.input, *graph.output, *graph.value_info):
            dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            _check_sizes(f"the tensor {printable(value.name)!r}", dims, path)


def _check_sizes(what: str, dims: Sequence[int], path: Path) -> None:
    if len(dims) > MAX_RANK:
        raise ImportModelError(
            f"{path.name}: {what} has {len(dims)} axes, more than {MAX_RANK}; "
            "export the model again."
        )
    if math.prod(max(1, size) for size in dims) > MAX_ELEMENTS:
        raise ImportModelError(
            f"{path.name}: {what} has the sizes {list(dims)}, which no array can have; "
            "export the model again."
        )


def check_external_sizes(tensors: Iterable[onnx.TensorProto], path: Path) -> None:
    """Refuse weights beside the model that are not as long as their type and sizes say, or are too
    large together; a length that is not stated becomes that of the tensor.

    While a tensor is read it is there twice. Raises ImportModelError.
    """
    total = largest = 0
    for tensor in tensors:
        total += (needed := _stated_bytes(tensor, path))
        largest = max(largest, needed)
        if total + largest > max_memory_bytes():
            raise ImportModelError(
                f"{path.name} keeps {size_text(total)} of weights or more in files beside it; "
                f"reading them takes {size_text(total + largest)}, above the limit of "
                f"{size_text(max_memory_bytes())}; raise it with `tandem build --max-memory`."
            )
        lengths = [entry for entry in tensor.external_data if entry.key == "length"]
        if not lengths:
            tensor.external_data.add(key="length", value=str(needed))
        elif any(entry.value != str(needed) for entry in lengths):
            raise ImportModelError(
                f"{path.name}: the constant {printable(tensor.name)!r} has "
                f"{printable(lengths[0].value)} bytes in the file beside the model, but its type "
                f"and its sizes {list(tensor.dims)} take {needed}; export the model again."
            )


def _stated_bytes(tensor: onnx.TensorProto, path: Path) -> int:
    """Return the bytes of a tensor by its type and sizes."""
    if tensor.data_type not in KNOWN_DTYPES or any(size < 0 for size in tensor.dims):
        raise ImportModelError(
            f"{path.name}: the constant {printable(tensor.name)!r} in a file beside the model has "
            "no type of numbers, or negative sizes; export the model again."
        )
    return tensor_bytes(tensor)


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes that a tensor of KNOWN_DTYPES takes by its type and sizes."""
    return -(-math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth // 8)
