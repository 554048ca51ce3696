"""Look for boards, with a line for each place that was looked at."""

import click

from toolkit.cli.actions.outputs import print_result
from toolkit.cli.commands.board import Find
from toolkit.cli.options.fleet import BoardLogin
from toolkit.fleet.boards.discovery import (
    FoundBoard,
    ProbeResult,
    Search,
    SearchOptions,
    find_boards,
    no_boards,
    the_one,
)


def find(options: Find) -> None:
    """Print the boards that are found. Raises NoBoardError: there is none."""
    seen = search(options.search, as_json=options.as_json)
    if not seen.boards:
        raise no_boards(seen)
    print_result(seen.boards, "\n".join(map(_line, seen.boards)), as_json=options.as_json)


def search(options: BoardLogin, *, as_json: bool) -> Search:
    """Look for boards, with a line on standard error for each look."""
    config = "" if options.ssh_config is None else str(options.ssh_config.resolve())
    return find_boards(
        SearchOptions(options.login, config), (lambda _look: None) if as_json else _say_look
    )


def find_address(options: BoardLogin, *, as_json: bool) -> str:
    """Return the address of the only board; NoBoardError lists what was seen otherwise."""
    board = the_one(search(options, as_json=as_json))
    if not as_json:
        click.echo(f"{board.name or 'a board'} at {board.address}", err=True)
    return board.address


def _say_look(look: ProbeResult) -> None:
    click.echo(f"{look.kind:<11} {look.sentence}", err=True)


def _line(board: FoundBoard) -> str:
    """Return one board on one line."""
    if board.facts is None:
        return f"{board.name or 'unknown':<16} {board.address}  does not answer: {board.error}"
    facts, reported = board.facts.facts, board.facts.answer.reported
    running = None if reported is None else reported.running
    parts = (
        facts.module,
        facts.jetpack,
        "" if running is None else f"runs {running.name} {running.version}",
    )
    return f"{board.name:<16} {board.address}  {', '.join(filter(None, parts))}".rstrip()
