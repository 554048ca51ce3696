"""Model file -> graph: the first step of a build, and the only module that reads ONNX files.

    file of another format -> ONNX (`toolkit.importers.formats`)
    bytes -> ModelProto (external data loaded, nodes in order) -> functions inlined,
    opset >= TARGET_OPSET -> onnx-ir model, every node and value named, dynamic dimensions frozen or
    given a range

What cannot be handled is refused here, with the node and the reason.
"""

import hashlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
import onnx.version_converter
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes import common as ir_passes

from device.engine.manifest import DimRange
from toolkit.errors import ImportModelError, first_line
from toolkit.graph import native
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.graph.passes.branches import own_branch_outputs
from toolkit.importers.formats import export_to_onnx
from toolkit.importers.input_shapes import dims_in_use, fix_shapes
from toolkit.importers.origin import ModelOrigin, model_origin
from toolkit.importers.source import ModelPath, Report, model_sha256, silent
from toolkit.plugins import Plugin
from toolkit.plugins.functions import add_functions, unused_plugins

LOG = logging.getLogger(__name__)

# Models are raised to TARGET_OPSET, the first whose Q/DQ TensorRT takes on the DLA and for which
# onnx has a reference of Q/DQ. Some operators have no converter: a model of at least MIN_OPSET,
# where Q/DQ are per channel and axes are inputs, is then kept as it is.
OLDEST_OPSET = 1
MIN_OPSET = 13
TARGET_OPSET = 19
# Models above are lowered to it where the operators allow: onnxruntime 1.31 refuses newer ones.
NEWEST_RUN_OPSET = 26
RESIZE_MODES_OPSET = 11  # the first in which Resize says how it samples
BROADCASTING_OPSET = 7  # the first in which shapes are aligned at their ends, as NumPy does
LARGE_BYTES = 1 << 14  # no converter reads a constant of this size
# What the version converter raises on a model that it cannot convert.
_REFUSALS = (
    RuntimeError,
    ValueError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)
# What onnx-ir and its passes raise on a model that they cannot represent or go through.
_IR_REFUSALS = (
    ir.passes.InvariantError,
    ir.serde.SerdeError,
    KeyError,
    NotImplementedError,
    RuntimeError,  # PassError, and what its cloner makes of others
    TypeError,
    ValueError,
)

_NO_BITS = {ir.DataType.UNDEFINED, ir.DataType.STRING}
_KNOWN_DTYPES = frozenset(dtype.value for dtype in ir.DataType if dtype not in _NO_BITS)

# What exporters call a dimension that has no name; equal ones are not the same dimension.
UNNAMED = frozenset({"?", "-1", "None", "none", "unk", "unknown"})

# Domains whose operators onnxruntime's CPU provider knows.
KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """An ONNX file that is in memory; `name` stands for its file name in messages."""

    name: str
    data: bytes = field(repr=False)


ModelSource = str | Path | ModelPath | ModelBytes


def source_path(source: ModelSource) -> Path:
    """Return the path of a model, or what stands for it where the model is in memory."""
    if isinstance(source, ModelBytes):
        return Path(source.name)
    path = source.path if isinstance(source, ModelPath) else Path(source)
    return path if path.name not in ("", "..") else path.resolve()  # "." is a SavedModel, too


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model as later steps take it.

    `sha256` is that of the model file. `dims` are the dynamic dimensions that stay dynamic.
    `notes` say what the import decided by itself (an upgraded opset, a frozen batch).
    """

    name: str
    sha256: str
    model: ir.Model
    dims: tuple[DimRange, ...] = ()
    notes: tuple[str, ...] = field(default=())
    origin: ModelOrigin = field(default_factory=ModelOrigin)


def import_model(
    source: ModelSource,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Iterable[DimRange] = (),
    plugins: Sequence[Plugin] = (),
    report: Report = silent,
) -> ImportedModel:
    """Read ONNX or a model of `toolkit.importers.formats`; opsets below 13 are raised.

    `shapes` fix whole inputs; `dims` keep a named dimension dynamic within a range. A dynamic
    first dimension that neither names is frozen to 1 (and noted); any other is refused. Operators
    of `plugins` stay nodes, with their functions beside the graph. `report` hears of an export.

    Raises ImportModelError: the file is missing or damaged, or holds what cannot be handled;
    PluginError: a plugin does not fit the model.
    """
    path = source_path(source)
    data, sha256, export_notes = _read(source, report)
    plugged = [plugin.title for plugin in plugins]
    parsed = _parse(data, path)
    origin = model_origin(parsed)
    proto, notes = _at_known_opset(parsed, path, plugged)
    add_functions(proto, plugins, reserved=KNOWN_DOMAINS)
    model = _to_ir(proto, path, plugged)
    _refuse_bytes(model, path)
    _refuse_unsupported(model, path)
    notes += [*export_notes, *unused_plugins(model, plugins)]
    dynamic = tuple(dims)
    notes += fix_shapes(model, path, dict(shapes or {}), {dim.name for dim in dynamic})
    used = dims_in_use(model)
    for dim in dynamic:
        if dim.name not in used:
            known = ", ".join(sorted(used)) or "none"
            raise ImportModelError(
                f"{path.name} has no dynamic dimension {dim.name!r} (it has: {known}); "
                "correct the name given with --dim."
            )
    for note in notes:
        LOG.info("%s: %s", path.name, note)
    return ImportedModel(
        name=path.name,
        sha256=sha256,
        model=model,
        dims=dynamic,
        notes=tuple(notes),
        origin=origin,
    )


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as its file has it: no conversion, no pass, only every node has a name.

    `size_bytes` is that of the file alone; `external` are the files beside it that hold weights.
    """

    path: Path
    sha256: str
    size_bytes: int
    model: ir.Model
    external: tuple[str, ...] = ()


def read_model_file(path: str | Path, plugins: Sequence[Plugin] = ()) -> ModelFile:
    """Read a model as its ONNX file is, to run it in onnxruntime, to inspect it or to cut it.

    The weights of other files are loaded too; the functions of `plugins` are added.

    Raises ImportModelError: the file is missing, damaged or no ONNX model.
    """
    path = Path(path)
    data, sha256, _ = _read(path, silent)
    external = sorted(
        {entry.value for tensor in onnx.load_model_from_string(data).graph.initializer
         for entry in tensor.external_data if entry.key == "location"}
    )  # fmt: skip
    proto = _parse(data, path)
    add_functions(proto, plugins, reserved=KNOWN_DOMAINS)
    try:
        model = ir.from_proto(proto)
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err
    _name_nodes(model.graph)
    return ModelFile(path, sha256, len(data), model, tuple(external))


def onnx_bytes(source: ModelSource, report: Report = silent) -> bytes:
    """Return a model as an ONNX file, made by its exporter where it is of another format.

    Raises ImportModelError.
    """
    return _read(source, report)[0]


def _read(source: ModelSource, report: Report) -> tuple[bytes, str, tuple[str, ...]]:
    """Return the ONNX file, the SHA-256 of the model, and notes on how the file was made."""
    if isinstance(source, ModelBytes):
        return source.data, hashlib.sha256(source.data).hexdigest(), ()
    file = source if isinstance(source, ModelPath) else ModelPath(Path(source))
    exported = export_to_onnx(file, report)
    if exported is not None:
        return exported.data, model_sha256(file.path), exported.notes
    try:
        data = file.path.read_bytes()
    except (OSError, ValueError) as err:  # ValueError: a NUL in the path
        why = getattr(err, "strerror", None) or err
        raise ImportModelError(
            f"Cannot read the model {file.path}: {why}; check the path."
        ) from err
    return data, hashlib.sha256(data).hexdigest(), ()


def _parse(data: bytes, path: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load_model_from_string(data)
    except (DecodeError, ValueError) as err:
        raise ImportModelError(
            f"{path} is not a complete ONNX file ({len(data)} bytes do not parse); "
            "export or copy it again."
        ) from err
    if not proto.graph.node or not proto.opset_import:
        raise ImportModelError(
            f"{path} parses but holds no graph with nodes and an opset; "
            "it is damaged or is not an ONNX model."
        )
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as err:
        raise ImportModelError(
            f"{path.name} keeps weights in a file beside it that cannot be read "
            f"({first_line(err)}); copy that file to {path.parent}."
        ) from err
    _check_tensors(proto.graph, path)
    _sort_nodes(proto.graph)
    _clear_false_sizes(proto.graph)
    return proto


def _check_tensors(graph: onnx.GraphProto, path: Path) -> None:
    """Refuse constants whose bytes are not as many as their type and sizes say."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            tensors += [attribute.t, *attribute.tensors]
            for inner in (attribute.g, *attribute.graphs):
                _check_tensors(inner, path)
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


def _sort_nodes(graph: onnx.GraphProto) -> None:
    """Sort the nodes topologically, as ONNX requires.

    onnxruntime runs any order, and its converter to FP16 writes new nodes at the end.
    """
    makers = {name: at for at, node in enumerate(graph.node) for name in node.output}
    needs = {
        at: {makers[name] for name in _names_read(node) if name in makers}
        for at, node in enumerate(graph.node)
    }
    if all(before < at for at, producers in needs.items() for before in producers):
        return
    try:
        order = tuple(TopologicalSorter(needs).static_order())
    except CycleError:
        return  # the checker refuses it by name
    ordered = onnx.GraphProto(node=[graph.node[at] for at in order])
    del graph.node[:]
    graph.node.extend(ordered.node)


def _clear_false_sizes(graph: onnx.GraphProto) -> None:
    """Make dimensions unknown that exporters write as -1, 0 or "?" for want of a size or a name."""
    constants = {tensor.name for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            false_size = dim.HasField("dim_value") and dim.dim_value < 1
            if value.name not in constants and (false_size or dim.dim_param in UNNAMED):
                dim.Clear()
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _clear_false_sizes(inner)


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors that a node reads, in its branches and bodies, too; "" is none."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from _names_read(inner)


def _at_known_opset(
    proto: onnx.ModelProto, path: Path, plugged: Collection[str]
) -> tuple[onnx.ModelProto, list[str]]:
    """Convert the model to TARGET_OPSET..NEWEST_RUN_OPSET where possible; return it and notes."""
    opset = _opset(proto)
    if opset is None:
        raise ImportModelError(f"{path.name} imports no standard ONNX opset; export it again.")
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise ImportModelError(
            f"{path.name} has opset {opset}; Tandem reads {OLDEST_OPSET} to {newest}: "
            f"export it with an opset in that range."
        )
    target_opset = min(max(opset, TARGET_OPSET), NEWEST_RUN_OPSET)
    if opset == target_opset:
        return proto, []
    # The converter drops functions. Those of plugins come in the place of the model's own later.
    plain = ir.to_proto(_inlined(proto, path, plugged)) if proto.functions else proto
    try:
        if opset < BROADCASTING_OPSET:
            _lay_slopes(plain, path, opset)
        converted = _converted(plain, target_opset)
    except _REFUSALS as err:
        if opset >= MIN_OPSET:
            return proto, [f"opset {opset} kept: {first_line(err)}"]
        raise ImportModelError(
            f"{path.name} has opset {opset} and cannot be raised to {target_opset} "
            f"({first_line(err)}); export it with opset {MIN_OPSET} or newer."
        ) from err
    return converted, [
        f"opset {opset} {'raised' if opset < target_opset else 'lowered'} to {target_opset}"
    ]


def _opset(proto: onnx.ModelProto) -> int | None:
    return next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), None)


def _converted(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Convert without the large weights: the converter would copy them four times."""
    weights = {
        tensor.name: tensor.raw_data
        for tensor in proto.graph.initializer
        if len(tensor.raw_data) >= LARGE_BYTES
    }
    _set_weights(proto, dict.fromkeys(weights, b""))
    # The converter adds constants that are no inputs, which IR version 3 does not know.
    proto.ir_version = max(proto.ir_version, 4)
    try:
        converted = native.convert_version(proto, opset)
    finally:
        _set_weights(proto, weights)
    _set_weights(converted, weights)
    if (_opset(proto) or RESIZE_MODES_OPSET) < RESIZE_MODES_OPSET:
        _set_resize_modes(converted.graph)
    return converted


def _lay_slopes(proto: onnx.ModelProto, path: Path, opset: int) -> None:
    """Give PRelu's slopes of C channels the shape (C, 1, ...): the converter leaves them (C,).

    Raises ImportModelError: slopes that are computed or read elsewhere, and inputs of unknown rank.
    """
    slopes = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = [
        node
        for node in proto.graph.node
        if node.op_type == "PRelu"
        and not any(name in slopes and math.prod(slopes[name].dims) == 1 for name in node.input[1:])
    ]
    if not nodes:
        return
    ranks = _ranks(proto)
    read_elsewhere = {
        name for node in proto.graph.node if node.op_type != "PRelu" for name in node.input
    }
    laid: dict[str, int] = {}
    for node in nodes:
        source, name, *more = (*node.input, "", "")
        rank = ranks.get(source)
        own = name in slopes and name not in read_elsewhere and not any(more)
        if rank is None or rank < 2 or not own or laid.setdefault(name, rank) != rank:
            raise ImportModelError(
                f"{path.name} has opset {opset}, and the slopes of its PRelu {source!r} "
                f"cannot be raised to {TARGET_OPSET}; export it with opset {MIN_OPSET} or newer."
            )
    for name, rank in laid.items():
        tensor = slopes[name]
        tensor.dims[:] = [math.prod(tensor.dims), *(rank - 2) * [1]]
        for value in proto.graph.input:  # IR version 3 lists constants among the inputs
            if value.name == name:
                value.CopyFrom(
                    onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
                )


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    graph = native.infer_shapes(proto, strict=False, data_prop=False).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }


def _set_resize_modes(graph: onnx.GraphProto) -> None:
    """Give Resize nodes the one sampling that Upsample and Resize had before it was an attribute.

    The converter leaves the newer default, "half_pixel". Nearest pixels are those that
    onnxruntime takes for the old operators: the last one before a point, and the next one where
    the picture becomes smaller. Raises ValueError: it becomes smaller and larger, by axis.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        name: attribute.t
        for node in graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
        for name in node.output
    }
    for node in graph.node:
        if node.op_type != "Resize":
            continue
        scales = constants.get(node.input[2]) if len(node.input) > 2 else None
        factors = onnx.numpy_helper.to_array(scales) if scales is not None else np.ones(1)
        shrinks = bool((factors < 1).any())
        if shrinks and (factors > 1).any():
            raise ValueError(f"{node.output[0]!r} is resized by {factors.tolist()}, both ways")
        values = {
            "coordinate_transformation_mode": "asymmetric",
            "nearest_mode": "ceil" if shrinks else "floor",
        }
        kept = [attribute for attribute in node.attribute if attribute.name not in values]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.extend(onnx.helper.make_attribute(*item) for item in values.items())


def _set_weights(proto: onnx.ModelProto, weights: Mapping[str, bytes]) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.raw_data = weights[tensor.name]


def _to_ir(proto: onnx.ModelProto, path: Path, plugged: Collection[str]) -> ir.Model:
    """Check and convert; names are made unique, so every later message can name its node."""
    if proto.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF:
        raise ImportModelError(
            f"{path.name} has {proto.ByteSize()} bytes with its weights; "
            f"Tandem takes models up to {onnx.checker.MAXIMUM_PROTOBUF}."
        )
    model = _inlined(proto, path, plugged)
    try:
        model = ir_passes.RemoveInitializersFromInputsPass()(model).model
        model = ir_passes.NameFixPass()(model).model
        model = ir_passes.TopologicalSortPass()(model).model
        own_branch_outputs(model)
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err
    _name_nodes(model.graph)
    return model


def _inlined(proto: onnx.ModelProto, path: Path, plugged: Collection[str]) -> ir.Model:
    """Check, and inline functions, but for those of the operators `plugged`."""
    _check(proto, path)
    inline = ir_passes.InlinePass(lambda f: f"{f.domain}::{f.name}" not in plugged)
    try:
        return inline(ir.from_proto(proto)).model
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err


def _not_imported(path: Path, err: Exception) -> ImportModelError:
    return ImportModelError(
        f"{path.name} holds something that cannot be imported: {first_line(err)}"
    )


def _check(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse what is not valid, but not a missing shape: that is inferred, or asked for by name."""
    values = [value.type for value in (*proto.graph.input, *proto.graph.output)]
    tensors = [kind.tensor_type for kind in values if kind.HasField("tensor_type")]
    shapeless = [tensor for tensor in tensors if not tensor.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    try:
        onnx.checker.check_model(proto, full_check=False)
    except (onnx.checker.ValidationError, UnicodeDecodeError) as err:
        raise ImportModelError(
            f"{path.name} is not valid ONNX: {first_line(err)}; {_remedy(proto)}."
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
        f"ONNX has no operator {foreign}: export the model with operators that it has, or give "
        "this one a domain of its own and add it with `tandem build --plugin`"
    )


def _name_nodes(graph: ir.Graph) -> None:
    """Give every node a name of its own: its old one, or its operator and first output."""
    taken: set[str] = set()
    for node in graph.all_nodes():
        base = node.name or f"{node.op_type}_{node.outputs[0].name if node.outputs else ''}"
        name, n = base, 1
        while name in taken:
            name, n = f"{base}_{n}", n + 1
        taken.add(name)
        node.name = name


def _refuse_bytes(model: ir.Model, path: Path) -> None:
    """Refuse attributes whose text is not UTF-8: onnx-ir keeps their bytes."""
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.STRING and not isinstance(attribute.value, str):
                raise ImportModelError(
                    f"{path.name}: the attribute {attribute.name!r} of node {node.name!r} "
                    f"({node.op_type}) is not UTF-8 text; export the model again."
                )


def _refuse_unsupported(model: ir.Model, path: Path) -> None:
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
        if node.domain not in KNOWN_DOMAINS and (node.domain, node.op_type) not in functions
    ]
    if foreign:
        node = foreign[0]
        more = f" (and {len(foreign) - 1} more such nodes)" if len(foreign) > 1 else ""
        raise ImportModelError(
            f"{path.name}: node {node.name!r} is {node.domain}::{node.op_type}, an operator that "
            f"Tandem does not know{more}; export the model with standard ONNX operators, or add "
            "it with `tandem build --plugin`."
        )
