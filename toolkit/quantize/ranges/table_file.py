"""Ranges from any file that holds them: our table, a TensorRT cache or a Q/DQ model.

The content says what a file is, never its name. What others measured names the tensors of the ONNX
file; the passes fuse some of them away, so that a table is fitted to the graph before it is used.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from msgspec.structs import replace

from calibration.errors import CalibrationError
from calibration.table import IMPORTED, CalibrationTable, decode_table
from calibration.trt_cache import TensorRTCache, amax_of, decode_cache
from device.engine.manifest import DimRange
from toolkit.errors import BuildError, ImportModelError
from toolkit.importers.onnx import ImportedModel, import_model
from toolkit.quantize.qdq.nodes import is_dequantize, is_quantize
from toolkit.quantize.qdq.plain import PlainModel, import_qdq
from toolkit.quantize.qdq.ranges import infer_ranges
from toolkit.quantize.quantize import calibrated_tensors, int8_nodes, is_activation, with_operands

TABLE = "calibration table"
CACHE = "TensorRT cache"
QDQ = "Q/DQ model"
UNKNOWN_SHA256 = "0" * 64
_SHOWN = 3  # names in a note


@dataclass(frozen=True, slots=True)
class RangesFile:
    """What a file holds.

    `kind`: TABLE, CACHE or QDQ. `cache`: a cache as it is. `plain`: a Q/DQ model without its Q/DQ.
    `notes`: what was taken although it differs from the rules.
    """

    kind: str
    table: CalibrationTable
    cache: TensorRTCache | None = None
    plain: PlainModel | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table in the names of the graph that the passes left, and what to say about it.

    `ranges` of the `tensors` that INT8 gives one have one. `unknown`: names of the table that are
    no tensors of the model. `gone`: those of constants, and of tensors that the passes fused.
    `inferred`: ranges carried over from neighbours. `missing`: tensors without a range that INT8
    nodes read; those nodes, `left_float`, compute in floating point.
    """

    table: CalibrationTable
    tensors: int
    ranges: int
    unknown: tuple[str, ...]
    gone: tuple[str, ...]
    inferred: tuple[str, ...]
    missing: tuple[str, ...]
    left_float: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each thing that is not as it should be."""
        rows = (
            (self.unknown, "names in the calibration table are no tensors of the model"),
            (self.gone, "ranges are of constants or of tensors that the passes fused"),
            (self.inferred, "tensors lack a range and take that of a neighbour"),
            (self.missing, "tensors lack a range"),
            (self.left_float, "nodes compute in floating point because they read such tensors"),
        )
        found = tuple(f"{len(names)} {text}: {_some(names)}" for names, text in rows if names)
        if not found:
            return ()
        return (f"{self.ranges} of {self.tensors} tensors have a range", *found)


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
    if data.lstrip()[:1] == b"{":
        return RangesFile(TABLE, decode_table(data, str(path)))
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
    """A table of ranges that others measured."""
    return CalibrationTable(
        method=IMPORTED,
        samples=0,
        data_sha256=source_sha256,
        model_sha256=model_sha256,
        tensors=dict(amax),
        keep_float=keep_float,
    )


def table_of_plain(plain: PlainModel, sha256: str) -> CalibrationTable:
    """The ranges of a Q/DQ model, whose file has the SHA-256 given."""
    return imported_table(plain.amax, sha256, sha256, plain.float_nodes)


def foreign_notes(table: CalibrationTable, model_sha256: str) -> tuple[str, ...]:
    """What to say where a table was measured on another file than the model's.

    Ranges that others measured say nothing of their model.
    """
    if table.method == IMPORTED or table.model_sha256 == model_sha256:
        return ()
    return ("the calibration table was measured on another model file",)


def plain_notes(plain: PlainModel) -> tuple[str, ...]:
    """What to say about a model that had Q/DQ."""
    inferred = f"{len(plain.inferred)} ranges follow from those of neighbours in the Q/DQ model"
    return (*plain.notes, inferred) if plain.inferred else plain.notes


def has_qdq(model: ir.Model) -> bool:
    """Whether a model holds any Q or DQ node."""
    return any(is_quantize(node) or is_dequantize(node) for node in model.graph.all_nodes())


def fit_table(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> FittedTable:
    """Fit a table to the graph that the passes made of the original model.

    Ranges that others measured may be incomplete: what is missing is carried over from neighbours
    where an operator keeps a range, and nodes that still lack one compute in floating point, as
    TensorRT does. A table of our own has to be complete.

    Raises BuildError: the table names no tensor of the model.
    """
    known = _tensors(graph)
    given = {name: amax for name, amax in table.tensors.items() if name in known}
    wanted = calibrated_tensors(graph)
    if wanted and not given:
        raise BuildError(
            f"The calibration table names none of the model's {len(wanted)} tensors, such as "
            f"{wanted[0]!r}, but {_some(tuple(table.tensors)) or 'nothing'}; give the table of "
            "this model."
        )
    imported = table.method == IMPORTED
    full = with_operands(graph, _inferred(table, original, graph) if imported else given)
    kept = _kept(table, original, graph)
    read = _read_in_int8(graph, kept)
    missing = tuple(name for name in read if name not in full) if imported else ()
    left = dict.fromkeys(node for name in missing for node in read[name])
    names = table.tensors.keys() - known
    before = _tensors(original) | set(original.graph.initializers)
    return FittedTable(
        table=replace(
            table,
            tensors=full,
            methods={name: row for name, row in table.methods.items() if name in full},
            keep_float=tuple(sorted(kept | set(left))),
        ),
        tensors=len(wanted),
        ranges=sum(name in full for name in wanted),
        unknown=tuple(sorted(names - before)),
        gone=tuple(sorted(names & before)),
        inferred=tuple(name for name in wanted if name in full and name not in given),
        missing=missing,
        left_float=tuple(left),
    )


def _tensors(model: ir.Model) -> set[str]:
    """The names of all values that are no initializers."""
    found = {str(value.name) for value in model.graph.inputs}
    return found | {str(out.name) for node in model.graph.all_nodes() for out in node.outputs}


def _inferred(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> dict[str, float]:
    """The ranges of the graph, with those that follow from others before and after the passes."""
    before, _ = infer_ranges(original.graph, table.tensors)
    known = _tensors(graph)
    after, _ = infer_ranges(graph.graph, {n: amax for n, amax in before.items() if n in known})
    return after


def _read_in_int8(graph: ir.Model, kept: set[str]) -> dict[str, list[str]]:
    """Activation -> the INT8 nodes that read it, without those kept in floating point."""
    found: dict[str, list[str]] = {}
    for node, row in int8_nodes(graph, frozenset(kept)):
        for index in range(len(node.inputs)) if row.activations is None else row.activations:
            value = node.inputs[index]
            if value is not None and is_activation(value):
                found.setdefault(str(value.name), []).append(str(node.name))
    return found


def _kept(table: CalibrationTable, original: ir.Model, graph: ir.Model) -> set[str]:
    """The nodes of the graph that the table keeps in floating point, under whatever name."""
    wanted = set(table.keep_float)
    makers = {str(out.name): node for node in original.graph for out in node.outputs}
    found = set()
    for node in graph.graph:
        origin = makers.get(str(node.outputs[0].name)) if node.outputs else None
        if origin is not None and origin.op_type == "BatchNormalization" != node.op_type:
            # Fused into the product before it, which then has another name than it had.
            value = origin.inputs[0]
            origin = value.producer() if value is not None else None
        if str(node.name) in wanted or (origin is not None and str(origin.name) in wanted):
            found.add(str(node.name))
    return found


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown
