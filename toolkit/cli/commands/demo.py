"""`tandem demo`: build, run and update on this machine, then say how it went."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from toolkit.cli.report_text import build_text
from toolkit.demo.report_html import write_report
from toolkit.demo.steps import STEPS, DemoOptions, DemoResult, Report, run_demo


@click.command(epilog="Example: tandem demo --profile orin-nx-16gb --source rtsp://10.0.0.7/stream")
@click.option(
    "--profile", default="agx-orin-64gb", show_default=True, help="See `tandem profiles`."
)
@click.option(
    "--source",
    metavar="URI",
    help="Video, folder of pictures, v4l2:// or rtsp://. [default: a scene drawn as video]",
)
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A detector of the shipped classes, with its model file (.toml) beside it.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for everything that the demo makes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(profile: str, source: str | None, model: Path | None, out: Path, as_json: bool) -> None:
    """Show the whole way: calibrate, plan, build, run, deploy over MQTT, roll back.

    Exit status 0 only if detections arrived, INT8 held its accuracy, and the broken release was
    rolled back.
    """
    options = DemoOptions(out=out, profile=profile, source=source, model=model)
    with _progress() as report:
        result = run_demo(options, report)
    write_report(result)
    if as_json:
        click.echo(json.dumps(as_builtins(result)))
    else:
        _print(result)
    if not result.passed:
        sys.exit(1)


def as_builtins(result: DemoResult) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "passed": result.passed,
        "checks": [
            {"name": check.name, "passed": check.passed, "found": check.found}
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


@contextmanager
def _progress() -> Iterator[Report]:
    shares = dict(STEPS)
    starts = {name: sum(share for _, share in STEPS[:i]) for i, (name, _) in enumerate(STEPS)}
    with Progress(
        TextColumn("{task.description:26}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=1.0)

        def report(step: str, share: float) -> None:
            bar.update(task, description=step, completed=starts[step] + share * shares[step])

        yield report
        bar.update(task, description="done", completed=1.0)


def _print(result: DemoResult) -> None:
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
        console.print(mark, Text(f"{check.name}: {check.found}"))
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
