"""Measure INT8 ranges for `tandem calibrate`, and write them in every form."""

import json
from dataclasses import replace
from pathlib import Path

import click

from calibration.table import write_table
from calibration.trt_cache import (
    DEFAULT_TENSORRT,
    cache_of,
    cache_version,
    cache_warning,
    write_cache,
)
from toolkit.cli.actions.calibration import range_options, workers_of
from toolkit.cli.actions.outputs import need_folders, refuse_unused, write_bytes, write_model
from toolkit.cli.commands.calibrate import Calibrate
from toolkit.cli.options.ranges import RangeOutputs
from toolkit.cli.progress import progress_bar
from toolkit.engine.measure import CalibrateRequest, measure_model, measure_shard
from toolkit.importers.onnx import source_path
from toolkit.importers.source import ModelPath
from toolkit.quantize.loss.judge import check
from toolkit.quantize.qdq.export import FLOAT_FORMS, export_form
from toolkit.quantize.ranges.measure import RangeOptions, Ranges
from toolkit.quantize.ranges.report_html import ranges_html
from toolkit.quantize.ranges.report_text import assumed_lines, ranges_builtins, ranges_text
from toolkit.quantize.ranges.shards import observe_shard
from toolkit.workers import Workers


def calibrate(options: Calibrate) -> None:
    """Measure the ranges, write the files and print the report.

    Ranges that lose too much are written as a table that builds refuse, with the page.

    Raises TandemError: INT8 loses too much, the model is quantized already, or a file cannot be
    written. Raises click.UsageError.
    """
    outputs = options.outputs
    refuse_unused(outputs)
    _need_the_graph(options)
    files = (options.out, outputs.cache, outputs.qdq, outputs.adjusted_model, options.html)
    need_folders(*files, model=options.model)
    cache_version(outputs.tensorrt or DEFAULT_TENSORRT)  # refused before data is read
    _refuse_with_shards(options)
    with workers_of(options.calibration) as workers:
        if workers is not None:
            workers.prepare(observe_shard.__module__)
        request, notes = _request(options, workers)
        if options.shard is None:
            _calibrate(options, request, notes)
        else:
            _observe(options, request, *options.shard)


def _observe(options: Calibrate, request: CalibrateRequest, index: int, count: int) -> None:
    """Write the state of one shard."""
    out = options.out or options.model.with_suffix(f".{index}-{count}.state")
    with progress_bar(options.model.name) as report:
        write_bytes(out, measure_shard(request, index - 1, count, report))
    click.echo(json.dumps({"state": str(out)}) if options.as_json else f"wrote {out}")


def _refuse_with_shards(options: Calibrate) -> None:
    """Refuse options that have no effect on what one shard observes, or that cut data twice."""
    cuts = {
        "--shard": options.shard,
        "STATE": options.states,
        "--workers": options.calibration.workers,
    }
    names = [name for name, value in cuts.items() if value]
    if len(names) > 1:
        raise click.UsageError(f"{names[0]} and {names[1]} both cut the data; give one of them.")
    outputs = options.outputs
    forms = (outputs.cache, outputs.qdq, outputs.adjusted_model, options.html)
    if options.shard and any((*forms, options.calibration.resume)):
        raise click.UsageError("--shard writes a state and nothing else; leave other outputs out.")


def _calibrate(options: Calibrate, request: CalibrateRequest, notes: list[str]) -> None:
    table = options.out or options.model.with_suffix(".calib.json")
    with progress_bar(options.model.name) as report:
        ranges, name = measure_model(replace(request, accept_loss=True), report)
        written = _write_files(ranges, name, table, options)
    if options.as_json:
        click.echo(json.dumps({"table": str(table), "notes": notes, **ranges_builtins(ranges)}))
    else:
        _print(ranges, notes, written, table, options.model)
    if not request.accept_loss:
        check(ranges.judgement, source_path(request.model).name)


def _need_the_graph(options: Calibrate) -> None:
    """Refuse to write ranges of a rewritten graph without the graph."""
    outputs = options.outputs
    if options.profile and (outputs.cache or outputs.qdq) and outputs.adjusted_model is None:
        raise click.UsageError(
            "With --profile the ranges are those of a rewritten graph: give --adjusted-model, too, "
            "which writes it."
        )


def _request(options: Calibrate, workers: Workers | None) -> tuple[CalibrateRequest, list[str]]:
    """Return what is measured, and notes about it."""
    outputs, source = options.outputs, options.source
    warning = cache_warning(outputs.tensorrt) if outputs.cache and outputs.tensorrt else None
    notes = [warning] if warning else []
    ranges = replace(range_options(options.calibration, workers), states=options.states)
    if outputs.cache and outputs.adjusted_model is None:
        ranges, weight_notes = _keep_weights(ranges)
        notes += weight_notes
    if outputs.qdq and outputs.qdq_for in FLOAT_FORMS:
        ranges, float8_notes = _leave_out_corrections_of_int8(ranges, outputs.qdq_for)
        notes += float8_notes
    request = CalibrateRequest(
        ModelPath(options.model, source.inputs_as_nchw),
        options.data,
        options.profile,
        source.shapes,
        source.plugins,
        ranges,
        options.calibration.accept_loss,
    )
    return request, notes


def _keep_weights(options: RangeOptions) -> tuple[RangeOptions, list[str]]:
    """Switch off the steps that change weights; second, a note about it.

    Raises click.UsageError: the user switched one on.
    """
    switches = {
        "--equalise": options.equalise,
        "--round-weights": options.round_weights,
        "--bias-correction": options.correct_biases,
    }
    for option, switch in switches.items():
        if switch not in {None, "off"}:
            raise click.UsageError(
                f"{option} {switch} changes weights, but a TensorRT cache holds ranges alone; "
                "write the model that they belong to with --adjusted-model, or leave out --cache."
            )
    if all(options.switch(switch) == "off" for switch in switches.values()):
        return options, []
    note = (
        "corrections of weights were left out: the cache is for the model as it is; "
        "--adjusted-model writes a better one to go with it"
    )
    off = replace(options, equalise="off", round_weights="off", correct_biases="off")
    return off, [note]


def _leave_out_corrections_of_int8(
    options: RangeOptions, form: str
) -> tuple[RangeOptions, list[str]]:
    """Switch off what makes up for errors that floats do not make; second, a note about it.

    Raises click.UsageError: the user switched one on.
    """
    switches = {
        "--round-weights": options.round_weights,
        "--bias-correction": options.correct_biases,
    }
    for option, switch in switches.items():
        if switch not in {None, "off"}:
            raise click.UsageError(
                f"{option} {switch} makes up for errors of INT8, but --qdq-for {form} "
                "writes floats: leave one of them out."
            )
    off = replace(options, round_weights="off", correct_biases="off")
    name = form.removeprefix("tensorrt-").upper()
    return off, [
        f"rounded weights and corrected biases, which are for INT8, were left out for {name}"
    ]


def _write_files(ranges: Ranges, name: str, table: Path, options: Calibrate) -> tuple[Path, ...]:
    """Write the files and return their paths; of refused ranges those alone that say so."""
    write_table(table, ranges.table)
    refused = bool(ranges.judgement.broken) and not options.calibration.accept_loss
    outputs = options.outputs
    paths = [table]
    if not refused:
        _write_forms(ranges, outputs)
        forms = (outputs.cache, outputs.qdq, outputs.adjusted_model)
        paths += [path for path in forms if path]
    if options.html:
        write_bytes(options.html, ranges_html(ranges, name).encode())
        paths.append(options.html)
    return tuple(paths)


def _write_forms(ranges: Ranges, outputs: RangeOutputs) -> None:
    """Write the forms that cannot say what they lose."""
    table = ranges.table
    if outputs.cache:
        version = cache_version(outputs.tensorrt or DEFAULT_TENSORRT)
        write_cache(outputs.cache, cache_of(table.tensors, version))
    if outputs.qdq:
        keep = frozenset(table.keep_float)
        model = export_form(ranges.model, table.tensors, outputs.qdq_for, keep_float=keep)
        write_model(outputs.qdq, model)
    if outputs.adjusted_model:
        write_model(outputs.adjusted_model, ranges.model)


def _print(
    ranges: Ranges, notes: list[str], written: tuple[Path, ...], table: Path, model: Path
) -> None:
    click.echo(ranges_text(ranges))
    for note in notes:
        click.echo(f"note: {note}")
    for path in written:
        click.echo(f"wrote {path}")
    if ranges.table.refused:
        click.echo(f"note: builds refuse {table} without --accept-loss")
    for line in assumed_lines(ranges, model):
        click.echo(line)
