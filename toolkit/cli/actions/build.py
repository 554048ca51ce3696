"""Build an engine from the options of `tandem build`, and report on it."""

from typing import Any

import msgspec

from toolkit.cli.manifest_text import preprocessing_line
from toolkit.engine.build import BuildResult
from toolkit.gpu.report import memory_line, report_lines
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.partition.planning.plan_text import render_plan
from toolkit.quantize.ranges.report_text import (
    SHOWN,
    effects_builtins,
    judgement_builtins,
    judgement_lines,
    ranges_builtins,
    ranges_text,
)


def build_text(result: BuildResult) -> str:
    """Return the report of a build: plan, calibration, notes and where the engine is."""
    lines = [render_plan(result.plan), ""]
    lines += [f"pass {step.name}: {step.changes}" for step in result.passes if step.changes]
    lines += [
        f"rewritten {row.rewrite}: {row.node} ({row.verdict.rule}: {row.verdict.actual})"
        for row in result.rewrites
    ]
    lines += [f"note: {note}" for note in result.notes]
    if result.calibration is None:
        lines.append(preprocessing_line(result.manifest))
    if result.calibration is not None:
        lines.append(ranges_text(result.calibration))
    if result.loss is not None:
        lines += ["the engine itself:", *(f"  {line}" for line in judgement_lines(result.loss))]
    for number, (node, why) in enumerate(result.kept.items()):
        if number == SHOWN:
            lines.append(f"  and {len(result.kept) - SHOWN} more nodes in floating point")
            break
        lines.append(f"  {node} stays in floating point: {why}")
    for report in result.gpu:
        lines += report_lines(report)
    if result.gpu:
        lines.append(memory_line(result.gpu, result.manifest.memory.arena_bytes))
    size = result.path.stat().st_size
    lines.append(f"engine: {result.path} ({size / 1e6:.2f} MB)")
    return "\n".join(lines)


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
