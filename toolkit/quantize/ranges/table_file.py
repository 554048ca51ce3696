"""Read ranges from a calibration table, a TensorRT cache or a Q/DQ model, and fit them to a graph.

The content tells the format, never the name. Imported ranges name tensors of the ONNX file. The
graph passes fuse some of these, so a table is fitted to the graph before use.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from msgspec.structs import replace

from calibration.errors import CalibrationError
from calibration.table import CalibrationTable, decode_table
from calibration.trt_cache import TensorRTCache, amax_of, decode_cache
from device.engine.manifest import IMPORTED, DimRange
from toolkit.errors import BuildError, ImportModelError
from toolkit.importers.onnx import ImportedModel, import_model
from toolkit.quantize.qdq.importer import PlainModel, import_qdq
from toolkit.quantize.qdq.infer_ranges import infer_ranges
from toolkit.quantize.qdq.nodes import is_dequantize, is_quantize
from toolkit.quantize.quantize import calibrated_tensors, int8_nodes, is_activation, with_operands

TABLE = "calibration table"
CACHE = "TensorRT cache"
QDQ = "Q/DQ model"
UNKNOWN_SHA256 = "0" * 64
_AIMET = b'"activation_encodings"'  # in AIMET's files of encodings
_SHOWN = 3  # names in a note


@dataclass(frozen=True, slots=True)
class RangesFile:
    """The content of a file.

    `kind`: TABLE, CACHE or QDQ. `cache`: the TensorRT cache. `plain`: the model without its Q/DQ.
    `notes`: accepted deviations from the rules.
    """

    kind: str
    table: CalibrationTable
    cache: TensorRTCache | None = None
    plain: PlainModel | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table for the graph after the passes.

    `tensors`: number of tensors to quantize; `ranges`: how many of them have a range. `unknown`:
    names that are no tensors of the model. `fused`: names of constants and of fused tensors.
    `inferred`: tensors with the range of a neighbour. `missing`: tensors without a range that INT8
    nodes read; these nodes, `float_nodes`, compute in floating point.
    """

    table: CalibrationTable
    tensors: int
    ranges: int
    unknown: tuple[str, ...]
    fused: tuple[str, ...]
    inferred: tuple[str, ...]
    missing: tuple[str, ...]
    float_nodes: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each problem."""
        rows = (
            (self.unknown, "names in the calibration table are no tensors of the model"),
            (self.fused, "ranges are of constants or of tensors that the passes fused"),
            (self.inferred, "tensors lack a range and take that of a neighbour"),
            (self.missing, "tensors lack a range"),
            (self.float_nodes, "nodes compute in floating point because they read such tensors"),
        )
        problems = tuple(f"{len(names)} {text}: {_some(names)}" for names, text in rows if names)
        if not problems:
            return ()
        return (f"{self.ranges} of {self.tensors} tensors have a range", *problems)


def read_ranges(
    path: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dims: tuple[DimRange, ...] = (),
    any_weight_scale: bool = False,
) -> RangesFile:
    """Read a table, a TensorRT cache or a Q/DQ model; `shapes`, `dims`: of its inputs.

    Raises TandemError: the file cannot be read, is none of the three, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot read the INT8 ranges ({error.strerror}): check the path"
        ) from error
    is_json = data.lstrip()[:1] == b"{"
    if is_json and _AIMET in data:
        raise CalibrationError(
            f"{path}: encodings of AIMET are no ranges that Tandem reads: build the Q/DQ model "
            "that sim.to_onnx_qdq() of AIMET returns, without a table"
        )
    if is_json:
        table = decode_table(data, str(path))
        return RangesFile(TABLE, table, notes=refused_notes(table))
    if data.startswith(b"TRT-"):
        return _cache(data, path)
    if data[:1] == b"\x08":  # ONNX files begin with the field ir_version
        imported = import_model(path, shapes=shapes, dims=dims)
        return _qdq(imported, path, any_weight_scale)
    begins = data[:16].decode("ascii", "backslashreplace") if data else "nothing"
    raise CalibrationError(
        f"{path}: begins with {begins!r}, but INT8 ranges are a calibration table (JSON, '{{'), a "
        "TensorRT cache ('TRT-<version>-<algorithm>') or a Q/DQ model (ONNX): give one of them"
    )


def _cache(data: bytes, path: Path) -> RangesFile:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path}: begins as a TensorRT cache, but byte {error.start} is not UTF-8: restore the "
            "file"
        ) from error
    cache = decode_cache(text, str(path))
    try:
        table = imported_table(amax_of(cache), hashlib.sha256(data).hexdigest())
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from error
    return RangesFile(CACHE, table, cache=cache)


def _qdq(imported: ImportedModel, path: Path, any_weight_scale: bool) -> RangesFile:
    if not has_qdq(imported.model):
        raise CalibrationError(
            f"{path}: an ONNX model without QuantizeLinear and DequantizeLinear holds no ranges: "
            "give a Q/DQ model, a calibration table or a TensorRT cache"
        )
    try:
        plain = import_qdq(imported.model, any_weight_scale=any_weight_scale)
    except ImportModelError as error:
        raise ImportModelError(f"{path}: {error}") from error
    table = table_of_plain(plain, imported.sha256)
    return RangesFile(QDQ, table, plain=plain, notes=plain_notes(plain))


def imported_table(
    amax: Mapping[str, float],
    source_sha256: str,
    model_sha256: str = UNKNOWN_SHA256,
    keep_float: tuple[str, ...] = (),
) -> CalibrationTable:
    """A table of imported ranges."""
    return CalibrationTable(
        method=IMPORTED,
        samples=0,
        data_sha256=source_sha256,
        model_sha256=model_sha256,
        tensors=dict(amax),
        keep_float=keep_float,
    )


def table_of_plain(plain: PlainModel, sha256: str) -> CalibrationTable:
    """The ranges of a Q/DQ model; `sha256` is that of its file."""
    return imported_table(plain.amax, sha256, sha256, plain.float_nodes)


def foreign_notes(table: CalibrationTable, model_sha256: str) -> tuple[str, ...]:
    """Warn if the table was measured on another model file.

    Imported ranges do not name their model.
    """
    if table.method == IMPORTED or table.model_sha256 == model_sha256:
        return ()
    return (
        "the calibration table was measured on another model file, with SHA-256 "
        f"{table.model_sha256[:12]}; this file has {model_sha256[:12]}: if their weights differ, "
        "calibrate this one",
    )


def refused_notes(table: CalibrationTable) -> tuple[str, ...]:
    """Say what a table loses whose calibration was beyond its limits."""
    if not table.refused:
        return ()
    return (f"the calibration of this table lost too much: {'; '.join(table.refused)}",)


def refuse_lossy(table: CalibrationTable, model: str) -> None:
    """Raise BuildError: the calibration of the table lost too much."""
    if table.refused:
        raise BuildError(
            f"The calibration table of {model} lost too much when it was measured: "
            f"{'; '.join(table.refused)}. Calibrate with more data or nodes in floating point "
            "(`tandem calibrate --budget margin:0.3`), or take it as it is (`--accept-loss`)."
        )


def plain_notes(plain: PlainModel) -> tuple[str, ...]:
    """Notes on a model whose Q/DQ was removed."""
    inferred = f"{len(plain.inferred)} ranges follow from those of neighbours in the Q/DQ model"
    return (*plain.notes, inferred) if plain.inferred else plain.notes


def has_qdq(model: ir.Model) -> bool:
    """Whether a model holds any Q or DQ node."""
    return any(is_quantize(node) or is_dequantize(node) for node in model.graph.all_nodes())


def fit_table(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> FittedTable:
    """Fit a table to the graph that the passes made of the original model.

    Imported ranges may be incomplete: missing ones are inferred from neighbours where an operator
    keeps the range, and nodes that still lack one compute in floating point, as in TensorRT. A
    table of our own must be complete.

    Raises BuildError: the table names no tensor of the model.
    """
    known = _tensors(graph)
    ranges = {name: amax for name, amax in table.tensors.items() if name in known}
    quantized = calibrated_tensors(graph)
    if quantized and not ranges:
        raise BuildError(
            f"The calibration table names none of the model's {len(quantized)} tensors, such as "
            f"{quantized[0]!r}, but {_some(tuple(table.tensors)) or 'nothing'}; give the table of "
            "this model."
        )
    imported = table.method == IMPORTED
    complete = with_operands(graph, _inferred(table, original, graph) if imported else ranges)
    keep_float = _float_nodes(table, original, graph)
    readers = _int8_readers(graph, keep_float)
    missing = tuple(name for name in readers if name not in complete) if imported else ()
    float_nodes = dict.fromkeys(node for name in missing for node in readers[name])
    unmatched = table.tensors.keys() - known
    original_names = _tensors(original) | set(original.graph.initializers)
    return FittedTable(
        table=replace(
            table,
            tensors=complete,
            methods={name: row for name, row in table.methods.items() if name in complete},
            keep_float=tuple(sorted(keep_float | set(float_nodes))),
        ),
        tensors=len(quantized),
        ranges=sum(name in complete for name in quantized),
        unknown=tuple(sorted(unmatched - original_names)),
        fused=tuple(sorted(unmatched & original_names)),
        inferred=tuple(name for name in quantized if name in complete and name not in ranges),
        missing=missing,
        float_nodes=tuple(float_nodes),
    )


def _tensors(model: ir.Model) -> set[str]:
    """The names of all values that are no initializers."""
    inputs = {str(value.name) for value in model.graph.inputs}
    return inputs | {str(out.name) for node in model.graph.all_nodes() for out in node.outputs}


def _inferred(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> dict[str, float]:
    """Infer missing ranges before and after the passes."""
    before, _ = infer_ranges(original.graph, table.tensors)
    known = _tensors(graph)
    after, _ = infer_ranges(graph.graph, {n: amax for n, amax in before.items() if n in known})
    return after


def _int8_readers(graph: ir.Model, keep_float: set[str]) -> dict[str, list[str]]:
    """Activation -> the INT8 nodes that read it."""
    readers: dict[str, list[str]] = {}
    for node, row in int8_nodes(graph, frozenset(keep_float)):
        for index in range(len(node.inputs)) if row.activations is None else row.activations:
            value = node.inputs[index]
            if value is not None and is_activation(value):
                readers.setdefault(str(value.name), []).append(str(node.name))
    return readers


def _float_nodes(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> set[str]:
    """The nodes of the graph that the table keeps in floating point, also if fused and renamed."""
    requested = set(table.keep_float)
    original_producers = {str(out.name): node for node in original.graph for out in node.outputs}
    float_nodes = set()
    for node in graph.graph:
        origin = original_producers.get(str(node.outputs[0].name)) if node.outputs else None
        if origin is not None and origin.op_type == "BatchNormalization" != node.op_type:
            # Batch normalization is fused into the node before it, which then has another name.
            value = origin.inputs[0]
            origin = value.producer() if value is not None else None
        if str(node.name) in requested or (origin is not None and str(origin.name) in requested):
            float_nodes.add(str(node.name))
    return float_nodes


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown
