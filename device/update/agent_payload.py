"""A release of the agent itself: a bundle (format 3) of wheels, and which boards it fits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from device.update.versions import is_older

WHEEL_SUFFIX = ".whl"
OWN_WHEEL = "tandem_edge-"
PROFILE = "agent"  # in the place of a board's: such a bundle has no engine
# A member's name is at most 100 bytes in a USTAR header.
_WHEEL = re.compile(r"[A-Za-z0-9_.+!]+(-[A-Za-z0-9_.+!]+){4,5}\.whl\Z")
_VERSION = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+]{0,63}\Z")  # it becomes a folder's name
Numbers = Annotated[str, Meta(pattern=r"^(\d{1,4}(\.\d{1,4}){0,3})?\Z")]


class AgentPayload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a board must have. `min_*` is the oldest version that fits, `below_*` the first one that
    does not; empty: any. `machine`: as `uname -m` says it, empty for wheels without native code."""

    min_python: Numbers = ""
    below_python: Numbers = ""
    min_l4t: Numbers = ""
    below_l4t: Numbers = ""
    min_glibc: Numbers = ""
    machine: Annotated[str, Meta(pattern=r"^[a-z0-9_]{0,32}\Z")] = ""


@dataclass(frozen=True, slots=True)
class BoardSoftware:
    """What a board has; `l4t` and `glibc` are empty where there is none."""

    python: str
    machine: str
    glibc: str
    l4t: str


def unfit(payload: AgentPayload, board: BoardSoftware) -> tuple[str, ...]:
    """Return why the release does not fit the board, a sentence for each reason."""
    rows = (
        ("Python", board.python, payload.min_python, payload.below_python),
        ("L4T", board.l4t, payload.min_l4t, payload.below_l4t),
        ("glibc", board.glibc, payload.min_glibc, ""),
    )
    reasons = []
    for what, version, least, below in rows:
        too_old = bool(least) and (not version or is_older(version, least))
        too_new = bool(below) and (not version or not is_older(version, below))
        if too_old or too_new:
            bounds = (f"{least} or newer" if least else "", f"older than {below}" if below else "")
            required = ", ".join(filter(None, bounds))
            reasons.append(f"it needs {what} {required}, this board has {version or 'none'}")
    if payload.machine not in ("", board.machine):
        reasons.append(f"its wheels are for {payload.machine}, this board is {board.machine}")
    return tuple(reasons)


def version_problem(version: str) -> str:
    """Return why a version cannot be a folder's name; "" if it can."""
    if _VERSION.match(version):
        return ""
    return f"the version {version!r} is no file name: use letters, digits and . _ +"


def members_problem(version: str, names: Sequence[str]) -> str:
    """Return what is wrong with the version and members of such a bundle; "" if nothing is."""
    if problem := version_problem(version):
        return problem
    for name in names:
        if not _WHEEL.match(name) or len(name) > 100:
            return f"the member {name!r} is no wheel with a name of at most 100 characters"
    if list(names) != sorted(set(names)):
        return "the wheels are not in the order of their names"
    wheels = sum(name.startswith(OWN_WHEEL) for name in names)
    return "" if wheels == 1 else f"it has {wheels} wheels of tandem-edge, expected 1"
