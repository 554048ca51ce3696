"""Whether a group of a rollout has passed, by what the machine knows of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.fleet.rollout.gates import judge_gates
from toolkit.fleet.rollout.values import DeviceState, GroupState, RolloutSpec

LISTED = 5  # devices that a sentence names


@dataclass(frozen=True, slots=True)
class Undecided:
    """The group is not through. `missing`: figures that live devices have not measured."""

    missing: str = ""


@dataclass(frozen=True, slots=True)
class Passes:
    """The group is through."""


@dataclass(frozen=True, slots=True)
class Fails:
    """The group cannot pass, and why."""

    reason: str


Verdict = Undecided | Passes | Fails


def judge_group(
    spec: RolloutSpec,
    group: GroupState,
    devices: Mapping[str, DeviceState],
    number: int,
    *,
    last: bool,
) -> Verdict:
    """Judge a group. The last one is through once each of its devices has a final phase."""
    size, live = group.size, group.counts.get("live", 0)
    if size == 0:
        return Passes()
    # Not ceil(0.07 * 100), which is 8.
    need = math.ceil(round(spec.success * size, 9))
    if group.open and (last or live < need):
        return Undecided()
    if group.accepted:
        return Passes()
    if live < need:
        share, limit = 100.0 * live / size, 100.0 * spec.success
        return Fails(
            f"the group {group.name} ended with {live} of {size} devices live ({share:.3g} %), at "
            f"least {limit:g} % must be"
        )
    if not spec.gates:
        return Passes()
    return _judge_gates(spec, group, devices, number)


def _judge_gates(
    spec: RolloutSpec, group: GroupState, devices: Mapping[str, DeviceState], number: int
) -> Verdict:
    measured = {
        device: state.measured
        for device, state in devices.items()
        if state.group == number and state.phase == "live"
    }
    results = judge_gates(spec.gates, measured)
    if broken := [result.broken for result in results if result.broken]:
        return Fails(f"the group {group.name} does not pass its gates: {'; '.join(broken)}")
    if missing := {result.gate.name: result.missing for result in results if result.missing}:
        rows = [f"{name} of {listed(names)}" for name, names in missing.items()]
        return Undecided(f"the group {group.name} has not measured {'; '.join(rows)}")
    return Passes()


def too_many_failures(spec: RolloutSpec, groups: tuple[GroupState, ...], number: int) -> str:
    """Return which limit of failures the groups that have begun exceed; empty if none."""
    limit = spec.max_failures
    begun = groups[: number + 1]
    for group in begun:
        failures = group.failures - group.tolerated
        percent = 100.0 * failures / max(1, group.size)
        if limit.percent is not None and percent > limit.percent:
            return (
                f"{failures} of {group.size} devices of the group {group.name} failed "
                f"({percent:.3g} %), at most {limit.percent:g} % may"
            )
    failures = sum(group.failures - group.tolerated for group in begun)
    if limit.count is not None and failures > limit.count:
        return f"{failures} devices failed, at most {limit.count} may"
    return ""


def listed(names: tuple[str, ...]) -> str:
    """Return some names, and how many there are beside them."""
    shown = ", ".join(names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED} more"
