"""`tandem bundle`: pack an engine, its pipeline and its labels into one file."""

from pathlib import Path

import click
import msgspec

from device.engine.manifest import UNCALIBRATED
from device.update.bundle import write_bundle

EPILOG = (
    "Example: tandem bundle person.engine --pipeline pipeline.toml --labels labels.txt "
    "-o person.bundle"
)
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("engine", type=INPUT)
@click.option("--pipeline", required=True, type=INPUT, help="The pipeline.toml to run.")
@click.option("--labels", required=True, type=INPUT, help="The class names, one a line.")
@click.option("--name", help="The release's name.  [default: the engine's file name]")
@click.option("--version", default="0.1.0", show_default=True, help="The release's version.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The bundle to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def bundle(
    engine: Path,
    pipeline: Path,
    labels: Path,
    name: str | None,
    version: str,
    output: Path,
    as_json: bool,
) -> None:
    """Write a bundle: ENGINE with its pipeline and labels, ready for `tandem deploy`.

    The same inputs give the same bytes.
    """
    from device.engine.file import open_engine  # numpy is not needed to show the help
    from pipelines.config import load_pipeline
    from pipelines.stages.preprocess_check import check_preprocessing

    with open_engine(engine) as opened:
        profile = opened.manifest.profile
        if opened.manifest.uncalibrated:
            click.secho(UNCALIBRATED, fg="red", err=True)
        if opened.manifest.preprocessing:
            warning = check_preprocessing(load_pipeline(pipeline), opened.manifest.preprocessing)
            if warning is not None:
                click.secho(warning, fg="yellow", err=True)
    info = write_bundle(
        output,
        engine=engine,
        pipeline=pipeline,
        labels=labels,
        name=name or engine.stem,
        version=version,
        profile=profile,
    )
    if as_json:
        click.echo(msgspec.json.encode(info).decode())
        return
    size = output.stat().st_size
    click.echo(f"wrote {output}: {info.name} {info.version} for {profile}, {size / 1e6:.1f} MB")
