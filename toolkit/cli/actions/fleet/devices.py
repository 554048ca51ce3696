"""Print who is in a fleet, label devices and have them do something."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from device.protocol.documents import CommandState
from toolkit.cli.actions.fleet.tables import device_table, devices_table
from toolkit.cli.actions.fleet.views import open_store, operator, show
from toolkit.cli.commands.fleet import Clear, Devices, Label, RunCommand, ShowDevice
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.rollout.targets import fulfils, parse_requirements
from toolkit.fleet.server.commands import Given, clear_ended, give, make_command
from toolkit.fleet.server.history import printable
from toolkit.fleet.server.operations import label_device, unknown_device
from toolkit.fleet.server.views import DeviceView, device_views
from toolkit.fleet.store.devices import load_devices, load_ear

JPEG = "jpeg"  # the key of a picture in a result


def devices(options: Devices) -> None:
    """Print the devices that fulfil the options. Raises TandemError."""
    with open_store(options.folder) as database:
        requirements = parse_requirements(options.where)

        def read() -> Sequence[DeviceView]:
            ear = load_ear(database)
            targets = {row.id: row.target(ear) for row in load_devices(database)}
            return [
                view
                for view in device_views(database)
                if (not requirements or fulfils(targets[view.id], requirements))
                and options.state in (None, view.state)
                and options.phase in (None, view.phase)
                and options.number in (None, view.rollout)
            ]

        show(read, devices_table, as_json=options.as_json, watch=options.watch)


def show_device(options: ShowDevice) -> None:
    """Print one device. Raises RolloutError: it is not known."""
    with open_store(options.folder) as database:

        def read() -> DeviceView:
            for view in device_views(database):
                if view.id == options.device:
                    return view
            raise RolloutError(unknown_device(database, options.device))

        show(read, device_table, as_json=options.as_json, watch=options.watch)


def label(options: Label) -> None:
    """Change the labels of a device. Raises TandemError."""
    with open_store(options.folder) as database:
        label_device(database, options.device, options.labels, operator())


def run_command(options: RunCommand) -> None:
    """Give a command, and wait for its end; exits with 1 if it failed. Raises TandemError."""
    fleet, wait_s = load_fleet(options.folder), options.wait_s
    with open_store(options.folder) as database:
        command = make_command(
            database,
            options.device,
            options.op,
            options.words,
            expires_s=options.expires_s,
            who=operator(),
        )
    given = give(fleet, command, wait_s=wait_s)
    succeeded = given.state is not None and given.state.status == "successful"
    if options.output is not None and given.state is not None and succeeded:
        _write_result(given.state, options.output)
    _print_given(given, as_json=options.as_json, wait_s=wait_s)
    if wait_s and not succeeded:
        raise SystemExit(1)


def clear(options: Clear) -> None:
    """Print the commands that have ended, and clear them. Raises TandemError."""
    _print_ended(clear_ended(load_fleet(options.folder), options.device), as_json=options.as_json)


def _print_given(given: Given, *, as_json: bool, wait_s: float) -> None:
    """Print a command and how it ended."""
    command, state = given.command, given.state
    if as_json:
        document = {"command": command, "state": state}
        click.echo(msgspec.json.encode(document).decode())
        return
    if state is None:
        text = f"the command {command.id} was given"
        if wait_s:
            text += (
                f"; {command.device} has not answered within {wait_s:g} s, and executes it until "
            )
            text += f"{command.expires}"
        click.echo(text)
        return
    click.echo(_line(state))
    for line in _lines(state.result):
        click.echo(line)


def _print_ended(states: Sequence[CommandState], *, as_json: bool) -> None:
    """Print commands that have ended."""
    if as_json:
        click.echo(msgspec.json.encode(states).decode())
        return
    for state in states:
        click.echo(_line(state))
    click.echo(f"{len(states)} commands were cleared")


def _write_result(state: CommandState, path: Path) -> None:
    """Write the picture of a result, or all of it in JSON. Raises RolloutError."""
    try:
        picture = state.result.get(JPEG)
        data = msgspec.json.encode(state.result) + b"\n"
        if isinstance(picture, str):
            data = base64.b64decode(picture, validate=True)
        path.write_bytes(data)
    except (OSError, binascii.Error) as error:
        raise RolloutError(f"the result cannot be written to {path}: {error}") from error


def _line(state: CommandState) -> str:
    reason = f": {printable(state.reason)}" if state.reason else ""
    return f"{state.op} {state.id} {state.status}{reason}"


def _lines(result: dict[str, Any]) -> list[str]:
    """Return a result as lines: those of a log as they are, all else in JSON."""
    rows = result.get("lines")
    if isinstance(rows, list):
        return [printable(" ".join(str(part) for part in _parts(row))) for row in rows]
    shown = {key: value for key, value in result.items() if key != JPEG}
    if not shown:
        return []
    text = msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    return [printable(line) for line in text.splitlines()]


def _parts(row: object) -> Sequence[object]:
    return tuple(row.values()) if isinstance(row, dict) else (row,)
