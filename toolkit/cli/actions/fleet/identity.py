"""Issue, expect, list and revoke the certificates of devices."""

import secrets
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from device.protocol.mqtt import LinkSettings
from toolkit.cli.commands.fleet import Expect, Issue, ListDevices, Revoke
from toolkit.fleet.authority import SERVER, Authority
from toolkit.fleet.brokers.software import SOFTWARE, why_connected
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.folder import broker_files
from toolkit.fleet.trust import certificates


def issue(options: Issue) -> None:
    """Make key and certificate of a device here. Raises TandemError."""
    authority, device = _authority(options.folder), options.device
    readmitted = _readmit(options.folder, (device,))
    issued = certificates.issue_device(authority, device, options.output, readmitted)
    until = f"{issued.not_after:%Y-%m-%d}"
    row = {"device": device, "serial": str(issued.serial), "not_after": issued.not_after}
    text = f"{device} has a certificate until {until}: copy {options.output} to it"
    _admit(options.folder, msgspec.json.encode(row) if options.as_json else text, readmitted)


def expect(options: Expect) -> None:
    """Let devices enrol themselves, once. Raises TandemError, click.UsageError."""
    file = options.list_file
    lines: list[str] = [] if file is None else [line.strip() for line in file]
    names = [*options.devices, *filter(None, lines)]
    if not names:
        raise click.UsageError("no device is named: give ids, or --list FILE")
    readmitted = _readmit(options.folder, names)
    certificates.expect(_authority(options.folder), names, readmitted)
    text = f"{len(names)} devices may enrol themselves, once each"
    answer = msgspec.json.encode({"expected": names}) if options.as_json else text
    _admit(options.folder, answer, readmitted)


def _authority(folder: Path) -> Authority:
    return Authority(folder / "identity")


def _readmit(folder: Path, names: Sequence[str]) -> Sequence[str]:
    """End what revoked ones of some devices have open; return them. Raises TandemError."""
    authority = _authority(folder)
    if revoked := certificates.revoked_among(authority, names):
        certificates.readmit(
            authority, revoked, broker_files(folder), _as_server(folder, "readmit")
        )
    return revoked


def _as_server(folder: Path, what: str) -> LinkSettings:
    name = f"tandem-{what}-{secrets.token_hex(4)}"
    return load_fleet(folder).link_settings(name, (), SERVER)


def _admit(folder: Path, text: str | bytes, readmitted: Sequence[str]) -> None:
    """Make new devices known to a broker that keeps accounts, or that denies their ids; print
    `text`, JSON in bytes, and what is left to be done."""
    broker = broker_files(folder)
    software = SOFTWARE[broker.software]
    is_known = not (software.keeps_accounts or readmitted)
    is_told = is_known or certificates.update_broker(_authority(folder), broker)
    click.echo(text)
    if not is_told:
        click.echo(software.tell.format(folder=broker.folder), err=isinstance(text, bytes))


def revoke(options: Revoke) -> None:
    """Shut a device out of the broker, and end its connections. Raises TandemError."""
    folder, device = options.folder, options.device
    broker = broker_files(folder)
    settings = _as_server(folder, "revoke")
    result = certificates.revoke_device(_authority(folder), device, broker)
    why = why_connected(broker, settings, device, broker_told=result.broker_told)
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
