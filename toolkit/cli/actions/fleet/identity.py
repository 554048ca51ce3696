"""Issue, expect, list and revoke the certificates of devices."""

import secrets
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from toolkit.cli.commands.fleet import Expect, Issue, ListDevices, Revoke
from toolkit.fleet.authority import SERVER, Authority
from toolkit.fleet.brokers.software import SOFTWARE, why_connected
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import broker_files
from toolkit.fleet.trust import certificates


def issue(options: Issue) -> None:
    """Make key and certificate of a device here. Raises TandemError."""
    issued = certificates.issue_device(_authority(options.folder), options.device, options.output)
    until = f"{issued.not_after:%Y-%m-%d}"
    row = {"device": options.device, "serial": str(issued.serial), "not_after": issued.not_after}
    text = f"{options.device} has a certificate until {until}: copy {options.output} to it"
    _admit(options.folder, msgspec.json.encode(row) if options.as_json else text)


def expect(options: Expect) -> None:
    """Let devices enrol themselves, once. Raises TandemError, click.UsageError."""
    file = options.list_file
    lines: list[str] = [] if file is None else [line.strip() for line in file]
    names = [*options.devices, *filter(None, lines)]
    if not names:
        raise click.UsageError("no device is named: give ids, or --list FILE")
    certificates.expect(_authority(options.folder), names)
    text = f"{len(names)} devices may enrol themselves, once each"
    _admit(options.folder, msgspec.json.encode({"expected": names}) if options.as_json else text)


def _authority(folder: Path) -> Authority:
    return Authority(folder / "identity")


def _admit(folder: Path, text: str | bytes) -> None:
    """Make new devices known to a broker that keeps accounts; print `text`, JSON in bytes, and what
    is left to be done."""
    broker = broker_files(folder)
    software = SOFTWARE[broker.software]
    is_told = not software.keeps_accounts or certificates.update_broker(_authority(folder), broker)
    click.echo(text)
    if not is_told:
        click.echo(software.tell.format(folder=broker.folder), err=isinstance(text, bytes))


def revoke(options: Revoke) -> None:
    """Shut a device out of the broker, and end its connections. Raises TandemError."""
    folder, device = options.folder, options.device
    broker = broker_files(folder)
    settings = load_fleet(folder).link_settings(f"tandem-revoke-{secrets.token_hex(4)}", (), SERVER)
    result = certificates.revoke_device(_authority(folder), device, broker)
    why = why_connected(broker, settings, device, told=result.broker_told)
    if options.as_json:
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


def list_devices(options: ListDevices) -> None:
    """Print the devices and their certificates. Raises TandemError."""
    rows = certificates.identities(_authority(options.folder))
    if options.as_json:
        click.echo(msgspec.json.encode(rows))
        return
    table = Table("device", "state", "until", "", box=None)
    for row in rows:
        until = "" if row.not_after is None else f"{row.not_after:%Y-%m-%d}"
        renew = "renew it soon" if certificates.is_due(row) else ""
        table.add_row(row.device, row.state, until, renew)
    Console().print(table)
