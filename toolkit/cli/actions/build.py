"""The result of a build as `tandem build --json` prints it."""

from typing import Any

import msgspec

from toolkit.engine.build import BuildResult
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.quantize.ranges.report_text import effects_builtins, ranges_builtins


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
        "scale_rules": {
            "changes": result.scale_rules.changes,
            "worst_factor": result.scale_rules.worst_factor,
            "sqnr_db": effects_builtins(result.scale_rules.effects),
        },
    }
