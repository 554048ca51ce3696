"""Build an engine for `tandem build`, and report on it."""

import json
from pathlib import Path
from typing import Any

import click
import msgspec

from device.engine.file import open_engine
from toolkit.cli.actions.calibration import range_options, workers_of
from toolkit.cli.actions.outputs import need_folders, print_page_path
from toolkit.cli.actions.planning import plan_options
from toolkit.cli.command import given
from toolkit.cli.commands.build import Build
from toolkit.cli.options.plan import KernelOptions
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.cli.progress import progress_bar
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.engine.report_text import build_text
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.html.page import write_page
from toolkit.importers.onnx import source_path
from toolkit.importers.source import ModelPath
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.quantize.ranges.report_text import (
    effects_builtins,
    judgement_builtins,
    ranges_builtins,
)
from toolkit.quantize.ranges.table_file import read_ranges
from toolkit.workers import Workers


def build(options: Build) -> None:
    """Build, write the files and print the report. Raises TandemError, click.UsageError."""
    _refuse_two_sources(options)
    _refuse_unused(options)
    need_folders(options.ranges.save_table, options.html)
    with progress_bar(options.model.name) as report, workers_of(options.calibration) as workers:
        library_options = _library_options(options, workers)
        source = ModelPath(options.model, options.source.inputs_as_nchw)
        out = options.out or source_path(source).with_suffix(".engine")
        result = build_engine(source, options.profile, out, library_options, report)
    if options.html is not None:
        _write_page(result, options.html)
    click.echo(json.dumps(as_builtins(result)) if options.as_json else build_text(result))
    print_page_path(options.html, as_json=options.as_json)


def _refuse_two_sources(options: Build) -> None:
    """Refuse more than one source of ranges."""
    ranges = options.ranges
    if ranges.table and (options.data or ranges.save_table):
        raise click.UsageError("--table replaces --data and --save-table; give one or the other.")
    if ranges.dummy_ranges and (options.data or ranges.table):
        raise click.UsageError("--dummy-ranges replaces --data and --table; give one or the other.")


def _refuse_unused(options: Build) -> None:
    """Refuse options of INT8 that would have no effect."""
    calibration, table = options.calibration, options.ranges.table
    if options.data is None:
        rows = (
            ("--samples", calibration.samples),
            ("--save-table", options.ranges.save_table),
            ("--budget", calibration.budget),
            ("--keep", calibration.keep),
            ("--resume", calibration.resume),
            ("--workers", calibration.workers),
            ("--equalise", calibration.equalise),
            ("--bias-correction", calibration.bias_correction),
            ("--keep-float", calibration.keep_float),
            ("--accept-loss", calibration.accept_loss and not table),
            ("--method", given("method")),
            ("--strict", calibration.preprocess.strict),
        )
        for option, value in rows:
            if value:
                raise click.UsageError(f"{option} belongs to calibration; give --data with it.")
    dummy_ranges = options.ranges.dummy_ranges
    sources = (("--data", options.data), ("--table", table), ("--dummy-ranges", dummy_ranges))
    for option, value in sources:
        if value and options.precision not in (None, "int8", "best"):
            raise click.UsageError(
                f"{option} gives INT8 its ranges; --precision {options.precision} has no use for "
                "it."
            )


def _library_options(options: Build, workers: Workers | None) -> BuildOptions:
    source, table = options.source, options.ranges.table
    shapes, dims = source.shapes, options.dims
    return BuildOptions(
        precision=options.precision,
        jetpack=options.jetpack,
        data=options.data,
        ranges=range_options(options.calibration, workers),
        table=read_ranges(table, shapes=shapes, dims=dims, any_weight_scale=True).table
        if table
        else None,
        save_table=options.ranges.save_table,
        dummy_ranges=options.ranges.dummy_ranges,
        accept_loss=options.calibration.accept_loss,
        shapes=shapes,
        dims=dims,
        plan=plan_options(options.objective, options.plan),
        plugins=source.plugins,
        tactics=_tactic_options(options.kernels),
        fallback=not options.no_fallback,
        gpu_backend=options.gpu_backend,
        preprocess_on=options.preprocess_on,
    )


def _tactic_options(options: KernelOptions) -> TacticOptions:
    mib = options.workspace_mib
    return TacticOptions(
        exhaustive=options.exhaustive,
        workspace_bytes=None if mib is None else int(mib * 2**20),
        timings=options.timings,
    )


def as_builtins(result: BuildResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    calibration = result.calibration
    return {
        "engine": str(result.path),
        "bytes": result.path.stat().st_size,
        "manifest": msgspec.to_builtins(result.manifest),
        "passes": {step.name: step.changes for step in result.passes},
        "rewrites": [{"rewrite": row.rewrite, "node": row.node} for row in result.rewrites],
        "plan": plan_builtins(result.plan),
        "notes": list(result.notes),
        "gpu": [msgspec.to_builtins(report) for report in result.gpu],
        "keep_float": dict(result.kept),
        "calibration": ranges_builtins(calibration) if calibration else None,
        "loss": judgement_builtins(result.loss) if result.loss is not None else None,
        "scale_rules": {
            "changes": result.scale_rules.changes,
            "worst_factor": result.scale_rules.worst_factor,
            "sqnr_db": effects_builtins(result.scale_rules.effects),
        },
    }


def _write_page(result: BuildResult, path: Path) -> None:
    """Write the page of the engine that was built."""
    with open_engine(result.path) as engine:
        facts = engine_facts(engine)
    report = build_text(result)
    write_page(path, engine_page(facts, notes=result.notes, gpu=result.gpu, report=report))
