"""`tandem board find`: which boards are there."""

from pathlib import Path

import click
import msgspec

from toolkit.cli.options.fleet import json_option
from toolkit.cli.options.search import search, search_of, search_options
from toolkit.fleet.boards.discovery import FoundBoard, no_boards


@click.command(epilog="Example: tandem board find --login robot --json")
@search_options
@json_option
def find(login: str, ssh_config: Path | None, as_json: bool) -> None:
    """Look for boards: on the USB network, by mDNS, at serial ports.

    Exit status 1: there is none.
    """
    seen = search(search_of(login, ssh_config), as_json=as_json)
    if not seen.boards:
        raise no_boards(seen)
    if as_json:
        click.echo(msgspec.json.encode(seen.boards).decode())
        return
    for board in seen.boards:
        click.echo(_line(board))


def _line(board: FoundBoard) -> str:
    """Return one board on one line."""
    if board.facts is None:
        return f"{board.name or 'unknown':<16} {board.way}  does not answer: {board.error}"
    facts, reported = board.facts.facts, board.facts.answer.reported
    running = None if reported is None else reported.running
    parts = (
        facts.module,
        facts.jetpack,
        "" if running is None else f"runs {running.name} {running.version}",
    )
    return f"{board.name:<16} {board.way}  {', '.join(filter(None, parts))}".rstrip()
