"""Which devices a release fits, and why not the others: known before anything is sent.

    jetpack>=6.0, dla_cores>=1, free_mb>=500, label.site=lab

A comma-separated list of NAME OPERATOR VALUE over what devices say of themselves (`DeviceFacts`)
and their labels. The profile of the release and the room for its download are always required.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from device.choices import list_choices
from device.protocol.documents import DeviceFacts, ReleaseSpec
from device.update.agent_payload import AgentPayload, BoardSoftware
from device.update.agent_payload import unfit as unfit_board
from toolkit.errors import RolloutError

Comparison = Literal["=", "!=", "<", "<=", ">", ">="]
COMPARE: Mapping[str, Callable[..., bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LABEL = "label."
_REQUIREMENT = re.compile(
    r"\s*(?P<name>[A-Za-z_][\w.-]*?)\s*(?P<compare>!=|<=|>=|==|<|>|=)\s*(?P<value>[^<>=!]+?)\s*\Z"
)
_VERSION = re.compile(r"\d{1,9}(\.\d{1,9})*")
_MB = 1024**2


class Target(msgspec.Struct, frozen=True, gc=False):
    """A device as a rollout sees it. `labels`: the operator's above the device's own.

    `running`: the SHA-256 of its release, empty if it runs none. `agent`: the version of its agent
    (`AgentReport.running`), None: one that takes no releases of the agent.
    """

    device: str
    profile: str
    facts: DeviceFacts = DeviceFacts()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    running: str = ""
    online: bool = True
    dev: bool = False
    agent: str | None = None


def _version(text: str) -> tuple[int, ...] | None:
    """Return the numbers that a version begins with, None if there are none."""
    match = _VERSION.match(text.strip().removeprefix("R"))
    return None if match is None else tuple(int(part) for part in match[0].split("."))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(text: str) -> str | None:
    return text or None


@dataclass(frozen=True, slots=True)
class _Fact:
    """A fact: how a device's value is read as text (empty: not known), how both sides are compared,
    and what a value looks like."""

    read: Callable[[Target], str]
    parse: Callable[[str], object | None]
    example: str


def _known(number: int) -> str:
    return str(number) if number else ""


# Name -> the fact. What a device has not said fits no requirement.
FACTS: Mapping[str, _Fact] = {
    "profile": _Fact(lambda target: target.profile, _text, "agx-orin-64gb"),
    "module": _Fact(lambda target: target.facts.module, _text, "p3701"),
    "power_mode": _Fact(lambda target: target.facts.power_mode, _text, "MAXN"),
    "jetpack": _Fact(lambda target: target.facts.jetpack, _version, "6.0"),
    "tensorrt": _Fact(lambda target: target.facts.tensorrt, _version, "10.3"),
    "dla_cores": _Fact(lambda target: str(target.facts.dla_cores), _number, "1"),
    "memory_mb": _Fact(lambda target: _known(target.facts.memory_mb), _number, "8000"),
    "free_mb": _Fact(lambda target: _known(target.facts.free_mb), _number, "500"),
}
ORDERED = frozenset({_version, _number})


class Requirement(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of a rollout."""

    name: str
    compare: Comparison
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.compare}{self.value}"


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Return the requirements in a text; RolloutError names the part that is wrong."""
    if not text.strip():
        return ()
    return tuple(_parse_requirement(part, text) for part in text.split(","))


def _parse_requirement(part: str, text: str) -> Requirement:
    match = _REQUIREMENT.match(part)
    if match is None:
        raise RolloutError(
            f"{part.strip()!r} in the requirements {text!r} is none: write NAME, one of "
            f"{' '.join(COMPARE)}, and a value, for example jetpack>=6.0"
        )
    name, value = match["name"], match["value"]
    parse: Callable[[str], object | None]
    compare: Comparison = msgspec.convert(match["compare"].replace("==", "="), Comparison)
    if name.startswith(LABEL) and len(name) > len(LABEL):
        parse, example = _text, "lab"
    elif name in FACTS:
        parse, example = FACTS[name].parse, FACTS[name].example
    else:
        raise RolloutError(
            f"devices say no {name!r}: take one of {list_choices(name, FACTS)}, or {LABEL}NAME"
        )
    if parse(value) is None:
        raise RolloutError(f"{part.strip()!r}: {value!r} is no {name}, write it as {example}")
    if parse not in ORDERED and compare not in ("=", "!="):
        raise RolloutError(
            f"{part.strip()!r} compares {name} by {compare}: texts are compared by = and !="
        )
    return Requirement(name=name, compare=compare, value=value)


def unfit(
    target: Target,
    release: ReleaseSpec,
    requirements: Sequence[Requirement],
    agent: AgentPayload | None = None,
) -> tuple[str, ...]:
    """Return why a release does not fit a device, a sentence for each reason; none if it fits.

    `agent`: what a release of the agent requires, which is for all profiles.
    """
    reasons: list[str] = []
    if agent is not None:
        reasons += _unfit_for_agent(target, agent)
    elif target.profile != release.profile:
        reasons.append(f"it is {target.profile}, the release is for {release.profile}")
    if is_full(target, release) and release.blob.sha256 not in target.facts.bundles:
        reasons.append(
            f"it has {target.facts.free_mb} MB free, the release takes {need_mb(release)} MB to "
            "install"
        )
    reasons += [reason for row in requirements if (reason := _broken(row, target)) is not None]
    return tuple(reasons)


def unfit_by_device(
    targets: Sequence[Target],
    release: ReleaseSpec,
    requirements: Sequence[Requirement],
    agent: AgentPayload | None = None,
) -> dict[str, tuple[str, ...]]:
    """Return `unfit` of each device by its id. Devices that share one value of facts and one of
    labels are judged once: a large fleet has few kinds of them."""
    by_kind: dict[tuple[str, int, int, str | None], tuple[str, ...]] = {}
    by_device: dict[str, tuple[str, ...]] = {}
    for target in targets:
        kind = (target.profile, id(target.facts), id(target.labels), target.agent)
        reasons = by_kind.get(kind)
        if reasons is None:
            reasons = by_kind[kind] = unfit(target, release, requirements, agent)
        by_device[target.device] = reasons
    return by_device


def _unfit_for_agent(target: Target, agent: AgentPayload) -> tuple[str, ...]:
    if target.agent is None:
        return (
            "its agent takes no releases of the agent from a fleet: update it on the board, "
            "`tandem-agent control self-update`",
        )
    facts = target.facts
    return unfit_board(agent, BoardSoftware(facts.python, facts.machine, facts.glibc, facts.l4t))


def is_full(target: Target, release: ReleaseSpec) -> bool:
    """Whether a device has no room for a release, unless it has it already."""
    return 0 < target.facts.free_mb < need_mb(release)


def need_mb(release: ReleaseSpec) -> int:
    """Return the free MB that a device must have for a release."""
    return -(-2 * release.blob.bytes // _MB)  # the download and the unpacked slot


def fulfils(target: Target | None, requirements: Sequence[Requirement]) -> bool:
    """Whether a device fulfils all requirements; one that never reported fulfils none."""
    return target is not None and not any(_broken(row, target) for row in requirements)


def _broken(row: Requirement, target: Target) -> str | None:
    """Return why a device does not fulfil a requirement, None if it does."""
    if row.name.startswith(LABEL):
        return broken_by_text(row, target.labels.get(row.name.removeprefix(LABEL), ""))
    return broken_by_text(row, FACTS[row.name].read(target))


def broken_by_text(row: Requirement, text: str) -> str | None:
    """Return why what a device says of a requirement's name (empty: nothing) does not fulfil it,
    None if it does."""
    parse: Callable[[str], object | None]
    if row.name.startswith(LABEL):
        parse, missing = _text, f"it has no label {row.name.removeprefix(LABEL)}"
    else:
        parse, missing = FACTS[row.name].parse, f"it has not said its {row.name}"
    value, limit = parse(text), parse(row.value)
    if value is None:
        return None if row.name.startswith(LABEL) and row.compare == "!=" else missing
    if isinstance(value, tuple) and isinstance(limit, tuple):
        value, limit = _same_length(value, limit)
    if COMPARE[row.compare](value, limit):
        return None
    return f"its {row.name} is {text}, the rollout asks for {row}"


def _same_length(
    value: tuple[int, ...], limit: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two versions with as many numbers: 6 and 6.0 are the same."""
    length = max(len(value), len(limit))
    return value + (0,) * (length - len(value)), limit + (0,) * (length - len(limit))
