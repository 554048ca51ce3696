"""`tandem calibrate`: data -> INT8 ranges as table, TensorRT cache, Q/DQ model and report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.calibration import (
    KeepOption,
    calibration_options,
    parse_shapes,
    range_options,
)
from toolkit.cli.options.choices import Switch
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.model import layout_option
from toolkit.cli.options.names import complete_profile
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.preprocess import PreprocessOptions
from toolkit.cli.options.progress import progress_bar
from toolkit.cli.options.range_outputs import need_folders, output_options

if TYPE_CHECKING:
    from toolkit.plugins import Plugin


@click.command(
    epilog="Example: tandem calibrate model.onnx --data images/ --method auto "
    "--html report.html -o model.calib.json"
)
@click.argument("model", type=click.Path(path_type=Path))
@calibration_options(required=True)
@click.option(
    "--profile",
    shell_complete=complete_profile,
    help="Calibrate the graph that a build for this profile makes, rewrites for its DLA included.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="[default: MODEL.calib.json]")
@output_options
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with histograms.")
@click.option(
    "--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.",
)  # fmt: skip
@layout_option
@memory_option
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def calibrate(
    model: Path,
    profile: str | None,
    data: Path,
    samples: int | None,
    method: str,
    budget: str | None,
    keep: KeepOption | None,
    resume: Path | None,
    preprocess: PreprocessOptions,
    equalise: Switch | None,
    bias_correction: Switch | None,
    keep_float: tuple[str, ...],
    accept_loss: bool,
    out: Path | None,
    cache: Path | None,
    tensorrt: str | None,
    qdq: Path | None,
    qdq_for: str,
    adjusted_model: Path | None,
    html: Path | None,
    shapes: dict[str, tuple[int, ...]],
    inputs_as_nchw: bool,
    plugins: "tuple[Plugin, ...]",
    as_json: bool,
) -> None:
    """Find the INT8 ranges of a MODEL on real data.

    `--method auto` tries the range of every method, tensor by tensor, and takes the one with the
    least error at the outputs. INT8 is judged on samples held out from the ranges. If an output
    misses its target, the nodes whose INT8 costs most stay in floating point. If it loses too much,
    the command ends with an error; the table is written, but a build refuses it.
    """
    _need_the_graph(profile, cache or qdq, adjusted_model)
    need_folders(out, cache, qdq, adjusted_model, html)

    from toolkit.graph import native

    native.start()

    from calibration.trt_cache import DEFAULT_TENSORRT, cache_version, cache_warning
    from toolkit.cli.actions.calibrate import (
        CalibrateRequest,
        Outputs,
        calibrate_model,
        keep_weights,
        refuse_loss,
    )
    from toolkit.importers.source import ModelPath
    from toolkit.quantize.ranges.report_text import assumed_lines, ranges_builtins, ranges_text

    cache_version(tensorrt or DEFAULT_TENSORRT)  # refused before data is read
    warning = cache_warning(tensorrt) if cache and tensorrt else None
    notes = [warning] if warning else []
    options = range_options(
        method, samples, budget, keep, resume, preprocess, equalise, bias_correction, keep_float
    )
    if cache and adjusted_model is None:
        options, weight_notes = keep_weights(options)
        notes += weight_notes
    table = out or model.with_suffix(".calib.json")
    outputs = Outputs(table, cache, tensorrt, qdq, qdq_for, adjusted_model, html)
    source = ModelPath(model, inputs_as_nchw)
    request = CalibrateRequest(source, data, profile, shapes, plugins, options, accept_loss)
    with progress_bar(model.name) as report:
        ranges, written = calibrate_model(request, outputs, report)
    if as_json:
        click.echo(json.dumps({"table": str(table), "notes": notes, **ranges_builtins(ranges)}))
    else:
        click.echo(ranges_text(ranges))
        for note in notes:
            click.echo(f"note: {note}")
        for path in written:
            click.echo(f"wrote {path}")
        if ranges.table.refused:
            click.echo(f"note: builds refuse {table} without --accept-loss")
        for line in assumed_lines(ranges):
            click.echo(line)
    refuse_loss(ranges, request)


def _need_the_graph(profile: str | None, other: Path | None, adjusted_model: Path | None) -> None:
    """Refuse to write ranges of a rewritten graph without the graph."""
    if profile and other and adjusted_model is None:
        raise click.UsageError(
            "With --profile the ranges are those of a rewritten graph: give --adjusted-model, too, "
            "which writes it."
        )
