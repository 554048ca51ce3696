"""`tandem surgeon`: cut a model, reduce it to what makes a command fail, or let it take pixels."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.cli.command import argument, command, group, json_option, option
from toolkit.cli.options.model import plugins_option, shapes_option


@dataclass(frozen=True, slots=True)
class Extract:
    """Write the part of a MODEL between tensors, with inferred shapes and its weights.

    Example: tandem surgeon extract model.onnx --inputs /conv1/out --outputs y -o part.onnx
    """

    model: Path = argument()
    inputs: tuple[str, ...] = option(
        "Tensors at which the part begins. Repeatable. [default: the model's inputs]",
        metavar="TENSOR",
    )
    outputs: tuple[str, ...] = option(
        "Tensors at which it ends. Repeatable. [default: the model's outputs]", metavar="TENSOR"
    )
    out: Path = option("Where to write the part.", "-o", "--out", required=True, metavar="OUT.onnx")
    shapes: dict[str, tuple[int, ...]] = shapes_option("Fix an input's shape first.")
    external: bool = option("Keep weights in OUT.onnx.data. [default: as the model does]")
    as_json: bool = json_option("Print what was written as JSON.")


@dataclass(frozen=True, slots=True)
class Reduce:
    """Find the smallest part of a MODEL on which a command still fails (delta debugging).

    Interrupt it at any time: OUT.onnx is always a valid model on which the command fails.

    Example: tandem surgeon reduce model.onnx -o small.onnx --check 'tandem build {model}
    --profile laptop -o /tmp/x.engine'
    """

    model: Path = argument()
    check: str = option(
        "Command that fails on MODEL: {model} is the path, or else the last word.",
        required=True, metavar="COMMAND",
    )  # fmt: skip
    out: Path = option(
        "The reduced model, written anew with each smaller result.",
        "-o", "--out", required=True, metavar="OUT.onnx",
    )  # fmt: skip
    fails_with: str | None = option("Count only failures whose output matches.", metavar="REGEX")
    timeout: float | None = option(
        "End the command after so long; that is no failure.",
        min=0, min_open=True, metavar="SECONDS",
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = shapes_option("Fix an input's shape first.")
    plugins: tuple[Any, ...] = plugins_option()
    as_json: bool = json_option("Print what is left as JSON.")


@dataclass(frozen=True, slots=True)
class Pixels:
    """Let a MODEL take an image as bytes: x = (pixel * scale - mean) / std inside of it.

    A quarter of the bytes of float32 go to the GPU, and its first kernel makes numbers of them.

    Example: tandem surgeon pixels model.onnx --scale 0.00392157 -o bytes.onnx
    """

    model: Path = argument()
    out: Path = option("Where to write it.", "-o", "--out", required=True, metavar="OUT.onnx")
    input: str | None = option("The input. [default: the only one]", metavar="NAME")
    dtype: Literal["uint8", "float16"] = option("Its new type.", default="uint8")
    scale: float = option("Factor of a pixel.", default=1.0)
    mean: tuple[float, ...] = option(
        "Taken off then. Repeatable: one for all channels, or one for each. [default: 0]"
    )
    std: tuple[float, ...] = option("What it is divided by. Repeatable. [default: 1]")
    as_json: bool = json_option("Print what was written as JSON.")


surgeon = group(
    "surgeon",
    """Cut ONNX models by the names of their tensors, or change what they take.

    Example: tandem surgeon extract model.onnx --inputs a --outputs b -o part.onnx
    """,
    (
        command(Extract, "surgeon:extract"),
        command(Reduce, "surgeon:reduce"),
        command(Pixels, "surgeon:pixels"),
    ),
)
