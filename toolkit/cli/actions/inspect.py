"""`tandem inspect`: what is inside an engine, a model or a file of arrays.

For an engine it loads no onnx.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from device.engine.checksums import ALGORITHM, NO_CHECKSUMS
from device.engine.file import Engine, open_engine
from device.engine.purposes import bytes_by_purpose
from device.errors import EngineError
from toolkit.cli.actions.outputs import print_page_path
from toolkit.cli.commands.inspect import Inspect
from toolkit.cli.manifest_text import bytes_text, manifest_text
from toolkit.evaluate.infer.runner import kind_of
from toolkit.evaluate.infer.saved import load_samples
from toolkit.html.page import write_page

if TYPE_CHECKING:
    from toolkit.cli.pages.engine_operations import OperationRow


def inspect(options: Inspect) -> None:
    """Print what is in a file. Raises TandemError, click.UsageError."""
    file, kind = options.file, kind_of(options.file)
    if options.verify and kind in ("model", "arrays"):
        raise click.UsageError(f"--verify is for an engine; {file} is none.")
    if kind == "model":
        from toolkit.cli.actions.inspect_model import inspect_model

        inspect_model(options)
        return
    if options.times is not None and not options.kernels:
        raise click.UsageError("--times is shown beside --kernels; give both.")
    if options.profile or options.shapes or options.plugins:
        raise click.UsageError(
            f"--profile, --shape and --plugin are for an ONNX model; {file} is none."
        )
    if kind != "arrays":
        _engine(options)
    elif options.html is not None:
        raise click.UsageError(f"--html is for a model or an engine; {file} holds arrays.")
    else:
        _arrays(file, as_json=options.as_json)


def _arrays(path: Path, *, as_json: bool) -> None:
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


def _engine(options: Inspect) -> None:
    with open_engine(options.file) as engine:
        if options.verify:
            engine.verify()
            if engine.checksums is None:
                raise EngineError(f"{options.file} {NO_CHECKSUMS}")
        if options.html is not None:
            from toolkit.cli.pages.engine_card import engine_facts, engine_page

            write_page(options.html, engine_page(engine_facts(engine)))
        if options.as_json:
            values = msgspec.to_builtins(engine.manifest)
            values["bytes"] = bytes_by_purpose(engine.manifest, engine.entries)
            values["checksums"] = ALGORITHM if engine.checksums else None
            values["verified"] = options.verify
            if options.kernels:
                from toolkit.cli.pages.engine_operations import json_rows

                values["operations"] = json_rows(_operations(engine, options))
            click.echo(json.dumps(values))
            return
        _print_engine(engine, options)
    print_page_path(options.html, as_json=False)


def _operations(engine: Engine, options: Inspect) -> "tuple[OperationRow, ...]":
    from toolkit.cli.pages.engine_operations import operation_rows, read_times

    return operation_rows(engine, read_times(options.times) if options.times else ())


def _print_engine(engine: Engine, options: Inspect) -> None:
    manifest = engine.manifest
    click.echo(manifest_text(manifest))
    click.echo(bytes_text(bytes_by_purpose(manifest, engine.entries)))
    if engine.checksums is None:
        click.echo(f"{options.file} {NO_CHECKSUMS}")
    elif options.verify:
        click.echo(f"verified: {len(engine.entries)} sections and the header by {ALGORITHM}")
    if options.kernels:
        from toolkit.cli.pages.engine_operations import operations_text

        click.echo(operations_text(_operations(engine, options)))
    if options.nodes:
        for row in manifest.plan:
            rule = f" [{row.rule}]" if row.rule else ""
            click.echo(
                f"{row.processor:5} {row.segment:8} {row.op:16} {row.node}{rule}: {row.reason}"
            )
