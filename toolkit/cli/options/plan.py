"""What `tandem plan` and `tandem build` ask of a plan in the same words."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from toolkit.partition.planning.objectives import DEFAULT, GOALS

F = TypeVar("F", bound=Callable[..., Any])


def plan_options(command: F) -> F:
    """The options that say what a plan aims at."""
    options = (
        click.option(
            "--objective",
            type=click.Choice(list(GOALS)),
            default=DEFAULT,
            show_default=True,
            help="What the split between GPU and DLA is the best for.",
        ),
        click.option("--power-mode", help="A power mode of the profile. [default: highest clocks]"),
        click.option(
            "--max-crossings",
            type=click.IntRange(min=0),
            help="How many tensors may pass between processors. [default: any]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
