"""The option `--plugin` of the commands that read a model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from toolkit.plugins import Plugin

F = TypeVar("F", bound=Callable[..., Any])


def plugin_option(command: F) -> F:
    """Add --plugin: the command gets the plugins of the files as `plugins`."""
    option = click.option(
        "--plugin",
        "plugins",
        type=click.Path(path_type=Path),
        multiple=True,
        callback=_load,
        metavar="FILE.py",
        help="Custom operators (docs/PLUGINS.md). The file is executed.",
    )
    return option(command)


def _load(
    ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]
) -> "tuple[Plugin, ...]":
    if not paths:
        return ()
    from toolkit.plugins.load import load_plugins

    return tuple(plugin for path in paths for plugin in load_plugins(path))
