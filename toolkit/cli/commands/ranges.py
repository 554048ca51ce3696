"""`tandem ranges`: INT8 ranges from one format to another, and against each other."""

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
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.range_outputs import output_options, write_bytes, write_model
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.corrections.adjust import adjusted_for
from toolkit.quantize.qdq.export import export_form
from toolkit.quantize.ranges.table_file import (
    TABLE,
    FittedTable,
    RangesFile,
    fit_table,
    foreign_notes,
    read_ranges,
)

_SHOWN = 10  # changed ranges on the terminal


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A model after the passes, and the ranges in its names."""

    graph: ir.Model
    fitted: FittedTable


@click.command(
    epilog="Example: tandem ranges qat.onnx --cache qat.cache --plain plain.onnx --layers fp16.txt"
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The plain ONNX model that the ranges are of. [default: that of a Q/DQ model]",
)
@click.option("--against", type=click.Path(path_type=Path), help="Compare with these ranges.")
@click.option("--table", type=click.Path(path_type=Path), help="Write a calibration table.")
@output_options
@click.option("--plain", type=click.Path(path_type=Path), help="Write a Q/DQ model without Q/DQ.")
@click.option(
    "--layers",
    type=click.Path(path_type=Path),
    help="Write the nodes in floating point as trtexec's --layerPrecisions takes them.",
)
@click.option(
    "--any-weight-scale",
    is_flag=True,
    help="Take weights of a Q/DQ model whose scale is not max|w| / 127.",
)
@click.option(
    "--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def ranges(
    source: Path,
    model: Path | None,
    against: Path | None,
    table: Path | None,
    cache: Path | None,
    tensorrt: str | None,
    qdq: Path | None,
    qdq_for: str,
    adjusted_model: Path | None,
    plain: Path | None,
    layers: Path | None,
    any_weight_scale: bool,
    shapes: dict[str, tuple[int, ...]],
    as_json: bool,
) -> None:
    """Show, compare and convert the INT8 ranges in SOURCE.

    SOURCE is a calibration table, a TensorRT cache or a Q/DQ model; its content tells which. Scales
    come out of every format as they went in, to the last bit.
    """
    version = None if tensorrt is None else cache_version(tensorrt)  # refused before the work
    found = read_ranges(source, shapes=shapes, any_weight_scale=any_weight_scale)
    other = None if against is None else read_ranges(against, shapes=shapes, any_weight_scale=True)
    found, on = _on_model(found, model, shapes)
    if cache and found.table.adjusted and adjusted_model is None:
        raise BuildError(
            f"{source} holds adjustments of weights, but a TensorRT cache holds ranges alone; "
            "write the model that they belong to with --model and --adjusted-model."
        )
    if found.table.dummy and (cache or qdq):
        raise BuildError(
            f"{source} holds dummy ranges, good for timing only, and neither a TensorRT cache nor "
            "a Q/DQ model can say so; calibrate the model first."
        )
    outputs: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (table, lambda path: write_table(path, found.table)),
        (cache, lambda path: write_cache(path, _cache(found, version))),
        (qdq, lambda path: write_model(path, _qdq(_placed(on, "--qdq"), qdq_for))),
        (adjusted_model, lambda path: write_model(path, _placed(on, "--adjusted-model").graph)),
        (plain, lambda path: write_model(path, _plain(found, source))),
        (layers, lambda path: write_bytes(path, _layers(found, on))),
    )
    written = [path for path, _ in outputs if path]
    for path, write in outputs:
        if path:
            write(path)
    difference = compare_ranges(found.table.tensors, other.table.tensors) if other else None
    notes = list(found.notes) + (list(on.fitted.notes) if on else [])
    warning = cache_warning(tensorrt) if cache and tensorrt else None
    notes += [warning] if warning else []
    if as_json:
        click.echo(json.dumps(_builtins(found, on, difference, notes, written)))
        return
    click.echo(_text(source, found, on))
    if difference and against:
        click.echo(_difference_text(difference, against))
    for note in notes:
        click.echo(f"note: {note}")
    for path in written:
        click.echo(f"wrote {path}")


def _on_model(
    found: RangesFile, model: Path | None, shapes: dict[str, tuple[int, ...]]
) -> tuple[RangesFile, _Fitted | None]:
    """The ranges on the model named, or on the one that they came with."""
    if model is not None:
        imported = import_model(model, shapes=shapes)
        graph, _ = run_passes(imported.model)
        fitted = fit_table(found.table, imported.model, graph)
        on = _Fitted(adjusted_for(graph, found.table, imported.sha256), fitted)
        if found.kind == TABLE:
            notes = (*found.notes, *foreign_notes(found.table, imported.sha256))
            found = replace(found, notes=notes)
        if found.cache is not None:  # which says nothing of its model
            table = msgspec.structs.replace(found.table, model_sha256=imported.sha256)
            found = replace(found, table=table)
        return found, on
    if found.plain is None:
        return found, None
    graph, _ = run_passes(found.plain.model)
    return found, _Fitted(graph, fit_table(found.table, found.plain.model, graph))


def _cache(found: RangesFile, version: str | None) -> TensorRTCache:
    if found.cache is not None and version in {None, found.cache.version}:
        return found.cache
    return cache_of(found.table.tensors, version or cache_version(DEFAULT_TENSORRT))


def _qdq(on: _Fitted, form: str) -> ir.Model:
    table = on.fitted.table
    return export_form(on.graph, table.tensors, form, keep_float=frozenset(table.keep_float))


def _placed(on: _Fitted | None, option: str) -> _Fitted:
    if on is None:
        raise BuildError(f"{option} puts the ranges into a model, but none is given; add --model.")
    return on


def _layers(found: RangesFile, on: _Fitted | None) -> bytes:
    names = on.fitted.table.keep_float if on else found.table.keep_float
    return ",".join(f"{name}:fp16" for name in names).encode()


def _plain(found: RangesFile, source: Path) -> ir.Model:
    if found.plain is None:
        raise BuildError(
            f"--plain writes a Q/DQ model without its Q/DQ, but {source} is a {found.kind}, which "
            "holds no model; leave --plain out."
        )
    return found.plain.model


def _text(source: Path, found: RangesFile, on: _Fitted | None) -> str:
    header = f" (TRT-{found.cache.version}-{found.cache.algorithm})" if found.cache else ""
    text = f"{source}: {found.kind}{header}, {len(found.table.tensors)} ranges"
    if on is None:
        return text
    fitted = on.fitted
    text += f", {fitted.ranges} of the model's {fitted.tensors} tensors have one"
    kept = fitted.table.keep_float
    return f"{text}; {len(kept)} nodes in floating point" if kept else text


def _difference_text(difference: RangesComparison, against: Path) -> str:
    lines = [
        f"against {against}: {difference.equal} ranges equal, {len(difference.changed)} differ, "
        f"{len(difference.only_first)} only here, {len(difference.only_second)} only there"
    ]
    lines += [
        f"  {one.tensor}: {one.first:.6g} here, {one.second:.6g} there ({one.factor:.3g} times)"
        for one in difference.changed[:_SHOWN]
    ]
    left = len(difference.changed) - _SHOWN
    return "\n".join([*lines, f"  and {left} more"] if left > 0 else lines)


def _builtins(
    found: RangesFile,
    on: _Fitted | None,
    difference: RangesComparison | None,
    notes: list[str],
    written: list[Path],
) -> dict[str, Any]:
    table: CalibrationTable = found.table
    fitted = on.fitted if on else None
    return {
        "kind": found.kind,
        "version": found.cache.version if found.cache else None,
        "algorithm": found.cache.algorithm if found.cache else None,
        "ranges": table.tensors,
        "keep_float": list(fitted.table.keep_float if fitted else table.keep_float),
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
        "notes": notes,
        "wrote": [str(path) for path in written],
    }
