"""`tandem calibrate`: data -> INT8 ranges, in every form that a board wants."""

import json
from dataclasses import replace
from pathlib import Path

import click
import onnx_ir as ir

from calibration.table import write_table
from calibration.trt_cache import (
    DEFAULT_TENSORRT,
    cache_of,
    cache_version,
    cache_warning,
    write_cache,
)
from toolkit.cli.options.calibration import (
    calibration_options,
    parse_shapes,
    progress_bar,
    range_options,
)
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.range_outputs import need_folders, output_options, write_bytes, write_model
from toolkit.engine.target import choose_target
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import ImportedModel, import_model
from toolkit.partition.planning.plan import PlanOptions
from toolkit.partition.prepare import prepare
from toolkit.plugins import Plugin
from toolkit.quantize.corrections.corrections import Switch
from toolkit.quantize.qdq.export import export_form
from toolkit.quantize.ranges.measure import RangeOptions, measure_ranges
from toolkit.quantize.ranges.report_html import ranges_html
from toolkit.quantize.ranges.report_text import ranges_builtins, ranges_text
from toolkit.quantize.ranges.table_file import has_qdq


@click.command(
    epilog="Example: tandem calibrate model.onnx --data images/ --method auto "
    "--html report.html -o model.calib.json"
)
@click.argument("model", type=click.Path(path_type=Path))
@calibration_options(required=True)
@click.option(
    "--profile",
    help="Calibrate the graph that a build for this profile makes, rewrites for its DLA included.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="[default: MODEL.calib.json]")
@output_options
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with histograms.")
@click.option(
    "--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.",
)  # fmt: skip
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def calibrate(
    model: Path,
    profile: str | None,
    data: Path,
    samples: int | None,
    method: str,
    budget: str | None,
    resume: Path | None,
    preprocess: Path | None,
    equalise: Switch | None,
    bias_correction: Switch | None,
    keep_float: tuple[str, ...],
    out: Path | None,
    cache: Path | None,
    tensorrt: str | None,
    qdq: Path | None,
    qdq_for: str,
    adjusted_model: Path | None,
    html: Path | None,
    shapes: dict[str, tuple[int, ...]],
    plugins: tuple[Plugin, ...],
    as_json: bool,
) -> None:
    """Find the INT8 ranges of an ONNX MODEL on real data.

    `--method auto` tries what every method proposes, tensor by tensor, and takes what does least
    harm at the outputs. `--budget` keeps nodes in floating point until a metric holds.
    """
    _need_the_graph(profile, cache or qdq, adjusted_model)
    version = cache_version(tensorrt or DEFAULT_TENSORRT)  # refused before the work
    need_folders(out, cache, qdq, adjusted_model, html)
    warning = cache_warning(tensorrt) if cache and tensorrt else None
    notes = [warning] if warning else []
    options = range_options(
        method, samples, budget, resume, preprocess, equalise, bias_correction, keep_float
    )
    if cache and adjusted_model is None:
        options, left_out = _weights_as_they_are(options)
        notes += left_out
    imported = import_model(model, shapes=shapes, plugins=plugins)
    graph = _graph_of(imported, profile)
    with progress_bar(model.name) as report:
        ranges = measure_ranges(graph, data, imported.sha256, options, report)
    path = out or model.with_suffix(".calib.json")
    write_table(path, ranges.table)
    if cache:
        write_cache(cache, cache_of(ranges.table.tensors, version))
    if qdq:
        keep = frozenset(ranges.table.keep_float)
        write_model(qdq, export_form(ranges.model, ranges.table.tensors, qdq_for, keep_float=keep))
    if adjusted_model:
        write_model(adjusted_model, ranges.model)
    if html:
        write_bytes(html, ranges_html(ranges, imported.name).encode())
    if as_json:
        click.echo(json.dumps({"table": str(path), "notes": notes, **ranges_builtins(ranges)}))
        return
    click.echo(ranges_text(ranges))
    for note in notes:
        click.echo(f"note: {note}")
    for written in (path, cache, qdq, adjusted_model, html):
        if written:
            click.echo(f"wrote {written}")


def _need_the_graph(profile: str | None, other: Path | None, adjusted_model: Path | None) -> None:
    """Refuse ranges in the names of a graph that nobody gets."""
    if profile and other and adjusted_model is None:
        raise click.UsageError(
            "With --profile the ranges are those of a rewritten graph: give --adjusted-model, too, "
            "which writes it."
        )


def _graph_of(imported: ImportedModel, profile: str | None) -> ir.Model:
    """The graph after the passes and, for a profile, the rewrites for its DLA."""
    if has_qdq(imported.model):
        raise BuildError(
            f"{imported.name} is quantized already: `tandem ranges` takes the ranges that its Q/DQ "
            "hold; to measure others give the plain model (`tandem ranges ... --plain`)."
        )
    graph, _ = run_passes(imported.model)
    if profile is None:
        return graph
    target = choose_target(profile)
    return prepare(graph, target.profile, PlanOptions(tensorrt=target.tensorrt)).model


def _weights_as_they_are(options: RangeOptions) -> tuple[RangeOptions, list[str]]:
    """Leave out the steps that change weights, and say so; refuse them where they are asked for."""
    asked = {"--equalise": options.equalise, "--bias-correction": options.correct_biases}
    for option, switch in asked.items():
        if switch not in {None, "off"}:
            raise click.UsageError(
                f"{option} {switch} changes weights, but a TensorRT cache holds ranges alone; "
                "write the model that they belong to with --adjusted-model, or leave out --cache."
            )
    if all(options.switch(switch) == "off" for switch in asked.values()):
        return options, []
    note = (
        "equalisation and bias correction were left out: the cache is for the model as it is; "
        "--adjusted-model writes a better one to go with it"
    )
    return replace(options, equalise="off", correct_biases="off"), [note]
