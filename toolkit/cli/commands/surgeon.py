"""`tandem surgeon`: cut a part out of a model, or reduce a model to what makes a command fail."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.progress import progress_bar

if TYPE_CHECKING:
    from toolkit.plugins import Plugin

_shape = click.option("--shape", "shapes", multiple=True, callback=parse_shapes,
    metavar="NAME=DIMS", help="Fix an input's shape first.")  # fmt: skip


@click.group(
    epilog="Example: tandem surgeon extract model.onnx --inputs a --outputs b -o part.onnx"
)
def surgeon() -> None:
    """Cut ONNX models by the names of their tensors."""


@surgeon.command(
    epilog="Example: tandem surgeon extract model.onnx --inputs /conv1/out --outputs y -o part.onnx"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--inputs", multiple=True, metavar="TENSOR",
    help="Tensors at which the part begins. Repeatable. [default: the model's inputs]")  # fmt: skip
@click.option("--outputs", multiple=True, metavar="TENSOR",
    help="Tensors at which it ends. Repeatable. [default: the model's outputs]")  # fmt: skip
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="OUT.onnx",
    help="Where to write the part.")  # fmt: skip
@_shape
@click.option("--external", is_flag=True,
    help="Keep weights in OUT.onnx.data. [default: as the model does]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def extract(
    model: Path,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    out: Path,
    shapes: dict[str, tuple[int, ...]],
    external: bool,
    as_json: bool,
) -> None:
    """Write the part of a MODEL between tensors, with inferred shapes and its weights."""
    if not inputs and not outputs:
        raise click.UsageError("Give --inputs, --outputs or both: tensors where the part begins "
            "and ends; `tandem inspect MODEL --nodes` lists them.")  # fmt: skip
    from toolkit.cli.actions import surgeon as action

    part = action.extract(model, out, inputs, outputs, shapes, external=external)
    click.echo(json.dumps(part.builtins()) if as_json else part.text())


@surgeon.command(
    epilog="Example: tandem surgeon reduce model.onnx -o small.onnx "
    "--check 'tandem build {model} --profile laptop -o /tmp/x.engine'"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--check", "command", required=True, metavar="COMMAND",
    help="Command that fails on MODEL: {model} is the path, or else the last word.")  # fmt: skip
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="OUT.onnx",
    help="Where to write what is left; it holds the best so far at any time.")  # fmt: skip
@click.option("--fails-with", "pattern", metavar="REGEX",
    help="Count only failures whose output matches.")  # fmt: skip
@click.option("--timeout", type=FiniteRange(min=0, min_open=True), metavar="SECONDS",
    help="End the command after so long; that is no failure.")  # fmt: skip
@_shape
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print what is left as JSON.")
@click.pass_context
def reduce(
    ctx: click.Context,
    model: Path,
    command: str,
    out: Path,
    pattern: str | None,
    timeout: float | None,
    shapes: dict[str, tuple[int, ...]],
    plugins: "tuple[Plugin, ...]",
    as_json: bool,
) -> None:
    """Find the smallest part of a MODEL on which a command still fails (delta debugging).

    Interrupt it at any time: OUT.onnx is always a valid model on which the command fails.
    """
    _check_pattern(pattern)
    from toolkit.cli.actions import surgeon as action
    from toolkit.surgeon.command import Check

    check = Check(command, pattern, timeout)
    with progress_bar(model.name) as report:
        reduced, files = action.reduce(model, out, check, shapes, plugins, report)
    if as_json:
        click.echo(json.dumps(action.reduced_builtins(reduced, files)))
    else:
        click.echo(action.reduced_text(reduced, files))
    ctx.exit(130 if reduced.interrupted else 0)


def _check_pattern(pattern: str | None) -> None:
    import re

    try:
        re.compile(pattern or "")
    except re.error as err:
        raise click.BadParameter(
            f"{pattern!r} is no regular expression: {err}", param_hint="--fails-with"
        ) from err
