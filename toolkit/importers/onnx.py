"""Model file -> graph: the first step of a build, and the only module that reads ONNX files.

    file of another format -> ONNX (`toolkit.importers.formats`)
    bytes -> ModelProto (external data loaded, nodes in order) -> functions inlined,
    opset >= TARGET_OPSET -> onnx-ir model, every node and value named, dynamic dimensions frozen or
    given a range

What cannot be handled is refused (`toolkit.importers.refusals`), with the node and the reason.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_tensor
from onnx_ir.passes import common as ir_passes

from device.engine.manifest import DimRange
from toolkit.errors import ImportModelError, first_line
from toolkit.graph.passes.branches import own_branch_outputs
from toolkit.graph.widen import widen
from toolkit.importers.formats import export_to_onnx
from toolkit.importers.input_shapes import dims_in_use, fix_shapes
from toolkit.importers.limits import (
    KNOWN_DTYPES,
    check_array_sizes,
    check_external_sizes,
    check_node_count,
    read_model_bytes,
    tensor_bytes,
)
from toolkit.importers.opset import at_known_opset
from toolkit.importers.origin import ModelOrigin, model_origin
from toolkit.importers.refusals import (
    KNOWN_DOMAINS,
    check_tensors,
    check_valid,
    refuse_block_activations,
    refuse_broken_names,
    refuse_bytes,
    refuse_references,
    refuse_unsupported,
    tensors_of,
)
from toolkit.importers.repair import clear_false_sizes, sort_nodes
from toolkit.importers.source import ModelPath, model_sha256
from toolkit.plugins import Plugin
from toolkit.plugins.functions import add_functions, unused_plugins
from toolkit.progress import Progress, silent

LOG = logging.getLogger(__name__)

_WIDEST = 8  # bytes of an element; complex ones count half, and half the limit is near it
_SHARED_DTYPES = frozenset(
    {ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16}
    | {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.INT64}
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
    `notes` say what the import decided by itself (an upgraded opset, a frozen batch). `batched`:
    a dynamic first dimension was frozen. `bfloat16`: floats are float32 that were BF16.
    """

    name: str
    sha256: str
    model: ir.Model
    dims: tuple[DimRange, ...] = ()
    notes: tuple[str, ...] = field(default=())
    origin: ModelOrigin = field(default_factory=ModelOrigin)
    batched: bool = False
    bfloat16: bool = False


def import_model(
    source: ModelSource,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Iterable[DimRange] = (),
    plugins: Sequence[Plugin] = (),
) -> ImportedModel:
    """Read a model as `open_model` does, and give it sizes as `sized` does."""
    return sized(open_model(source, plugins=plugins), shapes=shapes, dims=dims)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose dynamic dimensions have no sizes yet; fields as in `ImportedModel`."""

    path: Path
    sha256: str
    model: ir.Model
    notes: tuple[str, ...]
    origin: ModelOrigin
    bfloat16: bool = False

    def copy(self) -> "OpenModel":
        """Return a model with a graph of its own, which shares the weights."""
        return replace(self, model=self.model.clone())


def open_model(
    source: ModelSource,
    *,
    plugins: Sequence[Plugin] = (),
    keep_tensorrt: bool = False,
    report: Progress = silent,
) -> OpenModel:
    """Read ONNX or a model of `toolkit.importers.formats`; opsets below 13 are raised.

    Operators of `plugins` stay nodes, with their functions beside the graph; so do those of
    TensorRT (names that end with _TRT) with `keep_tensorrt`: for plans. `report` hears of an
    export.

    Raises ImportModelError: the file is missing or damaged, or holds what cannot be handled;
    PluginError: a plugin does not fit the model.
    """
    path = source_path(source)
    data, sha256, export_notes = _read(source, report)
    plugged = [plugin.title for plugin in plugins]
    parsed, _ = _parse(data, path)
    del data  # as large as the weights
    refuse_block_activations(parsed, path)
    origin = model_origin(parsed)
    proto, notes = at_known_opset(
        parsed, path, lambda proto: _written(_inlined(proto, path, plugged), path)
    )
    add_functions(proto, plugins, reserved=KNOWN_DOMAINS)
    model = _to_ir(proto, path, plugged)
    refuse_bytes(model, path)
    widened = _widen_bfloat16(model)
    refuse_unsupported(model, path, keep_tensorrt=keep_tensorrt)
    notes += [*export_notes, *unused_plugins(model, plugins), *widened]
    return OpenModel(path, sha256, model, tuple(notes), origin, bool(widened))


def _widen_bfloat16(model: ir.Model) -> tuple[str, ...]:
    """Read what is in BF16 as FP32; return a note on it, and on Casts that round no more."""
    casts = sum(
        node.op_type == "Cast" and node.attributes.get_int("to", 0) == ir.DataType.BFLOAT16
        for node in model.graph.all_nodes()
    )
    if not widen(model, ir.DataType.BFLOAT16):
        return ()
    note = (
        "its tensors in BF16, also inputs and outputs, are read as FP32, which holds their numbers"
    )
    return (f"{note}; Casts to BF16 do not round: {casts}" if casts else note,)


def sized(
    opened: OpenModel,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: Iterable[DimRange] = (),
    batch: int = 1,
) -> ImportedModel:
    """Return a model with its dynamic dimensions frozen or given a range; it shares the weights.

    The graph of `opened` itself is changed; clone it first to use it again. `shapes`
    fix whole inputs; `dims` keep a named dimension dynamic within a range. A dynamic first
    dimension that neither names is frozen to `batch`, noted; any other is refused.

    Raises ImportModelError: a size is missing, or does not fit the model.
    """
    path, model = opened.path, opened.model
    dynamic = tuple(dims)
    _refuse_unknown_dims(dynamic, dims_in_use(model), path)
    frozen = fix_shapes(model, path, dict(shapes or {}), {dim.name for dim in dynamic}, batch)
    notes = (*opened.notes, *frozen)
    _refuse_fixed_dims(dynamic, dims_in_use(model), path)
    for note in notes:
        LOG.info("%s: %s", path.name, note)
    return ImportedModel(
        name=path.name,
        sha256=opened.sha256,
        model=model,
        dims=dynamic,
        notes=notes,
        origin=opened.origin,
        batched=bool(frozen),
        bfloat16=opened.bfloat16,
    )


def _refuse_unknown_dims(dims: Sequence[DimRange], known: Collection[str], path: Path) -> None:
    unknown = next((dim.name for dim in dims if dim.name not in known), None)
    if unknown is not None:
        raise ImportModelError(
            f"{path.name} has no dynamic dimension {unknown!r} "
            f"(it has: {', '.join(sorted(known)) or 'none'}); correct the name given with --dim."
        )


def _refuse_fixed_dims(dims: Sequence[DimRange], dynamic: Collection[str], path: Path) -> None:
    fixed = next((dim.name for dim in dims if dim.name not in dynamic), None)
    if fixed is not None:
        raise ImportModelError(
            f"{path.name}: dimension {fixed!r} is given a size with --shape and a range with "
            "`tandem build --dim`; leave one of the two away."
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

    Raises ImportModelError: the file is missing, damaged or no valid ONNX model. Operators that
    ONNX does not have are taken.
    """
    path = Path(path)
    data, sha256, _ = _read(path, silent)
    proto, external = _parse(data, path)
    add_functions(proto, plugins, reserved=KNOWN_DOMAINS)
    check_valid(proto, path, foreign=True)
    try:
        model = ir.from_proto(proto)
        model.clone()  # fails on functions that read what nothing makes: the checker does not
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err
    _name_nodes(model.graph)
    return ModelFile(path, sha256, len(data), model, external)


def onnx_bytes(source: ModelSource) -> bytes:
    """Return a model as an ONNX file, made by its exporter where it is of another format.

    Raises ImportModelError.
    """
    return _read(source, silent)[0]


def _read(source: ModelSource, report: Progress) -> tuple[bytes, str, tuple[str, ...]]:
    """Return the ONNX file, the SHA-256 of the model, and notes on how the file was made."""
    if isinstance(source, ModelBytes):
        return source.data, hashlib.sha256(source.data).hexdigest(), ()
    file = source if isinstance(source, ModelPath) else ModelPath(Path(source))
    exported = export_to_onnx(file, report)
    if exported is not None:
        return exported.data, model_sha256(file.path), exported.notes
    data = read_model_bytes(file.path)
    return data, hashlib.sha256(data).hexdigest(), ()


def _parse(data: bytes, path: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a model with all its weights, and the files beside it that hold some of them."""
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
    refuse_broken_names(proto, path)
    refuse_references(proto, path)
    check_node_count(proto, path)
    check_array_sizes(proto, tensors_of(proto), path)
    external = _load_external(proto, path)
    check_tensors(proto, path)
    sort_nodes(proto.graph)
    clear_false_sizes(proto.graph)
    return proto, external


def _load_external(proto: onnx.ModelProto, path: Path) -> tuple[str, ...]:
    """Read the weights that are in files beside the model; return the names of those files."""
    tensors = [t for t in tensors_of(proto) if t.data_location == onnx.TensorProto.EXTERNAL]
    locations = {
        entry.value for tensor in tensors for entry in tensor.external_data
        if entry.key == "location"
    }  # fmt: skip
    check_external_sizes(tensors, path)
    try:
        for tensor in tensors:
            load_external_data_for_tensor(tensor, str(path.parent))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    # TypeError: a name of a file that is not UTF-8. RuntimeError: one that is too long.
    except (OSError, RuntimeError, TypeError, ValueError, onnx.checker.ValidationError) as err:
        raise ImportModelError(
            f"{path.name} keeps weights in a file beside it that cannot be read "
            f"({first_line(err)}); copy that file to {path.parent}."
        ) from err
    return tuple(sorted(locations))


def _weight_bytes(proto: onnx.ModelProto) -> int:
    """Return a bound of the bytes of all initializers: elements that are no raw bytes at most."""
    return sum(
        tensor_bytes(tensor)
        if tensor.HasField("raw_data") and tensor.data_type in KNOWN_DTYPES
        else _WIDEST * math.prod(tensor.dims)
        for tensor in proto.graph.initializer
    )


def _to_ir(proto: onnx.ModelProto, path: Path, plugged: Collection[str]) -> ir.Model:
    """Check and convert; names are made unique, so every later message can name its node."""
    # The exact size takes as long as writing the file; few models are near the limit.
    near = _weight_bytes(proto) > onnx.checker.MAXIMUM_PROTOBUF // 2
    if near and proto.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF:
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
    _share_weights(model.graph)
    return model


def _share_weights(graph: ir.Graph) -> None:
    """Read each constant once: a tensor of protobuf copies its bytes for every reader.

    As long as one is left, protobuf keeps the bytes of all.
    """
    graphs = (graph, *graph.subgraphs())
    for value in (value for one in graphs for value in one.initializers.values()):
        if value.const_value is not None:
            value.const_value = _read_once(value.const_value)
    for node in graph.all_nodes():
        for name, attribute in tuple(node.attributes.items()):
            if isinstance(attribute.value, ir.TensorProtoTensor):
                node.attributes[name] = ir.AttrTensor(name, _read_once(attribute.value))


def _read_once(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.TensorProtoTensor) or tensor.dtype not in _SHARED_DTYPES:
        return tensor
    return ir.Tensor(
        tensor.numpy(),
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def _inlined(proto: onnx.ModelProto, path: Path, plugged: Collection[str]) -> ir.Model:
    """Check, and inline functions, but for those of the operators `plugged`."""
    check_valid(proto, path)
    inline = ir_passes.InlinePass(lambda f: f"{f.domain}::{f.name}" not in plugged)
    try:
        return inline(ir.from_proto(proto)).model
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err


def _written(model: ir.Model, path: Path) -> onnx.ModelProto:
    try:
        return ir.to_proto(model)
    except _IR_REFUSALS as err:
        raise _not_imported(path, err) from err


def _not_imported(path: Path, err: Exception) -> ImportModelError:
    return ImportModelError(
        f"{path.name} holds something that cannot be imported: {first_line(err)}"
    )


def _name_nodes(graph: ir.Graph) -> None:
    """Give every node a name of its own: its old one, or its operator and first output."""
    names: set[str] = set()
    numbers: Counter[str] = Counter()  # the last one that each base was given
    for node in graph.all_nodes():
        base = name = node.name or f"{node.op_type}_{node.outputs[0].name if node.outputs else ''}"
        while name in names:
            numbers[base] += 1
            name = f"{base}_{numbers[base]}"
        names.add(name)
        node.name = name
