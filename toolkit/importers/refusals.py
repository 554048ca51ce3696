"""What an ONNX file may not hold: damaged constants, nodes that are not valid, what no engine has.

Each refusal names the file, the node or tensor, and what to do.
"""

import math
from pathlib import Path

import onnx
import onnx_ir as ir

from toolkit.errors import ImportModelError, first_line, printable
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.importers.weights import without_weights

_NO_BITS = {ir.DataType.UNDEFINED, ir.DataType.STRING}
_KNOWN_DTYPES = frozenset(dtype.value for dtype in ir.DataType if dtype not in _NO_BITS)
# Domains whose operators onnxruntime's CPU provider knows.
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


def check_tensors(graph: onnx.GraphProto, path: Path) -> None:
    """Refuse constants whose bytes are not as many as their type and sizes say."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t, *attribute.tensors]
            for inner in (attribute.g, *attribute.graphs):
                check_tensors(inner, path)
    for tensor in tensors:
        if tensor.data_type in _KNOWN_DTYPES and not _has_its_data(tensor):
            raise ImportModelError(
                f"{path.name}: the constant {tensor.name!r} has not as many elements as its type "
                f"and its sizes {list(tensor.dims)} say; export the model again."
            )


def _has_its_data(tensor: onnx.TensorProto) -> bool:
    """Whether a constant has the elements of its sizes, in its bytes or in a field of its type."""
    if tensor.HasField("raw_data"):
        bits = ir.DataType(tensor.data_type).bitwidth
        return len(tensor.raw_data) == math.ceil(math.prod(tensor.dims) * bits / 8)
    try:
        return ir.from_proto(tensor).numpy().size == math.prod(tensor.dims)
    except (AssertionError, TypeError, ValueError):  # onnx-ir asserts the field of the type
        return False


def check_valid(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse what is not valid, but not a missing shape: that is inferred, or asked for by name."""
    values = [value.type for value in (*proto.graph.input, *proto.graph.output)]
    tensors = [kind.tensor_type for kind in values if kind.HasField("tensor_type")]
    shapeless = [tensor for tensor in tensors if not tensor.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    try:
        onnx.checker.check_model(without_weights(proto), full_check=False)
    except (onnx.checker.ValidationError, ValueError) as err:  # ValueError: not to be written
        raise ImportModelError(
            f"{path.name} is not valid ONNX: {first_line(err).rstrip('.')}; {_remedy(proto)}."
        ) from err
    finally:
        for tensor in shapeless:
            tensor.ClearField("shape")


def _remedy(proto: onnx.ModelProto) -> str:
    """What to do about a model that the checker refuses."""
    names = (node.op_type for node in proto.graph.node if node.domain in ("", "ai.onnx"))
    known = (name for name in names if isinstance(name, str))  # bytes where it is no UTF-8
    foreign = next((name for name in known if not onnx.defs.has(name)), None)
    if foreign is None:
        return "export it again"
    return (
        f"ONNX has no operator {printable(foreign)}: export the model with operators that it has, "
        "or give this one a domain of its own and add it with `tandem build --plugin`"
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
