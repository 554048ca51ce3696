"""`tandem pipeline`: write and check a pipeline.toml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.cli.command import FILE, NEW_FILE, argument, command, group, json_option, option
from toolkit.cli.options.model import engines_option

Sink = Literal["mqtt", "jsonl", "video", "serial", "prometheus", "mcap", "foxglove"]


@dataclass(frozen=True, slots=True)
class New:
    """Write a pipeline.toml for a model; prompts for missing values.

    The file is checked as `tandem pipeline check` does before it is written.

    Example: tandem pipeline new --model yolo.onnx --source rtsp://cam/1
    """

    model: Path = option(
        "An ONNX model or an engine, whose decoder is guessed, or a model.toml.",
        type=FILE, metavar="FILE", prompt="Model (.onnx, .engine or model.toml)",
    )  # fmt: skip
    beside: dict[str, Path] = engines_option(
        "A model that sees the same frames; may be given again."
    )
    on_crops: dict[str, Path] = engines_option(
        "A model that sees crops of the objects of --model; may be given again."
    )
    source: str = option(
        "Where frames come from.",
        metavar="URI", prompt="Source (a file, v4l2:///dev/video0, rtsp://...)",
    )  # fmt: skip
    name: str | None = option("Name of the pipeline.  [default: that of the model]", metavar="NAME")
    track: bool = option("Follow objects from frame to frame.")
    sinks: tuple[Sink, ...] = option(
        "Where results go; may be given again.  [default: mqtt]", "--sink"
    )
    choose: int | None = option(
        "Of several decoders that `tandem model guess` lists.", min=1, metavar="NUMBER"
    )
    output: Path = option(None, "-o", "--output", type=NEW_FILE, default=Path("pipeline.toml"))
    overwrite: bool = option("Replace a file that is there.")


@dataclass(frozen=True, slots=True)
class Check:
    """Check a pipeline.toml without running it: keys, addresses, and the engines if they are known.

    No camera is opened. With engines and labels it is what every start checks.

    Example: tandem pipeline check pipeline.toml --engine model.engine
    """

    file: Path = argument("PIPELINE.toml", type=FILE)
    engine: Path | None = option(
        "The engine that is to run it. [default: as the file says]", type=FILE
    )
    engines: dict[str, Path] = engines_option(
        "The engine of one of [[models]]. [default: as the file says]", "--model"
    )
    labels: Path | None = option("Its labels.txt. [default: as the file says]", type=FILE)
    as_json: bool = json_option("Print the pipeline with its defaults.")


@dataclass(frozen=True, slots=True)
class Schema:
    """Print the JSON Schema of pipeline.toml, for editors.

    An editor with a TOML language server completes keys if the file begins with
    `#:schema ./pipeline.schema.json`.

    Example: tandem pipeline schema -o pipeline.schema.json
    """

    output: Path | None = option(
        "Write it here, not to standard output.", "-o", "--output", type=NEW_FILE
    )


pipeline = group(
    "pipeline",
    """Write and check a pipeline.toml.

    Example: tandem pipeline check pipeline.toml --engine model.engine
    """,
    (
        command(New, "pipeline:new"),
        command(Check, "pipeline:check"),
        command(Schema, "pipeline:schema"),
    ),
)
