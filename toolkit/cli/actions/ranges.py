"""Read INT8 ranges from one format, write them in others, and compare them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
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
from toolkit.cli.actions.outputs import refuse_unused, write_bytes, write_model
from toolkit.cli.commands.ranges import Ranges
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections.adjust import adjusted_for
from toolkit.quantize.float8.table import for_float8
from toolkit.quantize.qdq.check import check_qdq
from toolkit.quantize.qdq.export import FLOAT_FORMS, TARGETS, export_form
from toolkit.quantize.ranges.table_file import (
    TABLE,
    FittedTable,
    RangesFile,
    fit_table,
    foreign_notes,
    read_ranges,
)

MAX_SHOWN = 10  # changed ranges on the terminal


def ranges(options: Ranges) -> None:
    """Read, compare and write ranges, and print the report.

    Raises BuildError: a file cannot be read or written, or its format cannot hold the ranges.
    Raises click.UsageError.
    """
    refuse_unused(options.outputs)
    result = _convert(options)
    click.echo(json.dumps(_builtins(result)) if options.as_json else _text(result, options))


@dataclass(frozen=True, slots=True)
class RangesOnModel:
    """A model after the passes, and the ranges under its tensor names."""

    graph: ir.Model
    fitted: FittedTable


@dataclass(frozen=True, slots=True)
class RangesResult:
    """The ranges of a file, on a model if there is one, and the files written."""

    ranges: RangesFile
    on_model: RangesOnModel | None
    difference: RangesComparison | None
    notes: tuple[str, ...]
    written: tuple[Path, ...]


def _convert(options: Ranges) -> RangesResult:
    outputs, shapes = options.outputs, dict(options.shapes)
    version = None if outputs.tensorrt is None else cache_version(outputs.tensorrt)
    file = read_ranges(options.source, shapes=shapes, any_weight_scale=options.any_weight_scale)
    difference = None
    if options.against is not None:
        reference_file = read_ranges(options.against, shapes=shapes, any_weight_scale=True)
        difference = compare_ranges(file.table.tensors, reference_file.table.tensors)
    file, on_model = _on_model(file, options.model, shapes)
    _refuse_unfit(file, options)
    written = _write_files(file, on_model, options, version)
    notes = list(file.notes) + (list(on_model.fitted.notes) if on_model else [])
    warning = cache_warning(outputs.tensorrt) if outputs.cache and outputs.tensorrt else None
    notes += [warning] if warning else []
    return RangesResult(file, on_model, difference, tuple(notes), written)


def _write_files(
    file: RangesFile, on_model: RangesOnModel | None, options: Ranges, version: str | None
) -> tuple[Path, ...]:
    """Write the files that are asked for; return their paths."""
    outputs = options.outputs
    rows: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (options.table, lambda path: write_table(path, file.table)),
        (outputs.cache, lambda path: write_cache(path, _cache(file, version))),
        (
            outputs.qdq,
            lambda path: write_model(path, _qdq(file, on_model, options)),
        ),
        (
            outputs.adjusted_model,
            lambda path: write_model(path, _need_model(on_model, "--adjusted-model").graph),
        ),
        (options.plain, lambda path: write_model(path, _plain(file, options.source))),
        (options.layers, lambda path: write_bytes(path, _layers(file, on_model))),
    )
    written = []
    for path, write in rows:
        if path:
            write(path)
            written.append(path)
    return tuple(written)


def _text(result: RangesResult, options: Ranges) -> str:
    """Return the report for people."""
    file = result.ranges
    header = f" (TRT-{file.cache.version}-{file.cache.algorithm})" if file.cache else ""
    text = f"{options.source}: {file.kind}{header}, {len(file.table.tensors)} ranges"
    if result.on_model is not None:
        fitted = result.on_model.fitted
        text += f", {fitted.ranges} of the model's {fitted.tensors} tensors have one"
        floats = fitted.table.keep_float
        text += f"; {len(floats)} nodes in floating point" if floats else ""
    lines = [text, _preprocessing_text(file.table)]
    if result.difference and options.against:
        lines.append(_difference_text(result.difference, options.against))
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"wrote {path}" for path in result.written]
    return "\n".join(lines)


def _builtins(result: RangesResult) -> dict[str, Any]:
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


def _refuse_unfit(ranges: RangesFile, options: Ranges) -> None:
    """Refuse a format that cannot hold the ranges."""
    source, outputs = options.source, options.outputs
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
        adjusted = adjusted_for(graph, ranges.table, imported.sha256)
        on = RangesOnModel(adjusted, fit_table(ranges.table, imported.model, adjusted))
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


def _for_qdq(file: RangesFile, on_model: RangesOnModel | None, options: Ranges) -> RangesOnModel:
    """Return what a Q/DQ model is made of: for floats without what makes up for errors of INT8."""
    needed = _need_model(on_model, "--qdq")
    if options.outputs.qdq_for not in FLOAT_FORMS or not file.table.adjusted:
        return needed
    table = for_float8(file.table)
    _, plain = _on_model(replace(file, table=table), options.model, dict(options.shapes))
    return _need_model(plain, "--qdq")


def _qdq(file: RangesFile, on_model: RangesOnModel | None, options: Ranges) -> ir.Model:
    fit, form = _for_qdq(file, on_model, options), options.outputs.qdq_for
    table = fit.fitted.table
    model = export_form(fit.graph, table.tensors, form, keep_float=frozenset(table.keep_float))
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
