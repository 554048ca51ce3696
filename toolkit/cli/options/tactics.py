"""The options and messages about tactics of GPU kernels."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from device.runtime.timing_cache import TimingCache, read_timings
from toolkit.cli.options.finite import FiniteRange

F = TypeVar("F", bound=Callable[..., Any])


def parse_timings(
    ctx: click.Context, param: click.Parameter, value: Path | None
) -> TimingCache | None:
    """Read an existing timing cache; a build measures nothing itself."""
    if value is None:
        return None
    if not value.exists():
        raise click.BadParameter(
            f"{value} does not exist; `tandem bench ENGINE --timing-cache {value.name}` writes it "
            "on the board"
        )
    return read_timings(value)


def tactic_options(command: F) -> F:
    """Add --timing-cache, --exhaustive and --workspace-mib.

    The command takes all of them as one `tactics`, a TacticOptions.
    """
    options = (
        click.option(
            "--timing-cache",
            "timings",
            type=click.Path(path_type=Path),
            callback=parse_timings,
            help="Times measured on the board: only the fastest GPU kernels are written.",
        ),
        click.option(
            "--exhaustive",
            is_flag=True,
            help="Write every GPU tactic, not only the best by estimate.",
        ),
        click.option(
            "--workspace-mib",
            type=FiniteRange(min=0, max=2**20),
            help="Limit of a GPU segment's workspace (memory without weights), in MiB.",
        ),
    )

    @wraps(command)
    def with_tactics(
        *args: object,
        timings: TimingCache | None,
        exhaustive: bool,
        workspace_mib: float | None,
        **others: object,
    ) -> object:
        from toolkit.gpu.schedule.tactics import TacticOptions

        limit = None if workspace_mib is None else int(workspace_mib * 2**20)
        tactics = TacticOptions(exhaustive=exhaustive, workspace_bytes=limit, timings=timings)
        return command(*args, tactics=tactics, **others)

    decorated: Any = with_tactics
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]
