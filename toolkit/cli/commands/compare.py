"""`tandem compare`: whether two files agree; or what the INT8 of one engine loses, and why."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device.errors import TandemError
from toolkit.cli.options.inputs import input_options, input_request
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.model import layout_option
from toolkit.cli.options.page import html_option, say_written
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.progress import progress_bar
from toolkit.cli.options.range_outputs import need_folders
from toolkit.cli.options.tolerances import tolerance_options, tolerances_of
from toolkit.errors import NotComparedError
from toolkit.html.page import write_page

if TYPE_CHECKING:
    from device.runtime.session import Dla, Scales
    from toolkit.cli.actions.agreement import AgreementRequest
    from toolkit.cli.actions.compare import CompareRequest
    from toolkit.plugins import Plugin

SAMPLES = 8
BISECT_FOLDER = "bisect"

# Options of one form alone: name of the parameter -> the option.
_OF_TWO = {
    "files": "--input", "seed": "--random", "ranges": "--range", "atol": "--atol",
    "rtol": "--rtol", "min_sqnr": "--min-sqnr", "layers": "--layers", "bisect": "--bisect",
    "out": "--out",
}  # fmt: skip
_OF_ONE = {
    "model": "--model", "profile": "--profile", "table": "--table", "recorded": "--recorded",
    "scales": "--scales", "inputs_as_nchw": "--inputs-as-nchw",
}  # fmt: skip


@click.command(
    epilog="Examples: tandem compare model.onnx model.engine --input x.npz --layers; "
    "tandem compare a.onnx b.onnx --bisect; "
    "tandem compare model.engine --model model.onnx --data images/"
)
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", required=False, type=click.Path(path_type=Path))
@input_options
@tolerance_options
@click.option("--layers", is_flag=True,
    help="Also compare every tensor that both show, in running order.")  # fmt: skip
@click.option("--bisect", is_flag=True,
    help="Where they differ, find the first node that does and write it as a model.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
    help=f"Where --bisect writes. [default: {BISECT_FOLDER}]")  # fmt: skip
@click.option("--model", type=click.Path(path_type=Path), metavar="M.onnx",
    help="One engine: the model that it was built from.")  # fmt: skip
@click.option("--profile", help="One model: build an INT8 engine of it for this profile.")
@click.option("--table", type=click.Path(path_type=Path),
    help="One model: INT8 ranges. [default: measured on --data] One engine: the ranges that it was "
    "built with, for the GPU beside it. [default: as the DLA's rules changed them]")  # fmt: skip
@click.option("--recorded", type=click.Path(path_type=Path), metavar="OUT.npz",
    help="One engine: tensors of a run on a board, by name, of inputs in it or the first "
    "sample; or the report of its selftest.")  # fmt: skip
@click.option("--dla", type=click.Choice(["portable", "exact", "fast"]),
    help="DLA segments: in onnxruntime, or in the DLA's INT8 arithmetic, in integers "
    "or a shorter way proven to give the same bits. [default: of two files portable, of one "
    "fast]")  # fmt: skip
@click.option("--scales", type=click.Choice(["hardware", "ideal"]),
    help="One file: scales of the DLA, 16 bits and a shift or exact. "
    "[default: hardware]")  # fmt: skip
@click.option("--nodes", "every", is_flag=True, help="List every tensor.")
@layout_option
@memory_option
@plugin_option
@html_option("outputs and, of two engines, segments, placements, kernels and graphs side by side")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.pass_context
def compare(
    ctx: click.Context,
    a: Path,
    b: Path | None,
    files: tuple[tuple[str, Path], ...],
    data: Path | None,
    preprocess: Path | None,
    seed: int | None,
    ranges: dict[str, tuple[float, float]],
    samples: int | None,
    shapes: dict[str, tuple[int, ...]],
    atol: dict[str, float],
    rtol: dict[str, float],
    min_sqnr: dict[str, float],
    layers: bool,
    bisect: bool,
    out: Path | None,
    model: Path | None,
    profile: str | None,
    table: Path | None,
    recorded: Path | None,
    dla: "Dla | None",
    scales: "Scales | None",
    every: bool,
    inputs_as_nchw: bool,
    plugins: "tuple[Plugin, ...]",
    html: Path | None,
    as_json: bool,
) -> None:
    """Say whether A and B agree: ONNX models, engines or saved outputs (.npz), in any pairing.

    Exit status: 0, or 1 if an output is beyond its tolerance or one side lacks it, or 2 if the
    comparison could not run. B is the reference.

    With one file: what INT8 loses, node by node, and why. Give an engine with its --model, or a
    model with a --profile. FP32, INT8 as on a GPU and the DLA's arithmetic side by side, and
    what the DLA loses against a GPU with the same ranges.
    """
    with _status_2():
        need_folders(html)
        _refuse_other_form(ctx, _OF_ONE if b is not None else _OF_TWO, two=b is not None)
        if b is not None:
            request = input_request(files, data, preprocess, seed, ranges, samples, shapes)
            tolerances = tolerances_of(atol, rtol, min_sqnr)
            if out is not None and not bisect:
                raise click.UsageError("--out is where --bisect writes; give --bisect too.")
            from toolkit.cli.actions.agreement import AgreementRequest

            folder = (out or Path(BISECT_FOLDER)) if bisect else None
            pair = AgreementRequest(
                a, b, request, tolerances, layers, folder, dla or "portable", plugins
            )
            ctx.exit(1 if _two_files(pair, html, every=every, as_json=as_json) else 0)
        if (model is None) == (profile is None):
            raise click.UsageError(
                "Give two files to compare, or an engine with --model M.onnx, or a model with "
                "--profile NAME."
            )
        if dla == "portable":
            raise click.UsageError("--dla portable is for two files; one compares exact or fast.")
        from device.dla_emulator.options import Emulation
        from toolkit.cli.actions.compare import CompareRequest

        loss = CompareRequest(
            engine=a,
            model=model or a,
            data=data,
            samples=samples or SAMPLES,
            preprocess=preprocess,
            recorded=recorded,
            emulation=Emulation(dla or "fast", scales or "hardware"),
            plugins=plugins,
            inputs_as_nchw=inputs_as_nchw,
            profile=profile,
            table=table,
            shapes=shapes,
        )
        _one_file(loss, html, every=every, as_json=as_json)


@contextmanager
def _status_2() -> Iterator[None]:
    """End with status 2 where the comparison cannot run: 1 says that the sides differ."""
    try:
        yield
    except TandemError as error:
        raise NotComparedError(str(error)) from error


def _two_files(
    request: "AgreementRequest", html: Path | None, *, every: bool, as_json: bool
) -> bool:
    """Compare A and B, print it, and return whether they differ."""
    from toolkit.cli.actions.agreement import compare_files, write_agreement_page

    with progress_bar(f"{request.a.name} and {request.b.name}") as report:
        agreement = compare_files(request, report)
    if html is not None:
        write_agreement_page(request, agreement, html)
    click.echo(json.dumps(agreement.builtins()) if as_json else agreement.text(every=every))
    say_written(html, as_json=as_json)
    return not agreement.compared.agrees


def _one_file(request: "CompareRequest", html: Path | None, *, every: bool, as_json: bool) -> None:
    """Print what the INT8 of one engine loses."""
    from toolkit.cli.actions.compare import compare_engine, compare_model
    from toolkit.evaluate.compare.report import comparison_builtins, comparison_text

    with progress_bar(request.engine.name) as report:
        run = compare_engine if request.profile is None else compare_model
        comparison, tensors = run(request, report)
    if html is not None:
        from toolkit.cli.pages.compare_page import losses_page

        text = comparison_text(comparison, tensors, every=False)
        write_page(html, losses_page(comparison, text))
    if as_json:
        click.echo(json.dumps(comparison_builtins(comparison, tensors)))
    else:
        click.echo(comparison_text(comparison, tensors, every=every))
    say_written(html, as_json=as_json)


def _refuse_other_form(ctx: click.Context, options: dict[str, str], *, two: bool) -> None:
    """Refuse what only the other form of the command has a use for."""
    default = click.core.ParameterSource.DEFAULT
    used = [o for name, o in options.items() if ctx.get_parameter_source(name) is not default]
    if used:
        form = "one file: an engine with --model, or a model with --profile" if two else "two files"
        raise click.UsageError(f"{used[0]} is for {form}.")
