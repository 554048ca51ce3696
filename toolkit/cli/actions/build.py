"""The result of a build as `tandem build` prints it with `--json`, and as its HTML page."""

from pathlib import Path
from typing import Any

import msgspec

from device.engine.file import open_engine
from toolkit.cli.pages.engine_card import engine_facts, engine_page
from toolkit.engine.build import BuildResult
from toolkit.engine.report_text import build_text
from toolkit.html.page import write_page
from toolkit.partition.planning.plan_json import plan_builtins
from toolkit.quantize.ranges.report_text import (
    effects_builtins,
    judgement_builtins,
    ranges_builtins,
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


def write_build_page(result: BuildResult, path: Path) -> None:
    """Write the page of the engine that was built."""
    with open_engine(result.path) as engine:
        facts = engine_facts(engine)
    report = build_text(result)
    write_page(path, engine_page(facts, notes=result.notes, gpu=result.gpu, report=report))
