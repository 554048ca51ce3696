"""The options of a plan and of GPU kernels."""

from dataclasses import dataclass
from pathlib import Path

import click

from device.runtime.timing_cache import TimingCache, read_timings
from toolkit.cli.command import PATH, option
from toolkit.cli.options.choices import complete_power_mode


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """Limits of a plan, and the nodes that the user places."""

    power_mode: str | None = option(
        "A power mode of the profile. [default: highest clocks]", complete=complete_power_mode
    )
    max_crossings: int | None = option(
        "Maximum number of tensors between processors. [default: no limit]", min=0
    )
    force_dla: tuple[str, ...] = option(
        "Run a node on the DLA; `all`: all that its rules allow.", metavar="NODE"
    )
    force_gpu: tuple[str, ...] = option(
        "Run a node on the GPU; `all`: all but --force-dla.", metavar="NODE"
    )
    min_gain: float | None = option(
        "Minimum relative gain for a move to the DLA. [default: half the model's error]",
        min=0, max=1,
    )  # fmt: skip
    max_latency_ms: float | None = option(
        "Choose the batch too: the fastest within this latency.", min=0, min_open=True
    )


def _parse_timings(value: Path | None) -> TimingCache | None:
    """Read an existing timing cache; a build measures nothing itself."""
    if value is None:
        return None
    if not value.exists():
        raise click.BadParameter(
            f"{value} does not exist; `tandem bench ENGINE --timing-cache {value.name}` writes it "
            "on the board"
        )
    return read_timings(value)


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Which tactics of GPU kernels are written."""

    timings: TimingCache | None = option(
        "Times measured on the board: only the fastest GPU kernels are written.",
        "--timing-cache", type=PATH, parse=_parse_timings,
    )  # fmt: skip
    exhaustive: bool = option("Write every GPU tactic, not only the best by estimate.")
    workspace_mib: float | None = option(
        "Limit of a GPU segment's workspace (memory without weights), in MiB.", min=0, max=2**20
    )
