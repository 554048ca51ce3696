"""Several rollouts at once: which one a device belongs to. A newer one takes devices over, and an
older one never gets them back. Pure functions over the states of all rollouts by their numbers,
which rise with time."""

from collections.abc import Iterable, Mapping

from toolkit.fleet.rollout.groups import REST
from toolkit.fleet.rollout.values import (
    ENDED,
    GONE,
    RolloutSpec,
    RolloutState,
    Superseded,
)


def owners(states: Mapping[int, RolloutState]) -> dict[str, int]:
    """Return the rollout of each device: the newest that has it."""
    return {
        device: number
        for number in sorted(states)
        if not states[number].waits
        for device, state in states[number].devices.items()
        if state.phase not in GONE
    }


def taken_over(
    states: Mapping[int, RolloutState], by: int, devices: Iterable[str], at_s: float
) -> dict[int, Superseded]:
    """Return what the older rollouts lose when a rollout takes devices."""
    taken = tuple(devices)
    events = {}
    for number, state in states.items():
        if number >= by:
            continue
        lost = tuple(
            device
            for device in taken
            if device in state.devices and state.devices[device].phase not in GONE
        )
        if lost:
            events[number] = Superseded(at_s=at_s, devices=lost, by=by)
    return events


def may_join(
    number: int, spec: RolloutSpec, state: RolloutState, device: str, owner: int | None
) -> bool:
    """Whether a device that fits a rollout may enter it late: only `rest` takes unnamed ones."""
    known = state.devices.get(device)
    ended = state.status in ENDED - {"finished"} or state.status == "rolling_back"
    return (
        spec.late_joiners
        and spec.groups[-1] == REST
        and not ended
        and not state.waits
        and (known is None or known.phase == "decommissioned")
        and (owner is None or owner < number)
    )
