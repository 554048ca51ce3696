"""`tandem model`: how a model is fed and read."""

from pathlib import Path

import click

NEW_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(epilog="Example: tandem model guess model.onnx -o model.toml --labels-out labels.txt")
def model() -> None:
    """Say how a model is fed and read."""


@model.command(epilog="Example: tandem model guess yolo.onnx --labels-out labels.txt")
@click.argument("file", metavar="MODEL_OR_ENGINE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--input-size", type=(click.IntRange(min=1), click.IntRange(min=1)),
    metavar="WIDTH HEIGHT", help="Size of an input that is dynamic.  [default: 640 640, or that of "
    "the metadata]")  # fmt: skip
@click.option("--choose", type=click.IntRange(min=1), metavar="NUMBER",
    help="Take this reading, where several are listed.")  # fmt: skip
@click.option("-o", "--output", type=NEW_FILE, metavar="MODEL.toml",
    help="Write a model.toml.")  # fmt: skip
@click.option("--labels-out", type=NEW_FILE, metavar="LABELS.txt",
    help="Write the class names; numbers where the metadata has none.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def guess(
    file: Path,
    input_size: tuple[int, int] | None,
    choose: int | None,
    output: Path | None,
    labels_out: Path | None,
    as_json: bool,
) -> None:
    """Propose decoder and preprocessing of a model, as TOML for pipeline.toml.

    It reads the metadata, the outputs' names and shapes and the last nodes; an engine has no
    metadata. The first rule that matches answers, and says why and how sure it is. What shapes
    cannot show (colour order, numbers) is that of the model's family: hold it against its source.
    """
    from toolkit.cli.actions import model as action

    request = action.GuessRequest(file, input_size, choose, output, labels_out)
    click.echo(action.guess_model(request, as_json=as_json), nl=False)
