"""What a board's report confirms and corrects: `python -m scripts.read_board_report REPORT`.

docs/board_kit.md says how a report is made. `--patch` writes it as a change of this repository.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from device.errors import TandemError
from device.files import replacing
from device.selftest.report import NetworkRow, Report, read_report
from scripts.board_change import change_of
from scripts.rule_corrections import RuleSummary, summarize_rules


def main() -> int:
    """Print a report; the exit status is 1 if it corrects something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--patch", type=Path, metavar="FILE", help="for `git apply` and a review")
    arguments = parser.parse_args()
    try:
        report = read_report(arguments.report).report
        if arguments.patch is not None:
            with replacing(arguments.patch) as file:
                file.write(change_of(report).patch.encode())
    except (TandemError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    rules = summarize_rules(report)
    wrong = [f"{row.item}: {row.problem}" for row in report.kernels if row.problem]
    if arguments.json:
        print(msgspec.json.encode(as_builtins(report, rules)).decode())
    else:
        print("\n".join(lines(report, rules)))
    return int(bool(rules.corrections or wrong))


def as_builtins(report: Report, rules: RuleSummary) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "profile": report.profile,
        "machine": msgspec.to_builtins(report.machine),
        "steps": msgspec.to_builtins(report.steps),
        "rules": asdict(rules),
        "kernels": msgspec.to_builtins(report.kernels),
        "networks": msgspec.to_builtins(report.networks),
    }


def lines(report: Report, rules: RuleSummary) -> list[str]:
    """Return a report for people."""
    machine = report.machine
    out = [
        f"{machine.model or 'unknown board'}, kit for {report.profile}",
        f"L4T {machine.l4t or '-'}, TensorRT {machine.tensorrt or '-'}, {machine.dla_cores} DLA "
        f"cores, power mode {machine.power_mode_name or machine.power_mode or '-'}, clocks "
        f"{'locked' if machine.locked else 'not locked'}",
        "",
    ]
    for step in report.steps:
        note = f"; {step.problem}" if step.problem else ""
        crashed = f", {step.crashes} crashed" if step.crashes else ""
        out.append(
            f"{step.name}: {step.done} of {step.items} in {step.seconds:.0f} s{crashed}{note}"
        )
        out += [f"  left out: {', '.join(step.left_out)}"] if step.left_out else []
    out += ["", *_kernel_lines(report), "", *_rule_lines(rules), "", *_network_lines(report)]
    out += [
        f"demo: {row.frames} frames, {row.detections} detections in {row.seconds:.1f} s"
        + (f"; {row.problem}" if row.problem else "")
        for row in report.demo
    ]
    return out


def _kernel_lines(report: Report) -> list[str]:
    out = [f"kernels: {len(report.kernels)} reference engines"]
    for row in report.kernels:
        worst = max((output.relative for output in row.outputs), default=0.0)
        verdict = f"right, off by at most {worst:.2g}"
        if row.problem:  # without outputs nothing ran
            verdict = f"{'WRONG' if row.outputs else 'not run'}: {row.problem}"
        repeat = "" if row.repeatable or row.problem else ", but not the same bits twice"
        out.append(
            f"  {row.item}: {row.tried} of {row.tactics} tactics of {row.kernels} kernels, "
            f"{verdict}{repeat}"
        )
    return out


def _rule_lines(rules: RuleSummary) -> list[str]:
    out = [
        f"DLA rules: {len(rules.confirmed)} confirmed on both sides, {len(rules.one_sided)} on "
        f"one, {len(rules.corrections)} corrections, {len(rules.unknown)} cases without an answer"
    ]
    out += [f"  correct {row.text}" for row in rules.corrections]
    out += [f"  can_run_on_DLA and the build disagree on {item}" for item in rules.disputed]
    reasons: dict[str, list[str]] = {}
    for item, reason in rules.unknown:
        reasons.setdefault(reason, []).append(item)
    out += [f"  no answer for {len(items)} cases: {why}" for why, items in reasons.items()]
    return out


def _network_lines(report: Report) -> list[str]:
    out = ["networks"] if report.networks else []
    for row in report.networks:
        out.append(f"  {row.item}: {row.problem or _times(row)}")
        refused = [name for segment in row.segments for name in segment.refused_layers]
        if refused:
            out.append(f"    TensorRT keeps off the DLA: {', '.join(refused)}")
    return out


def _times(row: NetworkRow) -> str:
    watts = ", ".join(f"{rail} {power:.1f} W" for rail, power in row.watts.items())
    how = ", ".join(dict.fromkeys(f"{s.processor} by {s.implementation}" for s in row.segments))
    return f"{row.median_ms:.3f} ms ({how}){'; ' + watts if watts else ''}"


if __name__ == "__main__":
    sys.exit(main())
