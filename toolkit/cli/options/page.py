"""`--html FILE`: the page of a command, one file with everything inside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def html_option(content: str) -> Decorator:
    """Return the option; `content`: what the page shows, for the help text."""
    return click.option(
        "--html",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help=f"Write an HTML page: {content}.",
    )


def say_written(html: Path | None, *, as_json: bool) -> None:
    """Say where the page is; JSON stays alone on standard output."""
    if html is not None:
        click.echo(f"wrote {html}", err=as_json)
