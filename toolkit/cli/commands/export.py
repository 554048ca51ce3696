"""`tandem export`: write an engine as files for NVIDIA's own tools."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from toolkit.export.folder import Export


@click.command(epilog="Example: tandem export person.engine --to trtexec -o person-trtexec")
@click.argument("engine", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["trtexec"]),
    default="trtexec",
    show_default=True,
    help="The tool that builds from it.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write; it must not exist.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The file of the engine's profile, where it is none of Tandem's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(engine: Path, to: str, output: Path, profile: Path | None, as_json: bool) -> None:
    """Write ENGINE as ONNX, calibration caches and trtexec scripts.

    There is a folder for each era of TensorRT: with calibration caches (8.5 to 10.7), and strongly
    typed, with Q/DQ in INT8 (from 10.8 on). Each release that the JetPacks of the engine's profile
    bring has a script whose flags its trtexec knows.
    """
    from device.profile import load_profile
    from toolkit.export.folder import as_builtins, export_trtexec

    own = load_profile(profile) if profile is not None else None
    result = export_trtexec(engine, output, own)
    if as_json:
        click.echo(msgspec.json.encode(as_builtins(result)).decode())
    else:
        click.echo(_text(result))


def _text(result: "Export") -> str:
    lines = [f"wrote {result.folder} for {result.profile}"]
    for era in result.eras:
        if era.problem:
            lines.append(f"  no {era.era} export: {era.problem}")
        for row in era.recipes:
            name = f"TensorRT {row.release.version} (JetPack {row.release.jetpack})"
            if row.problem:
                lines.append(f"  not for {name}: {row.problem}")
                continue
            lines.append(f"  {era.era}/trtexec-{row.release.version}.sh: {name}")
            lines += [f"    note: {note}" for note in row.notes]
    return "\n".join(lines)
