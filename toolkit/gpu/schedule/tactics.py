"""Which tactics an engine carries: the best by estimate, all of them, or the fastest on a board."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from device.runtime.cuda.tactics import fastest
from device.runtime.timing_cache import DeviceTimes, TimingCache
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.target import GpuTarget


@dataclass(frozen=True, slots=True)
class TacticOptions:
    """What a build may be asked about tactics.

    `exhaustive`: carry all, not the best few by estimate. `workspace_bytes`: what one segment's
    workspace may take. `timings`: times measured on a board; with them the fastest come first.
    """

    exhaustive: bool = False
    workspace_bytes: int | None = None
    timings: TimingCache | None = None


def times_for(
    timings: TimingCache, gpu: GpuTarget, keys: Sequence[Sequence[str]]
) -> DeviceTimes | None:
    """Return the times of the GPU of this kind that has most of these tactics; None without any."""
    wanted = {key for named in keys for key in named}
    fits = [
        one
        for one in timings.devices
        if (one.gpu.sm, one.gpu.sm_count) == (gpu.sm, gpu.sm_count)
        and not wanted.isdisjoint(one.median_us)
    ]
    return max(fits, key=lambda one: len(wanted & one.median_us.keys()), default=None)


def fastest_first(
    work: Sequence[TunableOp], keys: Sequence[Sequence[str]], times: DeviceTimes, *, only: bool
) -> tuple[TunableOp, ...]:
    """Put the fastest tactic of each piece of work first; `only`: leave out the others.

    `keys` are by work and tactic. Work with a tactic that was not timed stays as it is.
    """
    made = []
    for one, named in zip(work, keys, strict=True):
        if all(key in times.median_us for key in named):
            at = fastest(named, times.median_us)
            others = () if only else (*one.tactics[:at], *one.tactics[at + 1 :])
            made.append(replace(one, tactics=(one.tactics[at], *others)))
        else:
            made.append(one)
    return tuple(made)


def timed_text(
    name: str, keys: Sequence[Sequence[str]], times: DeviceTimes | None, gpu: GpuTarget
) -> str:
    """Say whose times chose the tactics of a segment, and for how much of its work."""
    choices = [named for named in keys if len(named) > 1]
    if times is None:
        return (
            f"segment {name}: the timing cache has no times of its tactics on a GPU of "
            f"sm_{gpu.sm} with {gpu.sm_count} SMs; they are chosen by estimate"
        )
    timed = sum(all(key in times.median_us for key in named) for named in choices)
    found = times.gpu
    state = [f"driver {found.driver}"] if found.driver else []
    state += [f"power mode {found.power_mode}"] if found.power_mode else []
    return (
        f"segment {name}: tactics by times of {found.name} ({', '.join(state) or 'no state'}), "
        f"{timed} of {len(choices)} choices"
    )
