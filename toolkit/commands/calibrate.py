"""`tandem calibrate`: data -> INT8 ranges, in every form that a board wants."""

import json
from pathlib import Path

import click
import onnx_ir as ir

from calibration.table import CalibrationTable, write_table
from calibration.trt_cache import cache_of, cache_version, cache_warning, write_cache
from device.files import replacing
from toolkit.commands.calibration_options import (
    calibration_options,
    parse_shapes,
    progress_bar,
    range_options,
)
from toolkit.errors import BuildError
from toolkit.importer import import_model
from toolkit.int8.qdq_export import TARGETS, export_qdq
from toolkit.int8.ranges import measure_ranges
from toolkit.int8.ranges_html import ranges_html
from toolkit.int8.ranges_text import ranges_builtins, ranges_text
from toolkit.passes import run_passes


@click.command(
    epilog="Example: tandem calibrate model.onnx --data images/ --method auto "
    "--html report.html -o model.calib.json"
)
@click.argument("model", type=click.Path(path_type=Path))
@calibration_options(required=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="[default: MODEL.calib.json]")
@click.option("--cache", type=click.Path(path_type=Path), help="Write a TensorRT cache, too.")
@click.option(
    "--tensorrt", default="10.3.0", show_default=True, help="The TensorRT that reads the cache."
)
@click.option("--qdq", type=click.Path(path_type=Path), help="Write the model with Q/DQ, too.")
@click.option(
    "--qdq-for",
    type=click.Choice(list(TARGETS)),
    default="tensorrt-gpu",
    show_default=True,
    help="Who reads the Q/DQ model.",
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with histograms.")
@click.option(
    "--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def calibrate(
    model: Path,
    data: Path,
    samples: int | None,
    method: str,
    budget: str | None,
    resume: Path | None,
    preprocess: Path | None,
    out: Path | None,
    cache: Path | None,
    tensorrt: str,
    qdq: Path | None,
    qdq_for: str,
    html: Path | None,
    shapes: dict[str, tuple[int, ...]],
    as_json: bool,
) -> None:
    """Find the INT8 ranges of an ONNX MODEL on real data.

    `--method auto` tries what every method proposes, tensor by tensor, and takes what does least
    harm at the outputs. `--budget` keeps nodes in floating point until a metric holds.
    """
    version = cache_version(tensorrt)  # refused before the work
    warning = cache_warning(tensorrt) if cache else None
    imported = import_model(model, shapes=shapes)
    graph, _ = run_passes(imported.model)
    options = range_options(method, samples, budget, resume, preprocess)
    with progress_bar(model.name) as report:
        ranges = measure_ranges(graph, data, imported.sha256, options, report)
    target = out or model.with_suffix(".calib.json")
    write_table(target, ranges.table)
    if cache:
        write_cache(cache, cache_of(ranges.table.tensors, version))
    if qdq:
        _write_qdq(qdq, graph, ranges.table, qdq_for)
    if html:
        with replacing(html) as file:
            file.write(ranges_html(ranges, imported.name).encode())
    if as_json:
        click.echo(json.dumps({"table": str(target), **ranges_builtins(ranges)}))
        return
    click.echo(ranges_text(ranges))
    if warning:
        click.echo(f"note: {warning}")
    for written in (target, cache, qdq, html):
        if written:
            click.echo(f"wrote {written}")


def _write_qdq(path: Path, graph: ir.Model, table: CalibrationTable, target: str) -> None:
    keep = frozenset(table.keep_float)
    exported = export_qdq(graph, table.tensors, target, keep_float=keep)
    try:
        with replacing(path) as file:
            file.write(ir.to_proto(exported).SerializeToString(deterministic=True))
    except OSError as err:
        raise BuildError(f"{path} cannot be written: {err.strerror}; use another place.") from err
