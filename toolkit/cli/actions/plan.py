"""The plans of `tandem plan`, as text and as JSON."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from device.engine.manifest import Precision
from device.errors import ConfigError
from device.files import replacing
from device.selftest.report import is_report
from pipelines.config import parse_pipeline
from toolkit.board_kit.measured import measured_in
from toolkit.dla.legalize.rewrite import Applied
from toolkit.engine.plan_models import PlanRequest, PlanResult, explain, make_plan, member_of
from toolkit.engine.plan_pipeline import PlannedPipeline, plan_pipeline
from toolkit.importers.source import model_sha256
from toolkit.partition.costs.measured import Measured, load_measured
from toolkit.partition.planning.cycles import cycles_of, render_cycles
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import Plan, PlanOptions
from toolkit.partition.planning.plan_html import plan_html
from toolkit.partition.planning.plan_json import shared_builtins
from toolkit.partition.planning.plan_text import render_nodes, render_plan, render_shared
from toolkit.partition.planning.trtexec import trtexec_lines
from toolkit.partition.planning.workload import WorkloadModel
from toolkit.partition.prepare import Prepared

__all__ = [
    "Forced",
    "PlanOptions",
    "PlanRequest",
    "PlanResult",
    "as_builtins",
    "as_text",
    "explain",
    "make_plan",
    "measured_times",
    "member_of",
    "pipeline_report",
    "plan_html",
    "write_pipeline",
]


def measured_times(path: Path, model: Path, precision: Precision) -> Measured:
    """Return the times in a file of them, or those of the one model in a selftest's report.

    Raises TandemError: it is neither, or the report has no times of the model.
    """
    if not is_report(path):
        return load_measured(path)
    sha256 = model_sha256(model)
    return measured_in(path, model_sha256=sha256, model=model.name, precision=precision)


def write_pipeline(
    path: Path, rows: Sequence[WorkloadModel], request: PlanRequest, result: PlanResult
) -> PlannedPipeline:
    """Write the pipeline of a plan, with the labels that are known. Raises TandemError: the file is
    there already or cannot be written, or a model cannot be read by a pipeline."""
    if path.exists():
        raise ConfigError(
            f"{path} is there already: name another file with `tandem plan --pipeline`."
        )
    planned = plan_pipeline(rows, request, result, path)
    parse_pipeline(planned.text, path)
    texts = {path: planned.text}
    texts |= {path.parent / name: "\n".join(names) for name, names in planned.labels.items()}
    for file_path, text in texts.items():
        try:
            with replacing(file_path) as file:
                file.write(text.encode())
        except OSError as error:
            raise ConfigError(
                f"{file_path} cannot be written ({error.strerror}): check the path."
            ) from error
    return planned


def pipeline_report(path: Path, planned: PlannedPipeline) -> str:
    """Return the commands that build the engines of a pipeline, and the one that runs it."""
    lines = [f"{path} runs the models where the plan has them, once their engines are built:"]
    lines += [f"  {shlex.join(command)}" for command in planned.commands]
    lines += [f"  write {what}" for what in planned.missing]
    return "\n".join([*lines, f"  {shlex.join(('tandem', 'run', str(path)))}"])


def as_text(result: PlanResult, *, with_nodes: bool, with_cycles: bool, with_trtexec: bool) -> str:
    """Return the report for people."""
    shared = result.shared
    several = len(shared.plans) > 1
    parts = [render_shared(shared)] if several else []
    rows = zip(shared.plans, result.fronts, shared.candidates, strict=True)
    for plan, one, candidate in rows:
        title = f"== {plan.name}\n" if several else ""
        advice = result.advice[plan.name]
        notes = "".join(f"\n\nnote: {note}" for note in result.notes[plan.name])
        parts.append(title + render_plan(plan, advice) + notes + _rewrites_text(one.prepared))
        if with_nodes:
            parts.append(render_nodes(plan))
        if with_trtexec:
            parts.append(_trtexec(plan, one.prepared))
        if with_cycles:
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


def as_builtins(result: PlanResult) -> dict[str, Any]:
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
