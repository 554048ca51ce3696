"""`tandem fleet statement`: what signs a bundle that is carried to one device."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option


@click.command(
    epilog="Example: tandem fleet statement person.bundle --device cam-01 --out cam-01.statement"
)
@click.argument("bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", required=True, metavar="ID", help="The device that shall install it.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write.",
)
@click.option("--retry", is_flag=True, help="Also if the device has rolled it back before.")
@click.option(
    "--gate",
    "gates",
    default="",
    metavar="LIST",
    help="What the bundle must say of itself, such as task_score>=0.9, licence in [MIT].",
)
@fleet_option
@json_option
def statement(
    bundle: Path, device: str, out: Path, retry: bool, gates: str, folder: Path, as_json: bool
) -> None:
    """Write the statement by which one device installs BUNDLE without a broker.

    It goes to the device beside the bundle, over a serial line or UDP. The bundle is published in
    the fleet's repository if it is not. The statement holds as long as the repository's timestamp.
    """
    from device.files import replacing
    from toolkit.fleet.rollout.gates import parse_gates
    from toolkit.fleet.trust.statement import make_statement

    data = make_statement(bundle, device, folder, retry=retry, gates=parse_gates(gates))
    with replacing(out) as file:
        file.write(data)
    if as_json:
        click.echo(msgspec.json.encode({"out": str(out), "bytes": len(data)}))
        return
    click.echo(f"wrote {out}, {len(data) / 1e3:.1f} kB, for {device}")
