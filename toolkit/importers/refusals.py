"""What an ONNX file may not hold: damaged constants, nodes that are not valid, what no engine has.

Each refusal names the file, the node or tensor, and what to do.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from toolkit.errors import LONGEST_NAME, ImportModelError, first_line, printable
from toolkit.graph import native
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.importers.limits import KNOWN_DTYPES, MAX_NAME, all_nodes, tensor_bytes
from toolkit.importers.weights import TYPED_FIELDS, without_weights

MAX_PACKED = 4  # elements in one number of a field: those of 2 bits
_TENSORRT = "trt"
_BLOCK_QUANTIZERS = {"TRT_FP4DynamicQuantize": "NVFP4", "TRT_MXFP8DynamicQuantize": "MXFP8"}
_FOREIGN = "foreign"  # the domain of operators that ONNX does not have, for its checker
# Domains whose operators onnxruntime's CPU provider knows.
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the constants of a model: initializers, and those in attributes of nodes."""
    yield from _tensors_of(proto.graph)
    for function in proto.functions:
        yield from _tensors_of(function)


def _tensors_of(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    if isinstance(body, onnx.GraphProto):
        yield from body.initializer
    for node in body.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors_of(inner)


def refuse_broken_names(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse names of nodes, operators and tensors that are not UTF-8, or of pages.

    protobuf gives bytes of the former.
    """
    functions = ((f.name, f.domain, f.overload) for f in proto.functions)
    nodes = (
        (node.name, node.op_type, node.domain, *node.input, *node.output)
        for nodes in (proto.graph.node, *(f.node for f in proto.functions))
        for node in all_nodes(nodes)
    )
    constants = ((tensor.name,) for tensor in tensors_of(proto))
    name: object  # protobuf's types say str
    for name in itertools.chain.from_iterable(itertools.chain(functions, nodes, constants)):
        if not isinstance(name, str):
            raise ImportModelError(
                f"{path.name} has the name {str(name)[:LONGEST_NAME]}, which is not UTF-8 text; "
                "export the model again."
            )
        if len(name) > MAX_NAME:
            raise ImportModelError(
                f"{path.name} has the name {printable(name)!r} of {len(name)} characters, more "
                f"than {MAX_NAME}; export the model again."
            )


def refuse_references(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse attributes that stand for those of a function, at nodes that are in none."""
    for node in all_nodes(proto.graph.node):
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise ImportModelError(
                    f"{path.name}: the attribute {printable(attribute.name)!r} of node "
                    f"{printable(node.name)!r} ({printable(node.op_type)}) is one of a function, "
                    "and it is in none; export the model again."
                )


def refuse_block_activations(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse activations in formats that TensorRT alone computes, even where functions say how."""
    for node in all_nodes(proto.graph.node):
        name = _BLOCK_QUANTIZERS.get(node.op_type)
        if node.domain == _TENSORRT and name is not None:
            raise ImportModelError(
                f"{path.name}: node {printable(node.name)!r} ({node.op_type}) rounds an activation "
                f"to {name}, for which there are no kernels; give TensorRT this file, and Tandem "
                "the plain model or one with such weights alone (ModelOpt: W4A16)."
            )


def check_tensors(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse constants whose bytes are not as many as their type and sizes say."""
    for tensor in tensors_of(proto):
        if tensor.data_type in KNOWN_DTYPES and not _has_its_data(tensor):
            raise ImportModelError(
                f"{path.name}: the constant {printable(tensor.name)!r} has not as many elements as "
                f"its type and its sizes {list(tensor.dims)} say; export the model again."
            )


def _has_its_data(tensor: onnx.TensorProto) -> bool:
    """Whether a constant has the elements of its sizes, in its bytes or in a field of its type."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data) == tensor_bytes(tensor)
    count = sum(len(getattr(tensor, name)) for name in TYPED_FIELDS)
    if math.prod(tensor.dims) > MAX_PACKED * count:  # onnx-ir would make zeros of all that lack
        return False
    try:
        return ir.from_proto(tensor).numpy().size == math.prod(tensor.dims)
    except (AssertionError, TypeError, ValueError):  # onnx-ir asserts the field of the type
        return False


def check_valid(proto: onnx.ModelProto, path: Path, *, foreign: bool = False) -> None:
    """Refuse what is not valid, but not a missing shape: that is inferred, or asked for by name.

    `foreign`: operators that ONNX does not have are taken.
    """
    try:
        light = without_weights(proto)
        for value in (*light.graph.input, *light.graph.output):
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                value.type.tensor_type.shape.SetInParent()
        if foreign:
            _set_apart(light)
        native.check_model(light)
    except (onnx.checker.ValidationError, ValueError) as err:  # ValueError: not to be written
        raise ImportModelError(
            f"{path.name} is not valid ONNX: {first_line(err).rstrip('.')}; {_remedy(proto)}."
        ) from err


def _set_apart(proto: onnx.ModelProto) -> None:
    """Give operators that ONNX does not have a domain of their own, which the checker passes."""
    apart = [node for node in all_nodes(proto.graph.node) if _is_foreign(node)]
    for node in apart:
        node.domain = _FOREIGN
    if apart:
        proto.opset_import.append(onnx.helper.make_opsetid(_FOREIGN, 1))


def _is_foreign(node: onnx.NodeProto) -> bool:
    return node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)


def _remedy(proto: onnx.ModelProto) -> str:
    """What to do about a model that the checker refuses."""
    foreign = next(filter(_is_foreign, proto.graph.node), None)
    if foreign is None:
        return "export it again"
    return (
        f"ONNX has no operator {printable(foreign.op_type)}: export the model with operators that "
        "it has, or give this one a domain of its own and add it with `tandem build --plugin`"
    )


def refuse_bytes(model: ir.Model, path: Path) -> None:
    """Refuse attributes whose text is not UTF-8: onnx-ir keeps their bytes."""
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.STRING and not isinstance(attribute.value, str):
                raise ImportModelError(
                    f"{path.name}: the attribute {attribute.name!r} of node {node.name!r} "
                    f"({node.op_type}) is not UTF-8 text; export the model again."
                )


def refuse_unsupported(model: ir.Model, path: Path, *, keep_tensorrt: bool = False) -> None:
    """Refuse inputs, outputs and operators that no engine has, and constants noted falsely.

    `keep_tensorrt`: operators of TensorRT, whose names end with _TRT, may stay.
    """
    if not model.graph.inputs:
        raise ImportModelError(
            f"{path.name} has no input, so its outputs are constants: keep those."
        )
    for value in (*model.graph.inputs, *model.graph.outputs):
        if not isinstance(value.type, ir.TensorType | None):
            raise ImportModelError(
                f"{path.name}: {value.name!r} is not a tensor but {value.type}; "
                "sequences, maps and optionals cannot enter or leave an engine."
            )
        if value.dtype is not None and value.dtype not in IO_DTYPES:
            raise ImportModelError(
                f"{path.name}: {value.name!r} has type {value.dtype.name}, which cannot enter or "
                f"leave an engine; types that can: {', '.join(IO_DTYPES.values())}."
            )
    for value in model.graph.initializers.values():
        constant = value.const_value
        if constant is not None and (
            (value.dtype is not None and value.dtype != constant.dtype)
            or (value.shape is not None and value.shape != constant.shape)
        ):
            raise ImportModelError(
                f"{path.name}: the constant {value.name!r} is noted as {value.dtype}{value.shape}, "
                f"but it is {constant.dtype}{constant.shape}; export the model again."
            )
    functions = {(key[0], key[1]) for key in model.functions}
    foreign = [
        node
        for node in model.graph.all_nodes()
        if node.domain not in KNOWN_DOMAINS
        and (node.domain, node.op_type) not in functions
        and not (keep_tensorrt and node.op_type.endswith("_TRT"))
    ]
    if foreign:
        node = foreign[0]
        more = f" (and {len(foreign) - 1} more such nodes)" if len(foreign) > 1 else ""
        operator = printable(f"{node.domain}::{node.op_type}")
        raise ImportModelError(
            f"{path.name}: node {node.name!r} is {operator}, an operator that "
            f"Tandem does not know{more}; export the model with standard ONNX operators, or add "
            "it with `tandem build --plugin`."
        )
