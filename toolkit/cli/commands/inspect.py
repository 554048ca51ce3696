"""`tandem inspect`: what is inside an engine file or an ONNX model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from device.engine.manifest import Precision
from device.errors import EngineError
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.page import html_option, say_written
from toolkit.cli.options.plugin import plugin_option
from toolkit.html.page import write_page

if TYPE_CHECKING:
    from toolkit.plugins import Plugin


@click.command(
    epilog="Examples: tandem inspect model.engine --nodes; "
    "tandem inspect model.onnx --profile agx-orin-64gb"
)
@click.argument("file", metavar="MODEL_OR_ENGINE", type=click.Path(path_type=Path))
@click.option("--nodes", is_flag=True, help="List every node, with its processor and reason.")
@click.option("--profile", help="Model: also what runs where on this profile, and why.")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="int8",
    show_default=True, help="Model: the precision of that plan.")  # fmt: skip
@click.option("--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Model: fix an input's shape.")  # fmt: skip
@plugin_option
@html_option("graph, layers, memory and roofline of an engine, or graph and operators of a model")
@click.option("--verify", is_flag=True, help="Engine: check every byte by its checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def inspect(
    file: Path,
    nodes: bool,
    profile: str | None,
    precision: Precision,
    shapes: dict[str, tuple[int, ...]],
    plugins: "tuple[Plugin, ...]",
    html: Path | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Show what is inside an ENGINE, an ONNX MODEL, or a file of arrays (.npz).

    Engine: profile, inputs, outputs, segments, crossings and memory; all but the bytes of weights
    and kernels is checked first, with --verify these, too. Model: inputs, outputs, weights, and
    operators with their multiply-accumulates.
    """
    from toolkit.evaluate.infer.runner import kind_of

    kind = kind_of(file)
    if verify and kind in ("model", "arrays"):
        raise click.UsageError(f"--verify is for an engine; {file} is none.")
    if kind == "model":
        from toolkit.cli.actions import inspect as action

        inspected = action.inspect_model(
            action.InspectRequest(file, shapes, profile, precision, plugins)
        )
        if html is not None:
            from toolkit.cli.pages.model_page import model_page

            write_page(html, model_page(inspected))
        click.echo(
            json.dumps(action.inspected_builtins(inspected))
            if as_json
            else action.inspected_text(inspected, nodes=nodes)
        )
        say_written(html, as_json=as_json)
        return
    if profile or shapes or plugins:
        raise click.UsageError(
            f"--profile, --shape and --plugin are for an ONNX model; {file} is none."
        )
    if kind == "arrays":
        if html is not None:
            raise click.UsageError(f"--html is for a model or an engine; {file} holds arrays.")
        _arrays(file, as_json=as_json)
    else:
        _engine(file, nodes=nodes, html=html, verify=verify, as_json=as_json)


def _arrays(path: Path, *, as_json: bool) -> None:
    from toolkit.evaluate.infer.saved import load_samples

    samples = [
        {name: f"{array.dtype} {'x'.join(map(str, array.shape)) or '1 number'}"
         for name, array in sample.items()}
        for sample in load_samples(path)
    ]  # fmt: skip
    if as_json:
        click.echo(json.dumps(samples))
        return
    for number, sample in enumerate(samples):
        click.echo(f"sample {number}")
        for name, what in sample.items():
            click.echo(f"  {name}: {what}")


def _engine(path: Path, *, nodes: bool, html: Path | None, verify: bool, as_json: bool) -> None:
    from device.engine.checksums import ALGORITHM, NO_CHECKSUMS
    from device.engine.file import open_engine
    from device.engine.purposes import bytes_by_purpose
    from toolkit.cli.manifest_text import bytes_text, manifest_text

    with open_engine(path) as opened:
        manifest = opened.manifest
        if verify:
            opened.verify()
            if opened.checksums is None:
                raise EngineError(f"{path} {NO_CHECKSUMS}")
        if html is not None:
            from toolkit.cli.pages.engine_card import engine_facts, engine_page

            write_page(html, engine_page(engine_facts(opened)))
        if as_json:
            values = msgspec.to_builtins(manifest)
            values["bytes"] = bytes_by_purpose(manifest, opened.entries)
            values["checksums"] = ALGORITHM if opened.checksums else None
            values["verified"] = verify
            click.echo(json.dumps(values))
            return
        click.echo(manifest_text(manifest))
        click.echo(bytes_text(bytes_by_purpose(manifest, opened.entries)))
        if opened.checksums is None:
            click.echo(f"{path} {NO_CHECKSUMS}")
        elif verify:
            click.echo(f"verified: {len(opened.entries)} sections and the header by {ALGORITHM}")
        if nodes:
            for row in manifest.plan:
                rule = f" [{row.rule}]" if row.rule else ""
                click.echo(
                    f"{row.processor:5} {row.segment:8} {row.op:16} {row.node}{rule}: {row.reason}"
                )
    say_written(html, as_json=as_json)
