"""`tandem inspect`: what is inside an engine file."""

import json
from pathlib import Path

import click
import msgspec


@click.command(epilog="Example: tandem inspect model.engine --nodes")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--nodes", is_flag=True, help="List every node with its processor and reason.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as JSON.")
def inspect(engine: Path, nodes: bool, as_json: bool) -> None:
    """Show profile, inputs, outputs, segments, crossings and memory of an ENGINE.

    The whole file is checked before anything is shown.
    """
    from device.engine.file import open_engine
    from toolkit.cli.manifest_text import manifest_text

    with open_engine(engine) as opened:
        manifest = opened.manifest
        if as_json:
            click.echo(json.dumps(msgspec.to_builtins(manifest)))
            return
        click.echo(manifest_text(manifest))
        if nodes:
            for row in manifest.plan:
                rule = f" [{row.rule}]" if row.rule else ""
                click.echo(
                    f"{row.processor:5} {row.segment:8} {row.op:16} {row.node}{rule}: {row.reason}"
                )
