"""The option `--plugin` of the commands that read a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from toolkit.plugins import Plugin
from toolkit.plugins.load import load_plugins

F = TypeVar("F", bound=Callable[..., Any])


def plugin_option(command: F) -> F:
    """Give a command `plugins`: those of the files named with --plugin."""
    option = click.option(
        "--plugin",
        "plugins",
        type=click.Path(path_type=Path),
        multiple=True,
        callback=_load,
        metavar="FILE.py",
        help="Operators of your own (docs/PLUGINS.md); the file is run.",
    )
    return option(command)


def _load(
    ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]
) -> tuple[Plugin, ...]:
    return tuple(plugin for path in paths for plugin in load_plugins(path))
