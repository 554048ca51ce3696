"""`tandem fleet identity`: who may connect to the fleet's broker."""

import secrets
from pathlib import Path
from typing import IO

import click
import msgspec

from toolkit.cli.options.fleet import fleet_option, json_option

EPILOG = "Example: tandem fleet identity expect board-1 board-2 --fleet fleet"


@click.group(epilog=EPILOG)
def identity() -> None:
    """Issue, expect, list and revoke the certificates of devices."""


@identity.command(epilog="Example: tandem fleet identity issue board-1 --fleet fleet -o board-1/")
@click.argument("device")
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path))
@fleet_option
@json_option
def issue(device: str, output: Path, folder: Path, as_json: bool) -> None:
    """Make key and certificate of DEVICE here, for benches; -o is the folder to copy to the board.

    Better let a board enrol itself (`tandem fleet identity expect`): its key never leaves it then.
    """
    from toolkit.fleet.authority import Authority
    from toolkit.fleet.trust.certificates import issue_device

    issued = issue_device(Authority(folder / "identity"), device, output)
    untold = _admit(folder)
    if as_json:
        row = {"device": device, "serial": str(issued.serial), "not_after": issued.not_after}
        click.echo(msgspec.json.encode(row))
    else:
        until = f"{issued.not_after:%Y-%m-%d}"
        click.echo(f"{device} has a certificate until {until}: copy {output} to it")
    if untold:
        click.echo(untold, err=as_json)


@identity.command(epilog=EPILOG)
@click.argument("devices", nargs=-1, metavar="DEVICE...")
@click.option("--list", "list_file", metavar="FILE", help="More ids, one a line; - for stdin.",
    type=click.File("r"))  # fmt: skip
@fleet_option
@json_option
def expect(
    devices: tuple[str, ...], list_file: IO[str] | None, folder: Path, as_json: bool
) -> None:
    """Let each DEVICE enrol itself, once, with `tandem-agent enrol` and the claim certificate."""
    from toolkit.fleet.authority import Authority
    from toolkit.fleet.trust.certificates import expect as expect_devices

    lines: list[str] = [] if list_file is None else [line.strip() for line in list_file]
    names = [*devices, *filter(None, lines)]
    if not names:
        raise click.UsageError("no device is named: give ids, or --list FILE")
    expect_devices(Authority(folder / "identity"), names)
    untold = _admit(folder)
    if as_json:
        click.echo(msgspec.json.encode({"expected": names}))
    else:
        click.echo(f"{len(names)} devices may enrol themselves, once each")
    if untold:
        click.echo(untold, err=as_json)


def _admit(folder: Path) -> str:
    """Make new devices known to a broker that keeps accounts; return what is left to be done."""
    from toolkit.fleet.authority import Authority
    from toolkit.fleet.brokers.software import SOFTWARE
    from toolkit.fleet.folder import broker_files
    from toolkit.fleet.trust.certificates import update_broker

    broker = broker_files(folder)
    software = SOFTWARE[broker.software]
    if not software.keeps_accounts or update_broker(Authority(folder / "identity"), broker):
        return ""
    return software.tell.format(folder=broker.folder)


@identity.command(epilog="Example: tandem fleet identity revoke board-1 --fleet fleet")
@click.argument("device")
@fleet_option
@json_option
def revoke(device: str, folder: Path, as_json: bool) -> None:
    """Shut DEVICE out of the broker and end its connections: it was lost, stolen or retired."""
    from toolkit.fleet.authority import SERVER, Authority
    from toolkit.fleet.brokers.software import SOFTWARE, why_connected
    from toolkit.fleet.fleet_folder import load_fleet
    from toolkit.fleet.folder import broker_files
    from toolkit.fleet.trust.certificates import revoke_device

    broker = broker_files(folder)
    settings = load_fleet(folder).link_settings(f"tandem-revoke-{secrets.token_hex(4)}", (), SERVER)
    result = revoke_device(Authority(folder / "identity"), device, broker)
    why = why_connected(broker, settings, device, told=result.broker_told)
    if as_json:
        row = {
            "device": device,
            "revoked": result.certificates,
            "broker_told": result.broker_told,
            "connections_ended": not why,
            "reason": why,
        }
        click.echo(msgspec.json.encode(row))
        return
    ended = "" if why else ", its connections are ended"
    click.echo(f"{device} is revoked ({result.certificates} certificates){ended}")
    software = SOFTWARE[broker.software]
    if not result.broker_told:
        click.echo(f"new connections: {software.tell.format(folder=broker.folder)}")
    if why:
        cut = software.cut.format(folder=broker.folder, device=device)
        click.echo(f"connections that are open may go on ({why}): {cut}")


@identity.command("list", epilog="Example: tandem fleet identity list --fleet fleet")
@fleet_option
@json_option
def list_devices(folder: Path, as_json: bool) -> None:
    """List the devices: expected, enrolled (until when) or revoked."""
    from rich.console import Console
    from rich.table import Table

    from toolkit.fleet.authority import Authority
    from toolkit.fleet.trust.certificates import identities, is_due

    rows = identities(Authority(folder / "identity"))
    if as_json:
        click.echo(msgspec.json.encode(rows))
        return
    table = Table("device", "state", "until", "", box=None)
    for row in rows:
        until = "" if row.not_after is None else f"{row.not_after:%Y-%m-%d}"
        table.add_row(row.device, row.state, until, "renew it soon" if is_due(row) else "")
    Console().print(table)
