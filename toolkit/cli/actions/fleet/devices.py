"""Print who is in a fleet, label devices and have them do something."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import RenderableType

from device.protocol.documents import CommandState
from toolkit.cli.actions.fleet.tables import device_table, devices_table
from toolkit.cli.actions.fleet.views import json_array, open_store, operator, show
from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.fleet_devices import (
    Clear,
    Decommission,
    Devices,
    Label,
    ListQueries,
    RunCommand,
    SetQuery,
    ShowDevice,
)
from toolkit.errors import RolloutError
from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.server.commands import Given, clear_ended, give, make_command
from toolkit.fleet.server.history import printable
from toolkit.fleet.server.operations import (
    decommission,
    label_device,
    load_queries,
    requirements_of,
    save_query,
    unknown_device,
)
from toolkit.fleet.server.views import (
    DeviceView,
    DeviceViewPage,
    device_page,
    device_view,
    device_views,
)
from toolkit.fleet.store.device_queries import DeviceFilter, count_devices
from toolkit.fleet.store.devices import load_ear

LISTED = 100  # devices that a table shows at a time
JPEG = "jpeg"  # the key of a picture in a result


def devices(options: Devices) -> None:
    """Print the devices that fulfil the options. Raises TandemError."""
    with open_store(options.folder) as database:
        where = DeviceFilter(
            presence=options.state or "",
            phase=options.phase or "",
            rollout=options.number,
            search=options.search,
            requires=requirements_of(database, options.where),
        )
        if options.as_json and options.limit is None and not options.after and not options.watch:
            for part in json_array(device_views(database, where)):
                click.echo(part, nl=False)
            click.echo()
            return
        limit = options.limit or LISTED

        def read() -> DeviceViewPage:
            return device_page(database, where, after=options.after, limit=limit)

        def draw(page: DeviceViewPage) -> RenderableType:
            counts = count_devices(database, where, load_ear(database))
            return devices_table(page.devices, counts, page.after)

        if options.as_json:
            show(lambda: read().devices, devices_table, as_json=True, watch=options.watch)
        else:
            show(read, draw, as_json=False, watch=options.watch)


def show_device(options: ShowDevice) -> None:
    """Print one device. Raises RolloutError: it is not known."""
    with open_store(options.folder) as database:

        def read() -> DeviceView:
            view = device_view(database, options.device)
            if view is None:
                raise RolloutError(unknown_device(database, options.device))
            return view

        show(read, device_table, as_json=options.as_json, watch=options.watch)


def set_query(options: SetQuery) -> None:
    """Save a query, or take it away. Raises TandemError."""
    with open_store(options.folder) as database:
        save_query(database, options.name, options.where, operator())


def list_queries(options: ListQueries) -> None:
    """Print the saved queries. Raises TandemError."""
    with open_store(options.folder) as database:
        rows = load_queries(database)
    text = "\n".join(f"{name}  {requires}" for name, requires in rows.items())
    print_result(rows, text or "No query is saved.", as_json=options.as_json)


def label(options: Label) -> None:
    """Change the labels of a device. Raises TandemError."""
    with open_store(options.folder) as database:
        label_device(database, options.device, options.labels, operator())


def decommission_device(options: Decommission) -> None:
    """Take a device out of the fleet. Raises TandemError."""
    with open_store(options.folder) as database:
        decommission(database, options.device, operator())


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
    issued = give(fleet, command, wait_s=wait_s)
    succeeded = issued.state is not None and issued.state.status == "successful"
    if options.output is not None and issued.state is not None and succeeded:
        _write_result(issued.state, options.output)
    _print_issued(issued, as_json=options.as_json, wait_s=wait_s)
    if wait_s and not succeeded:
        raise SystemExit(1)


def clear(options: Clear) -> None:
    """Print the commands that have ended, and clear them. Raises TandemError."""
    _print_ended(clear_ended(load_fleet(options.folder), options.device), as_json=options.as_json)


def _print_issued(issued: Given, *, as_json: bool, wait_s: float) -> None:
    """Print a command and how it ended."""
    command, state = issued.command, issued.state
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
