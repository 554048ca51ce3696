"""Build an engine for `tandem build`, and say what is reported of it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from calibration.table import encode_table
from device.engine.file import open_engine
from device.errors import ConfigError
from device.profile import load_profile
from toolkit.cli.actions.cached_build import Built
from toolkit.cli.actions.calibration import range_options
from toolkit.cli.actions.outputs import need_folders
from toolkit.cli.actions.planning import plan_options
from toolkit.cli.commands.build import Build
from toolkit.cli.options.plan import KernelOptions
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.cli.progress import progress_bar
from toolkit.engine.build import BuildOptions, BuildResult, build_engine
from toolkit.engine.report_text import build_text
from toolkit.gpu.schedule.tactics import TacticOptions
from toolkit.html.page import write_page
from toolkit.importers.source import ModelPath
from toolkit.partition.costs.measured import Measured, load_measured
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.quantize.ranges.measure import Ranges
from toolkit.quantize.ranges.report_text import (
    effects_builtins,
    judgement_builtins,
    ranges_builtins,
)
from toolkit.quantize.ranges.table_file import read_ranges
from toolkit.workers import Workers


def build_now(
    options: Build, workers: Workers | None = None, measured: dict[str, Ranges] | None = None
) -> Built:
    """Build and write the files. Raises TandemError.

    `measured`: calibrations of other builds, which this one takes and adds to.
    """
    need_folders(options.ranges.save_table, options.html, model=options.model)
    with progress_bar(options.model.name) as report:
        source = ModelPath(options.model, options.source.inputs_as_nchw)
        library_options = replace(_library_options(options, workers), measured=measured)
        if options.measure_on is not None:
            from toolkit.cli.actions.measure_on import measure_on

            library_options = measure_on(options, library_options, report)
        result = build_engine(source, options.profile, options.engine, library_options, report)
    if options.html is not None:
        _write_page(result, options.html)
    table = None if result.calibration is None else encode_table(result.calibration.table)
    return Built(build_text(result, options.model), json.dumps(as_builtins(result)), table)


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
        int4_weights=options.int4_weights,
        shapes=shapes,
        dims=dims,
        plan=plan_options(options.objective, options.plan),
        plugins=source.plugins,
        tactics=_tactic_options(options.kernels),
        fallback=not options.no_fallback,
        gpu_backend=options.gpu_backend,
        preprocess_on=options.preprocess_on,
        node_times=_node_times(options.measured, options.profile),
    )


def _node_times(paths: tuple[Path, ...], profile: str) -> tuple[Measured, ...]:
    """Read files of measured times.

    Raises ConfigError: one cannot be read or is of another board, or two are of one precision.
    """
    times = tuple(load_measured(path) for path in paths)
    board = load_profile(profile).name if paths else profile
    for path, rows in zip(paths, times, strict=True):
        if rows.profile != board:
            raise ConfigError(
                f"{path} holds times of profile {rows.profile!r}, and the build is for {board!r}: "
                "measure there, or leave the file out."
            )
    precisions = [row.precision for row in times]
    if twice := sorted({name for name in precisions if precisions.count(name) > 1}):
        raise ConfigError(
            f"Two files of `tandem build --measured` hold times in {twice[0]}: give one for each "
            "precision."
        )
    return times


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
        "gains": [asdict(gain) for gain in result.gains],
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
    report, gains = build_text(result), result.gains
    page = engine_page(facts, notes=result.notes, gpu=result.gpu, gains=gains, report=report)
    write_page(path, page)
