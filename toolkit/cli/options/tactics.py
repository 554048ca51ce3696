"""What commands ask and say about the tactics of GPU kernels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from device.runtime.timing_cache import TimingCache, read_timings
from toolkit.cli.options.finite import FiniteRange

F = TypeVar("F", bound=Callable[..., Any])


def parse_timings(
    ctx: click.Context, param: click.Parameter, value: Path | None
) -> TimingCache | None:
    """A timing cache that is there: a build measures nothing."""
    if value is None:
        return None
    if not value.exists():
        raise click.BadParameter(
            f"{value} does not exist; `tandem bench ENGINE --timing-cache {value.name}` writes it "
            "on the board"
        )
    return read_timings(value)


def not_timed(cache: Path) -> str:
    """What to say of a timing cache where no segment runs on a GPU."""
    return f"{cache} was left as it is: no tactic was timed, for no segment runs on a GPU here"


def tactic_options(command: F) -> F:
    """Add --timing-cache (as `timings`), --exhaustive and --workspace-mib."""
    options = (
        click.option(
            "--timing-cache",
            "timings",
            type=click.Path(path_type=Path),
            callback=parse_timings,
            help="Times measured on the board: carry the fastest GPU kernels only.",
        ),
        click.option(
            "--exhaustive", is_flag=True, help="Carry every GPU tactic, not the best by estimate."
        ),
        click.option(
            "--workspace-mib",
            type=FiniteRange(min=0, max=2**20),
            help="Most memory of a GPU segment beside its weights, in MiB.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
