"""Plan models for `tandem plan`, and report on the plan as text, JSON and a page."""

import gc
import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from device.engine.manifest import Precision
from device.errors import ConfigError
from device.selftest.report import is_report
from pipelines.config import parse_pipeline
from toolkit.board_kit.measured import measured_in
from toolkit.cli.actions.outputs import need_folders, print_page_path, write_text
from toolkit.cli.actions.planning import in_precision, plan_options
from toolkit.cli.commands.plan import Plan as Options
from toolkit.cli.progress import progress_bar
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.plan_models import PlanRequest, PlanResult, explain, make_plan, member_of
from toolkit.engine.plan_pipeline import PlannedPipeline, plan_pipeline
from toolkit.html.page import write_page
from toolkit.importers.source import model_sha256
from toolkit.partition.costs.measured import Measured, load_measured
from toolkit.partition.planning.cycles import cycles_of, render_cycles
from toolkit.partition.planning.objectives import MAKESPAN
from toolkit.partition.planning.plan import Plan
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import shared_builtins
from toolkit.partition.planning.plan_text import render_nodes, render_plan, render_shared
from toolkit.partition.planning.trtexec import trtexec_lines
from toolkit.partition.planning.workload import Workload, WorkloadModel, load_workload
from toolkit.partition.prepared import Prepared


def plan(options: Options) -> None:
    """Plan, write the files and print the report. Raises TandemError, click.UsageError."""
    _check(options)
    workload = _workload(options)
    rows = workload.model
    shown = options.shown
    pipeline = shown.pipeline
    need_folders(shown.html, pipeline)
    if pipeline is not None and pipeline.exists():
        raise ConfigError(
            f"{pipeline} is there already: name another file with `tandem plan --pipeline`."
        )
    request = _request(options, workload)
    if shown.explain is not None:
        explanation = explain(request, shown.explain)
        click.echo(
            json.dumps(explanation.as_builtins()) if shown.as_json else explanation.as_text()
        )
        return
    with progress_bar("plan") as report, _no_collection():
        result = make_plan(request, report)
    if shown.html:
        write_page(shown.html, plan_html(result.shared, result.advice, result.notes))
    planned = _write_pipeline(pipeline, rows, request, result) if pipeline else None
    if shown.as_json:
        commands = {"build": planned.commands} if planned else {}
        click.echo(json.dumps({**_builtins(result), **commands}))
    else:
        click.echo(_text(result, options))
        if pipeline is not None and planned is not None:
            click.echo("\n" + _pipeline_report(pipeline, planned))
    print_page_path(shown.html, as_json=shown.as_json)


def _check(options: Options) -> None:
    """Refuse options that contradict each other."""
    source, limits, shown = options.source, options.limits, options.shown
    of_one = (
        *(options.rate_hz, options.table, options.data, source.shapes, source.inputs_as_nchw),
        *(options.measured, shown.explain, limits.force_dla, limits.force_gpu),
    )
    if options.workload is not None and any(of_one):
        raise click.UsageError(
            "--rate, --table, --data, --shape, --inputs-as-nchw, --measured, --explain, "
            "--force-dla and --force-gpu belong to one MODEL; a workload file holds rate, table, "
            "shapes and layout of each."
        )
    if options.data is not None and (
        options.table or options.precision != "int8" or options.no_rewrites or limits.max_latency_ms
    ):
        raise click.UsageError(
            "--data calibrates INT8 as a build does; leave out --table, --precision, "
            "--no-rewrites and --max-latency-ms."
        )
    if options.table is not None and options.precision != "int8":
        raise click.UsageError(
            f"--table gives INT8 its ranges; --precision {options.precision} has no use for it."
        )
    several = (shown.html, shown.nodes, shown.cycles, shown.trtexec, limits.max_latency_ms)
    if shown.explain is not None and any(several):
        raise click.UsageError(
            "--explain shows the rules for one node; leave out --html, --nodes, --cycles, "
            "--trtexec and --max-latency-ms."
        )
    if options.workload is None and options.objective == MAKESPAN:
        raise click.UsageError(
            f"--objective {MAKESPAN} is the time of a frame of several models: give --workload; "
            "for one MODEL take --objective latency."
        )
    if shown.pipeline is not None and options.workload is None:
        raise click.UsageError("--pipeline is for the models of a --workload.")


def _workload(options: Options) -> Workload:
    """Return what to plan: what the workload file has, or the one MODEL."""
    source = options.source
    if options.workload is not None and options.model is None:
        return load_workload(options.workload)
    if options.model is None or options.workload is not None:
        raise click.UsageError("Give a MODEL or a --workload, not both.")
    one = WorkloadModel(
        path=options.model,
        rate_hz=options.rate_hz,
        table=options.table,
        shapes=source.shapes,
        inputs_as_nchw=source.inputs_as_nchw,
    )
    return Workload(model=(one,))


def _request(options: Options, workload: Workload) -> PlanRequest:
    measured, model = options.measured, options.model
    planned = in_precision(plan_options(options.objective, options.limits), options.precision)
    return PlanRequest(
        members=tuple(replace(member_of(row), data=options.data) for row in workload.model),
        profile=options.profile,
        jetpack=options.jetpack,
        options=replace(
            planned,
            seconds=options.seconds,
            rewrites=not options.no_rewrites,
        ),
        measured=_measured_times(measured, model, planned.precision)
        if measured and model
        else None,
        plugins=options.source.plugins,
        services=workload.service,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave cyclic garbage for a while: looking for it takes 8 % of a plan, and finds little."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.unfreeze()  # what is there counts as old now: enabling looks through none of it
            gc.enable()


def _measured_times(path: Path, model: Path, precision: Precision) -> Measured:
    """Return the times in a file of them, or those of the one model in a selftest's report.

    Raises TandemError: it is neither, or the report has no times of the model.
    """
    if not is_report(path):
        return load_measured(path)
    sha256 = model_sha256(model)
    return measured_in(path, model_sha256=sha256, model=model.name, precision=precision)


def _write_pipeline(
    path: Path, rows: Sequence[WorkloadModel], request: PlanRequest, result: PlanResult
) -> PlannedPipeline:
    """Write the pipeline of a plan, with the labels that are known. Raises TandemError: the file
    cannot be written, or a model cannot be read by a pipeline."""
    planned = plan_pipeline(rows, request, result, path)
    parse_pipeline(planned.text, path)
    texts = {path: planned.text}
    texts |= {path.parent / name: "\n".join(names) for name, names in planned.labels.items()}
    for file_path, text in texts.items():
        write_text(file_path, text)
    return planned


def _pipeline_report(path: Path, planned: PlannedPipeline) -> str:
    """Return the commands that build the engines of a pipeline, and the one that runs it."""
    lines = [f"{path} runs the models where the plan has them, once their engines are built:"]
    lines += [f"  {shlex.join(command)}" for command in planned.commands]
    lines += [f"  write {what}" for what in planned.missing]
    return "\n".join([*lines, f"  {shlex.join(('tandem', 'run', str(path)))}"])


def _text(result: PlanResult, options: Options) -> str:
    """Return the report for people."""
    shared, shown = result.shared, options.shown
    several = len(shared.plans) > 1 or bool(shared.services)
    parts = [render_shared(shared)] if several else []
    rows = zip(shared.plans, result.fronts, shared.candidates, strict=True)
    for plan, one, candidate in rows:
        title = f"== {plan.name}\n" if several else ""
        advice = result.advice[plan.name]
        notes = "".join(f"\n\nnote: {note}" for note in result.notes[plan.name])
        parts.append(title + render_plan(plan, advice) + notes + _rewrites_text(one.prepared))
        if shown.nodes:
            parts.append(render_nodes(plan))
        if shown.trtexec:
            parts.append(_trtexec(plan, one.prepared))
        if shown.cycles:
            cycles = cycles_of(plan.segments, candidate.views, candidate.costs)
            parts.append(render_cycles(cycles))
    return "\n\n".join(parts)


def _trtexec(plan: Plan, prepared: Prepared) -> str:
    lines = trtexec_lines(plan) or ["trtexec: no node is on the DLA"]
    if prepared.applied:
        lines.append(
            f"the nodes are those after {len(prepared.applied)} rewrites of the model; "
            "--no-rewrites plans the nodes of the file"
        )
    return "\n".join(lines)


def _builtins(result: PlanResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    rewrites = {
        plan.name: _rewrites_builtins(one.prepared)
        for plan, one in zip(result.shared.plans, result.fronts, strict=True)
    }
    notes = {name: list(rows) for name, rows in result.notes.items()}
    return {**shared_builtins(result.shared, result.advice), "rewrites": rewrites, "notes": notes}


def _rewrites_builtins(prepared: Prepared) -> dict[str, Any]:
    return {
        "gain": prepared.gain,
        "applied": [_rewrite(row) for row in prepared.applied],
        "unused": [_rewrite(row) for row in prepared.unused],
        "declined": [
            {"rewrite": row.rewrite, "node": row.node, "reason": row.reason}
            for row in prepared.declined
        ],
    }


def _rewrite(row: Applied) -> dict[str, Any]:
    return {
        "rewrite": row.rewrite,
        "node": row.node,
        "rule": row.verdict.rule,
        "replaced": list(row.replaced),
        "nodes": list(row.nodes),
    }


def _rewrites_text(prepared: Prepared) -> str:
    lines = [
        f"rewritten {row.rewrite}: {row.node} ({row.verdict.rule}: {row.verdict.actual})"
        for row in prepared.applied
    ]
    if prepared.gain is not None:
        lines.append(
            f"predicted gain of what was rewritten: {prepared.gain:.1%} by the objective, alone"
        )
    if prepared.applied:
        lines.append(
            "the plan is of the rewritten model, which `tandem build` makes and `tandem export` "
            "writes for trtexec; `tandem plan --no-rewrites` plans the model as it is"
        )
    lines += [f"possible, but no gain: {row.rewrite} of {row.node}" for row in prepared.unused]
    return "".join(f"\n{line}" for line in lines)
