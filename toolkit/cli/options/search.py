"""How boards are looked for: options, and the lines that say what was seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from toolkit.fleet.boards.discovery import Look, Search, SearchOptions, find_boards, the_one

F = TypeVar("F", bound=Callable[..., Any])


def search_options(command: F) -> F:
    """Add --login and --ssh-config."""
    command = click.option(
        "--ssh-config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Another configuration of ssh for boards that are found.",
    )(command)
    return click.option(
        "--login",
        default="",
        metavar="USER",
        help="Log in to found boards as this user; by default as ssh does, or as they announce.",
    )(command)


def search_of(login: str, ssh_config: Path | None) -> SearchOptions:
    """Return the options of a search."""
    return SearchOptions(login, "" if ssh_config is None else str(ssh_config.resolve()))


def search(options: SearchOptions, *, as_json: bool) -> Search:
    """Look for boards, with a line on standard error for each look."""
    return find_boards(options, (lambda _look: None) if as_json else _say_look)


def found_way(options: SearchOptions, *, as_json: bool) -> str:
    """Return the way to the only board; NoBoardError lists what was seen otherwise."""
    board = the_one(search(options, as_json=as_json))
    if not as_json:
        click.echo(f"{board.name or 'a board'} at {board.way}", err=True)
    return board.way


def _say_look(look: Look) -> None:
    click.echo(f"{look.kind:<11} {look.sentence}", err=True)
