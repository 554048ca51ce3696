"""`tandem demo`: build, run and update on this machine, then report."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.cli.log import progress_shown
from toolkit.cli.options.names import complete_profile

if TYPE_CHECKING:
    from toolkit.demo.steps import Report


@click.command(epilog="Example: tandem demo --profile orin-nx-16gb --source rtsp://10.0.0.7/stream")
@click.option(
    "--profile",
    default="agx-orin-64gb",
    show_default=True,
    shell_complete=complete_profile,
    help="See `tandem profiles`.",
)
@click.option(
    "--source",
    metavar="URI",
    help="Video, folder of images, v4l2:// or rtsp://. [default: a rendered video]",
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
    help="Output folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(profile: str, source: str | None, model: Path | None, out: Path, as_json: bool) -> None:
    """Calibrate, plan, build, run, deploy over MQTT, and roll back, on this machine.

    Exit status 0 only if detections arrived, INT8 held its accuracy, and the broken release was
    rolled back.
    """
    from toolkit.cli.actions.demo import as_builtins, print_result
    from toolkit.demo.report_html import write_report
    from toolkit.demo.steps import DemoOptions, run_demo

    options = DemoOptions(out=out, profile=profile, source=source, model=model)
    with _progress() as report:
        result = run_demo(options, report)
    write_report(result)
    if as_json:
        click.echo(json.dumps(as_builtins(result)))
    else:
        print_result(result)
    if not result.passed:
        sys.exit(1)


@contextmanager
def _progress() -> "Iterator[Report]":
    from toolkit.demo.steps import STEPS

    shares = dict(STEPS)
    starts = {name: sum(share for _, share in STEPS[:i]) for i, (name, _) in enumerate(STEPS)}
    with Progress(
        TextColumn("{task.description:26}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not progress_shown(),
    ) as bar:
        task = bar.add_task("", total=1.0)

        def report(step: str, share: float) -> None:
            bar.update(task, description=step, completed=starts[step] + share * shares[step])

        yield report
        bar.update(task, description="done", completed=1.0)
