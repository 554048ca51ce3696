"""How the commands of a device look on a terminal, and in files."""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from device.protocol.documents import CommandState
from toolkit.errors import RolloutError
from toolkit.fleet.server.commands import Given
from toolkit.fleet.server.history import printable

JPEG = "jpeg"


def print_given(given: Given, *, as_json: bool, wait_s: float) -> None:
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


def print_ended(states: Sequence[CommandState], *, as_json: bool) -> None:
    """Print commands that have ended."""
    if as_json:
        click.echo(msgspec.json.encode(states).decode())
        return
    for state in states:
        click.echo(_line(state))
    click.echo(f"{len(states)} commands were cleared")


def write_result(state: CommandState, path: Path) -> None:
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
