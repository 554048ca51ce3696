"""--max-memory of the commands that read a model."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


def memory_option(command: F) -> F:
    """Add --max-memory; it sets the limit of this process and is no parameter of the command."""
    option = click.option(
        "--max-memory",
        callback=_set_limit,
        expose_value=False,
        metavar="SIZE",
        help="Most memory that the model may take on this machine, such as 8GiB or 500MiB. "
        "[default: half of the machine's]",
    )
    return option(command)


def _set_limit(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    match = re.fullmatch(r"([0-9]{1,7})(MiB|GiB)", value)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a size such as 8GiB or 500MiB")
    from toolkit.graph.max_memory import set_max_memory

    set_max_memory(int(match[1]) * _UNITS[match[2]])
    ctx.call_on_close(lambda: set_max_memory(None))
