"""Options that the commands of a fleet share, and how they show what they read."""

import getpass
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType

F = TypeVar("F", bound=Callable[..., Any])
View = TypeVar("View")
WATCH_S = 1.0

fleet_option = click.option(
    "--fleet",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    envvar="TANDEM_FLEET",
    show_envvar=True,
    default=".",
    show_default="this folder",
    metavar="DIR",
    help="The fleet's folder, with its fleet.toml.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
watch_option = click.option("--watch", is_flag=True, help="Show it anew as it changes.")


def operator() -> str:
    """Return who gives an order, for the audit log."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def show(
    read: Callable[[], View],
    draw: Callable[[View], "RenderableType"],
    *,
    as_json: bool,
    watch: bool,
    is_over: Callable[[View], bool] = lambda view: False,
) -> None:
    """Print a view once, or as it changes until it is over. In JSON each is one line."""
    from rich.console import Console
    from rich.live import Live

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


def _json(view: object) -> str:
    return msgspec.json.encode(view).decode()
