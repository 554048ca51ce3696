"""`tandem pipeline`: write and check a pipeline.toml."""

from pathlib import Path

import click

from toolkit.cli.options.engines import parse_engines

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
SINKS = ("mqtt", "jsonl", "video", "serial", "prometheus")


@click.group(epilog="Example: tandem pipeline check pipeline.toml --engine model.engine")
def pipeline() -> None:
    """Write and check a pipeline.toml."""


@pipeline.command(epilog="Example: tandem pipeline new --model yolo.onnx --source rtsp://cam/1")
@click.option("--model", type=FILE, metavar="FILE", prompt="Model (.onnx, .engine or model.toml)",
    help="An ONNX model or an engine, whose decoder is guessed, or a model.toml.")  # fmt: skip
@click.option("--beside", multiple=True, callback=parse_engines, metavar="NAME=FILE",
    help="A model that sees the same frames; may be given again.")  # fmt: skip
@click.option("--on-crops", multiple=True, callback=parse_engines, metavar="NAME=FILE",
    help="A model that sees crops of the objects of --model; may be given again.")  # fmt: skip
@click.option("--source", metavar="URI", prompt="Source (a file, v4l2:///dev/video0, rtsp://...)",
    help="Where frames come from.")  # fmt: skip
@click.option("--name", metavar="NAME", help="Name of the pipeline.  [default: that of the model]")
@click.option("--track", is_flag=True, help="Follow objects from frame to frame.")
@click.option("--sink", "sinks", multiple=True, type=click.Choice(SINKS),
    help="Where results go; may be given again.  [default: mqtt]")  # fmt: skip
@click.option("--choose", type=click.IntRange(min=1), metavar="NUMBER",
    help="Of several decoders that `tandem model guess` lists.")  # fmt: skip
@click.option("-o", "--output", type=NEW_FILE, default=Path("pipeline.toml"), show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
def new(
    model: Path,
    beside: dict[str, Path],
    on_crops: dict[str, Path],
    source: str,
    name: str | None,
    track: bool,
    sinks: tuple[str, ...],
    choose: int | None,
    output: Path,
    overwrite: bool,
) -> None:
    """Write a pipeline.toml for a model; what is not said is asked for.

    The file is checked as `tandem pipeline check` does before it is written.
    """
    from toolkit.cli.actions import pipeline as action

    request = action.NewPipeline(
        model=model,
        beside=beside,
        on_crops=on_crops,
        source=source,
        name=name,
        track=track,
        sinks=sinks or ("mqtt",),
        choose=choose,
        output=output,
        overwrite=overwrite,
    )
    click.echo(action.write_pipeline(request))


@pipeline.command(epilog="Example: tandem pipeline check pipeline.toml --engine model.engine")
@click.argument("file", metavar="PIPELINE.toml", type=FILE)
@click.option(
    "--engine", type=FILE, help="The engine that is to run it. [default: as the file says]"
)
@click.option("--model", "engines", multiple=True, callback=parse_engines, metavar="NAME=FILE",
    help="The engine of one of [[models]]. [default: as the file says]")  # fmt: skip
@click.option("--labels", type=FILE, help="Its labels.txt. [default: as the file says]")
@click.option("--json", "as_json", is_flag=True, help="Print the pipeline with its defaults.")
def check(
    file: Path,
    engine: Path | None,
    engines: dict[str, Path],
    labels: Path | None,
    as_json: bool,
) -> None:
    """Check a pipeline.toml without running it: keys, addresses, and the engines if they are known.

    No camera is opened. With engines and labels it is what every start checks.
    """
    from toolkit.cli.actions import pipeline as action

    if engine is not None:
        engines = {**engines, "": engine}
    click.echo(action.check_pipeline(file, engines, labels, as_json=as_json))


@pipeline.command(epilog="Example: tandem pipeline schema -o pipeline.schema.json")
@click.option("-o", "--output", type=NEW_FILE, help="Write it here, not to standard output.")
def schema(output: Path | None) -> None:
    """Print the JSON Schema of pipeline.toml, for editors.

    An editor with a TOML language server completes keys if the file begins with
    `#:schema ./pipeline.schema.json`.
    """
    from toolkit.cli.actions import pipeline as action

    if output is None:
        click.echo(action.pipeline_schema())
    else:
        action.write_schema(output)
