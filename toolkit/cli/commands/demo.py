"""`tandem demo`: build, run and update on this machine, then report."""

import json
import sys
from pathlib import Path

import click

from toolkit.cli.options.names import complete_profile
from toolkit.cli.options.progress import progress_bar


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
    from toolkit.demo.steps import STEPS, DemoOptions, run_demo

    options = DemoOptions(out=out, profile=profile, source=source, model=model)
    with progress_bar("demo", dict(STEPS)) as report:
        result = run_demo(options, report)
    write_report(result)
    if as_json:
        click.echo(json.dumps(as_builtins(result)))
    else:
        print_result(result)
    if not result.passed:
        sys.exit(1)
