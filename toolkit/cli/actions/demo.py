"""Run the demo and report on it."""

import json
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.cli.commands.demo import Demo
from toolkit.cli.progress import progress_bar
from toolkit.demo.report_html import write_report
from toolkit.demo.steps import STEPS, DemoOptions, DemoResult, run_demo
from toolkit.engine.report_text import build_text


def demo(options: Demo) -> None:
    """Run the demo and print its result; exits with 1 if a check failed. Raises TandemError."""
    demo_options = DemoOptions(
        out=options.out, profile=options.profile, source=options.source, model=options.model
    )
    with progress_bar("demo", dict(STEPS)) as report:
        result = run_demo(demo_options, report)
    write_report(result)
    if options.as_json:
        click.echo(json.dumps(_builtins(result)))
    else:
        _print(result)
    if not result.passed:
        raise click.exceptions.Exit(1)


def _builtins(result: DemoResult) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "passed": result.passed,
        "checks": [
            {"name": check.name, "passed": check.passed, "found": check.finding}
            for check in result.checks
        ],
        "map50": {"int8": result.scores.int8.map50, "fp32": result.scores.fp32.map50},
        "stats": msgspec.to_builtins(result.stats),
        "deployments": [msgspec.to_builtins(item.result) for item in result.deployments],
        "segments": list(result.segments),
        "engine": str(result.build.path),
        "video": str(result.video),
        "report": str(result.report),
        "duration_s": round(result.duration_s, 1),
    }


def _print(result: DemoResult) -> None:
    """Print the report of the build, latencies, accuracy, checks and file names."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(build_text(result.build)))
    console.print()
    for segment in result.segments:
        console.print(Text(f"ran {segment}"))
    console.print(_latencies(result))
    scores = result.scores
    console.print(
        f"mAP50 over {scores.pictures} held-out scenes: {scores.int8.map50:.3f} in INT8, "
        f"{scores.fp32.map50:.3f} in FP32"
    )
    for check in result.checks:
        mark = "[green]ok    [/]" if check.passed else "[red]FAILED[/]"
        console.print(mark, Text(f"{check.name}: {check.finding}"))
    console.print(Text(f"engine: {result.build.path}"))
    console.print(Text(f"video:  {result.video}"))
    console.print(Text(f"report: {result.report}"))
    console.print(f"took {result.duration_s:.0f} s")


def _latencies(result: DemoResult) -> Table:
    stats = result.stats
    fps = f", {stats.fps:.1f} frames/s" if stats else ""
    table = Table(title=f"latency on this machine{fps}", title_justify="left")
    table.add_column("stage")
    table.add_column("p50 ms", justify="right")
    table.add_column("p99 ms", justify="right")
    if stats is not None:
        for stage, p50 in stats.stage_p50_ms.items():
            table.add_row(stage, f"{p50:.2f}", f"{stats.stage_p99_ms[stage]:.2f}")
        table.add_row(
            "frame to result", f"{stats.latency_p50_ms:.2f}", f"{stats.latency_p99_ms:.2f}"
        )
    ages = [seen.capture_to_client_ms for item in result.deployments for seen in item.frames]
    if ages:
        p50, p99 = np.percentile(ages, [50, 99])
        table.add_row("capture to MQTT client", f"{p50:.2f}", f"{p99:.2f}")
    return table
