"""Read INT8 ranges from one format, write them in others, and compare them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from calibration.compare import RangesComparison, compare_ranges
from calibration.table import CalibrationTable, write_table
from calibration.trt_cache import (
    DEFAULT_TENSORRT,
    TensorRTCache,
    cache_of,
    cache_version,
    cache_warning,
    write_cache,
)
from device.engine.preprocessing import describe
from toolkit.cli.options.range_outputs import write_bytes, write_model
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections.adjust import adjusted_for
from toolkit.quantize.qdq.check import check_qdq
from toolkit.quantize.qdq.export import TARGETS, export_form
from toolkit.quantize.ranges.table_file import (
    TABLE,
    FittedTable,
    RangesFile,
    fit_table,
    foreign_notes,
    read_ranges,
)

MAX_SHOWN = 10  # changed ranges on the terminal


@dataclass(frozen=True, slots=True)
class RangesRequest:
    """What to read: `source`, the plain `model` of the ranges, ranges to compare `against`."""

    source: Path
    model: Path | None
    against: Path | None
    any_weight_scale: bool
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write. `tensorrt` reads the cache, `qdq_for` the Q/DQ model."""

    table: Path | None
    cache: Path | None
    tensorrt: str | None
    qdq: Path | None
    qdq_for: str
    adjusted_model: Path | None
    plain: Path | None
    layers: Path | None


@dataclass(frozen=True, slots=True)
class RangesOnModel:
    """A model after the passes, and the ranges under its tensor names."""

    graph: ir.Model
    fitted: FittedTable


@dataclass(frozen=True, slots=True)
class RangesResult:
    """The ranges of `source`, on a model if there is one, and the files written."""

    request: RangesRequest
    ranges: RangesFile
    on_model: RangesOnModel | None
    difference: RangesComparison | None
    notes: tuple[str, ...]
    written: tuple[Path, ...]


def convert_ranges(request: RangesRequest, outputs: Outputs) -> RangesResult:
    """Read, compare and write ranges.

    Raises BuildError: a file cannot be read or written, or its format cannot hold the ranges.
    """
    tensorrt = outputs.tensorrt
    version = None if tensorrt is None else cache_version(tensorrt)  # refused before the work
    shapes = dict(request.shapes)
    ranges = read_ranges(request.source, shapes=shapes, any_weight_scale=request.any_weight_scale)
    difference = None
    if request.against is not None:
        other = read_ranges(request.against, shapes=shapes, any_weight_scale=True)
        difference = compare_ranges(ranges.table.tensors, other.table.tensors)
    ranges, on_model = _on_model(ranges, request.model, shapes)
    _refuse_unfit(request.source, ranges, outputs)
    rows: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (outputs.table, lambda path: write_table(path, ranges.table)),
        (outputs.cache, lambda path: write_cache(path, _cache(ranges, version))),
        (
            outputs.qdq,
            lambda path: write_model(path, _qdq(_need_model(on_model, "--qdq"), outputs.qdq_for)),
        ),
        (
            outputs.adjusted_model,
            lambda path: write_model(path, _need_model(on_model, "--adjusted-model").graph),
        ),
        (outputs.plain, lambda path: write_model(path, _plain(ranges, request.source))),
        (outputs.layers, lambda path: write_bytes(path, _layers(ranges, on_model))),
    )
    written = []
    for path, write in rows:
        if path:
            write(path)
            written.append(path)
    notes = list(ranges.notes) + (list(on_model.fitted.notes) if on_model else [])
    warning = cache_warning(tensorrt) if outputs.cache and tensorrt else None
    notes += [warning] if warning else []
    return RangesResult(request, ranges, on_model, difference, tuple(notes), tuple(written))


def as_text(result: RangesResult) -> str:
    """Return the report for people."""
    ranges, source = result.ranges, result.request.source
    header = f" (TRT-{ranges.cache.version}-{ranges.cache.algorithm})" if ranges.cache else ""
    text = f"{source}: {ranges.kind}{header}, {len(ranges.table.tensors)} ranges"
    if result.on_model is not None:
        fitted = result.on_model.fitted
        text += f", {fitted.ranges} of the model's {fitted.tensors} tensors have one"
        floats = fitted.table.keep_float
        text += f"; {len(floats)} nodes in floating point" if floats else ""
    lines = [text, _preprocessing_text(ranges.table)]
    if result.difference and result.request.against:
        lines.append(_difference_text(result.difference, result.request.against))
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"wrote {path}" for path in result.written]
    return "\n".join(lines)


def as_builtins(result: RangesResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    ranges, difference = result.ranges, result.difference
    fitted = result.on_model.fitted if result.on_model else None
    return {
        "kind": ranges.kind,
        "version": ranges.cache.version if ranges.cache else None,
        "algorithm": ranges.cache.algorithm if ranges.cache else None,
        "preprocessing": msgspec.to_builtins(ranges.table.preprocessing)
        if ranges.table.preprocessing
        else None,
        "ranges": ranges.table.tensors,
        "keep_float": list(fitted.table.keep_float if fitted else ranges.table.keep_float),
        "model": None
        if fitted is None
        else {
            "tensors": fitted.tensors,
            "with_range": fitted.ranges,
            "unknown": list(fitted.unknown),
            "gone": list(fitted.fused),
            "inferred": list(fitted.inferred),
            "missing": list(fitted.missing),
            "left_float": list(fitted.float_nodes),
        },
        "against": msgspec.to_builtins(difference) if difference else None,
        "notes": list(result.notes),
        "wrote": [str(path) for path in result.written],
    }


def _refuse_unfit(source: Path, ranges: RangesFile, outputs: Outputs) -> None:
    """Refuse a format that cannot hold the ranges."""
    if outputs.cache and ranges.table.adjusted and outputs.adjusted_model is None:
        raise BuildError(
            f"{source} holds adjustments of weights, but a TensorRT cache holds ranges alone; "
            "write the model that they belong to with --model and --adjusted-model."
        )
    if ranges.table.dummy and (outputs.cache or outputs.qdq):
        raise BuildError(
            f"{source} holds dummy ranges, good for timing only, and neither a TensorRT cache nor "
            "a Q/DQ model can say so; calibrate the model first."
        )


def _on_model(
    ranges: RangesFile, model: Path | None, shapes: dict[str, tuple[int, ...]]
) -> tuple[RangesFile, RangesOnModel | None]:
    """Return the ranges on `model`, or on the model that they came with."""
    if model is not None:
        imported = import_model(model, shapes=shapes)
        graph, _ = run_passes(imported.model)
        fitted = fit_table(ranges.table, imported.model, graph)
        on = RangesOnModel(adjusted_for(graph, ranges.table, imported.sha256), fitted)
        if ranges.kind == TABLE:
            notes = (*ranges.notes, *foreign_notes(ranges.table, imported.sha256))
            ranges = replace(ranges, notes=notes)
        if ranges.cache is not None:  # which says nothing of its model
            table = msgspec.structs.replace(ranges.table, model_sha256=imported.sha256)
            ranges = replace(ranges, table=table)
        return ranges, on
    if ranges.plain is None:
        return ranges, None
    graph, _ = run_passes(ranges.plain.model)
    return ranges, RangesOnModel(graph, fit_table(ranges.table, ranges.plain.model, graph))


def _preprocessing_text(table: CalibrationTable) -> str:
    if not table.preprocessing:
        return "preprocessing: not recorded"
    return f"preprocessing: {describe(table.preprocessing)}"


def _cache(ranges: RangesFile, version: str | None) -> TensorRTCache:
    if ranges.cache is not None and version in {None, ranges.cache.version}:
        return ranges.cache
    return cache_of(ranges.table.tensors, version or cache_version(DEFAULT_TENSORRT))


def _qdq(on_model: RangesOnModel, form: str) -> ir.Model:
    table = on_model.fitted.table
    model = export_form(on_model.graph, table.tensors, form, keep_float=frozenset(table.keep_float))
    violations = check_qdq(model, form) if form in TARGETS else ()
    if violations:
        raise BuildError(
            f"The Q/DQ model for {form} breaks {len(violations)} rules of TensorRT, first "
            f"{violations[0]}. Nothing was written; calibrate again with --keep-float for the node."
        )
    return model


def _need_model(on_model: RangesOnModel | None, option: str) -> RangesOnModel:
    if on_model is None:
        raise BuildError(f"{option} puts the ranges into a model, but none is given; add --model.")
    return on_model


def _layers(ranges: RangesFile, on_model: RangesOnModel | None) -> bytes:
    names = on_model.fitted.table.keep_float if on_model else ranges.table.keep_float
    return ",".join(f"{name}:fp16" for name in names).encode()


def _plain(ranges: RangesFile, source: Path) -> ir.Model:
    if ranges.plain is None:
        raise BuildError(
            f"--plain writes a Q/DQ model without its Q/DQ, but {source} is a {ranges.kind}, which "
            "holds no model; leave --plain out."
        )
    return ranges.plain.model


def _difference_text(difference: RangesComparison, against: Path) -> str:
    lines = [
        f"against {against}: {difference.equal} ranges equal, {len(difference.changed)} differ, "
        f"{len(difference.only_first)} only here, {len(difference.only_second)} only there"
    ]
    lines += [
        f"  {one.tensor}: {one.first:.6g} here, {one.second:.6g} there ({one.factor:.3g} times)"
        for one in difference.changed[:MAX_SHOWN]
    ]
    hidden = len(difference.changed) - MAX_SHOWN
    return "\n".join([*lines, f"  and {hidden} more"] if hidden > 0 else lines)
