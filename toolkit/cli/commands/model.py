"""`tandem model`: the preprocessing and the decoder of a model."""

from dataclasses import dataclass
from pathlib import Path

import click

from toolkit.cli.command import FILE, NEW_FILE, argument, command, group, json_option, option


@dataclass(frozen=True, slots=True)
class Guess:
    """Propose decoder and preprocessing of a model, as TOML for pipeline.toml.

    It reads the metadata, the outputs' names and shapes and the last nodes; an engine has no
    metadata. The first rule that matches answers, and says why and how sure it is. What shapes
    cannot show (colour order, numbers) is that of the model's family: hold it against its source.

    Example: tandem model guess yolo.onnx --labels-out labels.txt
    """

    file: Path = argument("MODEL_OR_ENGINE", type=FILE)
    input_size: tuple[int, int] | None = option(
        "Size of an input that is dynamic.  [default: 640 640, or that of the metadata]",
        type=click.Tuple([click.IntRange(min=1)] * 2), metavar="WIDTH HEIGHT",
    )  # fmt: skip
    choose: int | None = option(
        "Take this reading, where several are listed.", min=1, metavar="NUMBER"
    )
    output: Path | None = option(
        "Write a model.toml.", "-o", "--output", type=NEW_FILE, metavar="MODEL.toml"
    )
    labels_out: Path | None = option(
        "Write the class names; numbers where the metadata has none.",
        type=NEW_FILE, metavar="LABELS.txt",
    )  # fmt: skip
    as_json: bool = json_option("Print the answer as JSON.")


model = group(
    "model",
    """Show a model's preprocessing and decoder.

    Example: tandem model guess model.onnx -o model.toml --labels-out labels.txt
    """,
    (command(Guess, "model:guess"),),
)
