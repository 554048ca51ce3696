"""The planning options that `tandem plan` and `tandem build` share."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import click

from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.names import complete_power_mode
from toolkit.partition.planning.objectives import DEFAULT

F = TypeVar("F", bound=Callable[..., Any])


def plan_options(goals: Collection[str]) -> Callable[[F], F]:
    """Return what adds the options that set the objective, one of `goals`, and limits of a plan."""
    options = (
        click.option(
            "--objective",
            type=click.Choice(list(goals)),
            default=DEFAULT,
            show_default=True,
            help="What the split between GPU and DLA optimizes.",
        ),
        click.option(
            "--power-mode",
            shell_complete=complete_power_mode,
            help="A power mode of the profile. [default: highest clocks]",
        ),
        click.option(
            "--max-crossings",
            type=click.IntRange(min=0),
            help="Most tensors that may cross between processors. [default: no limit]",
        ),
        click.option(
            "--force-dla",
            multiple=True,
            metavar="NODE",
            help="Run a node on the DLA; `all`: each node that its rules take.",
        ),
        click.option(
            "--force-gpu",
            multiple=True,
            metavar="NODE",
            help="Run a node on the GPU; `all`: each that is not named for the DLA.",
        ),
        click.option(
            "--min-gain",
            type=FiniteRange(min=0, max=1),
            help="Least share that a move to the DLA must gain. [default: half the model's error]",
        ),
        click.option(
            "--max-latency-ms",
            type=FiniteRange(min=0, min_open=True),
            help="Choose the batch too: the fastest within this latency.",
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add
