"""Which tactics an engine carries: the best by estimate, all, or the fastest measured ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from device.runtime.cuda.tactics import fastest
from device.runtime.timing_cache import DeviceTimes, TimingCache
from toolkit.gpu.ir.launch import TunableOp
from toolkit.gpu.target import GpuTarget


@dataclass(frozen=True, slots=True)
class TacticOptions:
    """Options of a build.

    `exhaustive`: carry all tactics, not the best few by estimate. `workspace_bytes`: limit for the
    workspace of one segment. `timings`: times measured on a device; the fastest tactics come first.
    """

    exhaustive: bool = False
    workspace_bytes: int | None = None
    timings: TimingCache | None = None


def times_for(
    timings: TimingCache, gpu: GpuTarget, keys: Sequence[Sequence[str]]
) -> DeviceTimes | None:
    """Return the times of the device with this GPU and most of these tactics; None without any."""
    tactics = {key for op_keys in keys for key in op_keys}
    devices = [
        device
        for device in timings.devices
        if (device.gpu.sm, device.gpu.sm_count) == (gpu.sm, gpu.sm_count)
        and not tactics.isdisjoint(device.median_us)
    ]
    return max(devices, key=lambda device: len(tactics & device.median_us.keys()), default=None)


def fastest_first(
    ops: Sequence[TunableOp], keys: Sequence[Sequence[str]], times: DeviceTimes, *, only: bool
) -> tuple[TunableOp, ...]:
    """Put the fastest tactic of each operation first; `only`: drop all others.

    `keys` are by operation and tactic. An operation with an untimed tactic stays as it is.
    """
    ordered = []
    for op, op_keys in zip(ops, keys, strict=True):
        if all(key in times.median_us for key in op_keys):
            at = fastest(op_keys, times.median_us)
            slower = () if only else (*op.tactics[:at], *op.tactics[at + 1 :])
            ordered.append(replace(op, tactics=(op.tactics[at], *slower)))
        else:
            ordered.append(op)
    return tuple(ordered)


def timed_text(
    name: str, keys: Sequence[Sequence[str]], times: DeviceTimes | None, gpu: GpuTarget
) -> str:
    """Return a note on whose times chose the tactics of a segment, and for how many operations."""
    choices = [op_keys for op_keys in keys if len(op_keys) > 1]
    if times is None:
        return (
            f"segment {name}: the timing cache has no times of its tactics on a GPU of "
            f"sm_{gpu.sm} with {gpu.sm_count} SMs; they are chosen by estimate"
        )
    timed = sum(all(key in times.median_us for key in op_keys) for op_keys in choices)
    device = times.gpu
    state = [f"driver {device.driver}"] if device.driver else []
    state += [f"power mode {device.power_mode}"] if device.power_mode else []
    return (
        f"segment {name}: tactics by times of {device.name} ({', '.join(state) or 'no state'}), "
        f"{timed} of {len(choices)} choices"
    )
