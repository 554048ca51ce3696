"""`tandem infer`: run a model or an engine once and keep its outputs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from toolkit.cli.options.inputs import input_options, input_request
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.plugin import plugin_option

if TYPE_CHECKING:
    from device.runtime.session import Dla
    from toolkit.plugins import Plugin


@click.command(
    epilog="Example: tandem infer model.onnx --input x.npz --save y.npz; "
    "tandem infer model.engine --random 1 --save z.npz"
)
@click.argument("file", metavar="MODEL_OR_ENGINE", type=click.Path(path_type=Path))
@input_options
@click.option("--save", type=click.Path(path_type=Path), metavar="OUT.npz",
    help="Write the outputs by name; of several samples as 0:NAME, 1:NAME, ...")  # fmt: skip
@click.option("--save-inputs", type=click.Path(path_type=Path), metavar="OUT.npz",
    help="Write the inputs too, for --input.")  # fmt: skip
@click.option("--all", "everything", is_flag=True,
    help="Also the tensors between: all of a model, those that segments of an engine "
    "pass on.")  # fmt: skip
@click.option("--dla", type=click.Choice(["portable", "exact", "fast"]), default="portable",
    show_default=True, help="Engine: the DLA's INT8 arithmetic in software, or not.")  # fmt: skip
@memory_option
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the outputs' figures as JSON.")
def infer(
    file: Path,
    files: tuple[tuple[str, Path], ...],
    data: Path | None,
    preprocess: Path | None,
    seed: int | None,
    ranges: dict[str, tuple[float, float]],
    samples: int | None,
    shapes: dict[str, tuple[int, ...]],
    save: Path | None,
    save_inputs: Path | None,
    everything: bool,
    dla: "Dla",
    plugins: "tuple[Plugin, ...]",
    as_json: bool,
) -> None:
    """Run an ONNX MODEL (in onnxruntime) or an ENGINE on inputs, and show its outputs."""
    request = input_request(files, data, preprocess, seed, ranges, samples, shapes)
    from toolkit.cli.actions.infer import infer_file, result_builtins, result_text

    result = infer_file(file, request, everything=everything, dla=dla, plugins=plugins)
    result.save(save, save_inputs)
    if as_json:
        click.echo(json.dumps(result_builtins(result)))
        return
    click.echo(result_text(result))
    for path in (save, save_inputs):
        if path is not None:
            click.echo(f"wrote {path}")
