"""The report of a build as text."""

from pathlib import Path
from typing import TYPE_CHECKING

from device.engine.arithmetic import arithmetic_of
from device.engine.preprocessing import preprocessing_line
from toolkit.gpu.report import memory_line, report_lines
from toolkit.partition.planning.plan_text import render_plan
from toolkit.quantize.ranges.report_text import SHOWN, assumed_lines, judgement_lines, ranges_text

if TYPE_CHECKING:
    from toolkit.engine.build import BuildResult


def build_text(result: "BuildResult", model: Path | None = None) -> str:
    """Return the report of a build: plan, calibration, notes and where the engine is.

    `model`: the file that was built, for advice.
    """
    lines = [render_plan(result.plan, arithmetic=arithmetic_of(result.manifest)), ""]
    lines += [f"pass {step.name}: {step.changes}" for step in result.passes if step.changes]
    lines += [
        f"rewritten {row.rewrite}: {row.node} ({row.verdict.rule}: {row.verdict.actual})"
        for row in result.rewrites
    ]
    lines += [f"note: {note}" for note in result.notes]
    if result.calibration is None:
        lines.append(preprocessing_line(result.manifest.preprocessing))
    else:
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
    if result.calibration is not None:
        lines += assumed_lines(result.calibration, model)
    return "\n".join(lines)
