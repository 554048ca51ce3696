"""Groups: in which order the devices of a rollout get the release.

    canary,5%,rest

A comma-separated list. `NAME` (or several, NAME+NAME): the devices with the label group=NAME, or
the one device of that id. `KEY=VALUE`: those with a label. `N%`: so many of all devices, rounded
up, chosen by a hash that differs from rollout to rollout. `@NAME`: those that fulfil a saved query
as the rollout begins. `rest`: all others, the last group. A
device is in the first group that takes it; one that is away proves nothing, so it comes last: with
`rest` no other group takes it.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence

from toolkit.errors import RolloutError
from toolkit.fleet.rollout.targets import Requirement, Target, fulfils

REST = "rest"
GROUP_LABEL = "group"
MAX_GROUPS = 500
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%\Z")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\+[A-Za-z0-9_-]{1,64})*\Z")
_QUERY = re.compile(r"@([A-Za-z0-9_-]{1,64})\Z")
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}=[^,=]{1,200}\Z")


def parse_groups(text: str) -> tuple[str, ...]:
    """Return the groups in a text; RolloutError names the one that is wrong."""
    groups = tuple(part.strip() for part in text.split(","))
    for number, group in enumerate(groups):
        if not any(form.match(group) for form in (_PERCENT, _NAME, _LABEL, _QUERY)):
            raise RolloutError(
                f"{group!r} in the groups {text!r} is none: write a group's name, KEY=VALUE of a "
                "label, @NAME of a saved query, a share such as 5%, or rest"
            )
        if group == REST and number != len(groups) - 1:
            raise RolloutError(f"the groups {text!r} go on after rest, which takes all devices")
        if group in groups[:number] and not _PERCENT.match(group):
            raise RolloutError(f"the groups {text!r} name {group} twice: name each group once")
    shares = [float(match[1]) for group in groups if (match := _PERCENT.match(group))]
    if any(share <= 0.0 for share in shares) or sum(shares) > 100.0:
        raise RolloutError(
            f"the shares in {text!r} are {sum(shares):g}%: each is above 0, all together 100% at "
            "most"
        )
    if len(groups) > MAX_GROUPS:
        raise RolloutError(f"{len(groups)} groups are too many: a rollout has {MAX_GROUPS} at most")
    return groups


def queries_in(groups: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the saved queries that groups are chosen by."""
    return tuple(match[1] for group in groups if (match := _QUERY.match(group)))


def rank(key: str, device: str) -> bytes:
    """Return what devices are ordered by in a rollout."""
    return hashlib.sha256(f"{key}/{device}".encode()).digest()


def assign(
    groups: Sequence[str],
    targets: Sequence[Target],
    key: str,
    queries: Mapping[str, Sequence[Requirement]] = {},
) -> tuple[tuple[Target, ...], ...]:
    """Return the devices of each group, in the order in which they are sent to.

    Devices that no group takes are in none. RolloutError: a named group has no device.
    """
    ordered = sorted(targets, key=lambda target: (not target.online, rank(key, target.device)))
    early = [target for target in ordered if target.online or groups[-1] != REST]
    taken: set[str] = set()
    assigned = []
    for group in groups:
        able = ordered if group == REST else early
        free = [target for target in able if target.device not in taken]
        members = _members(group, free, total=len(ordered), queries=queries)
        if not members and group != REST and not _PERCENT.match(group):
            unassigned = [target for target in ordered if target.device not in taken]
            away = len(_members(group, unassigned, total=len(ordered), queries=queries))
            raise RolloutError(_nobody(group, len(taken), away))
        taken.update(target.device for target in members)
        assigned.append(tuple(members))
    return tuple(assigned)


def _members(
    group: str,
    free: Sequence[Target],
    *,
    total: int,
    queries: Mapping[str, Sequence[Requirement]],
) -> Sequence[Target]:
    if group == REST:
        return free
    if match := _QUERY.match(group):
        return [target for target in free if fulfils(target, queries[match[1]])]
    if match := _PERCENT.match(group):
        # Not ceil(0.07 * 100), which is 8.
        return free[: math.ceil(round(float(match[1]) * total / 100.0, 9))]
    names = set(group.split("+"))
    return [target for target in free if _is_named(target.device, target.labels, group, names)]


def _is_named(device: str, labels: Mapping[str, str], group: str, names: set[str]) -> bool:
    key, equals, value = group.partition("=")
    if equals:
        return labels.get(key) == value
    return device in names or labels.get(GROUP_LABEL) in names


def _nobody(group: str, taken: int, away: int) -> str:
    if group.startswith("@"):
        return f"no device that the release fits fulfils the saved query {group}: leave it out"
    label = group if "=" in group else f"{GROUP_LABEL}={group.partition('+')[0]}"
    if away:
        return (
            f"the group {group} has no device that is there ({away} are away or silent, and prove "
            f"nothing): label another one with `tandem fleet device label ID {label}`, or wait"
        )
    others = f" that is not in an earlier group ({taken} are)" if taken else ""
    return (
        f"the group {group} has no device{others}: label one with `tandem fleet device label ID "
        f"{label}`, or leave the group out"
    )
