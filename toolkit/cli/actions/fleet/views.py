"""The store of a fleet, and how a view of it is shown."""

import getpass
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import click
import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from toolkit.fleet.fleet_folder import load_fleet
from toolkit.fleet.store.database import Database

View = TypeVar("View")
WATCH_S = 1.0


@contextmanager
def open_store(folder: Path) -> Iterator[Database]:
    """Yield the store of a fleet. Raises TandemError."""
    with closing(load_fleet(folder).open_store()) as database:
        yield database


def operator() -> str:
    """Return who gives an order, for the audit log."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def show(
    read: Callable[[], View],
    draw: Callable[[View], RenderableType],
    *,
    as_json: bool,
    watch: bool,
    is_over: Callable[[View], bool] = lambda view: False,
) -> None:
    """Print a view once, or as it changes until it is over. In JSON each is one line."""
    view = read()
    if as_json:
        click.echo(_json(view))
        while watch and not is_over(view):
            time.sleep(WATCH_S)
            if (newer := read()) != view:
                click.echo(_json(newer))
            view = newer
        return
    console = Console()
    if not watch:
        console.print(draw(view))
        return
    with Live(draw(view), console=console, auto_refresh=False) as live:
        while not is_over(view):
            time.sleep(WATCH_S)
            view = read()
            live.update(draw(view), refresh=True)


def json_array(views: Iterable[object]) -> Iterator[str]:
    """Yield the parts of an array in JSON, which needs never be in memory as a whole."""
    before = "["
    for view in views:
        yield f"{before}{_json(view)}"
        before = ","
    yield "]" if before == "," else "[]"


def _json(view: object) -> str:
    return msgspec.json.encode(view).decode()
