"""What a release asks of a board, judged before a byte of it is fetched: pure functions.

`requires` of a bundle names the least that it needs: {"tensorrt": "10.3", "memory_mb": "7000"}.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from device.protocol.documents import Desired, DeviceFacts, InstallPolicy, ReleaseSpec
from device.update.versions import is_older

REQUIREMENTS: Mapping[str, str] = {
    "jetpack": "JetPack",
    "tensorrt": "TensorRT",
    "dla_cores": "DLA cores",
    "memory_mb": "MB of memory",
}
NO_SERVICES = (
    "{name} is a service, a program of another runtime, which this board does not run: set"
    " services = true in [pipeline] of its agent.toml if releases may bring programs"
)
FLOOR = "min_version_floor"
REQUIRES = "requires"
_MIB = 1024**2
SPARE_BYTES = 16 * _MIB  # stays free, for logs and the rest of the system
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True, slots=True)
class Room:
    """The disk of a board: bytes that a download may take, and bytes of the release in the idle
    slot, which is removed before the new one is unpacked (until then it is a base of chunks)."""

    free_bytes: int
    idle_bytes: int


@dataclass(frozen=True, slots=True)
class BoardState:
    """What an admission looks at. `room`: what a release may take on the disk, None: not
    known. `floors`: the oldest version that is taken, by the name of the release."""

    facts: DeviceFacts = field(default_factory=DeviceFacts)
    room: Room | None = None
    floors: Mapping[str, str] = field(default_factory=dict)


def refusal(desired: Desired, custom: Mapping[str, Any], board: BoardState) -> str | None:
    """Return why the release is not taken, None if it may be. `custom`: what is signed of it."""
    release = desired.release
    requires = custom.get(REQUIRES)
    return (
        below_floor(release.name, release.version, board.floors)
        or (unmet(requires, board.facts) if isinstance(requires, Mapping) else None)
        or _bad_window(desired.policy)
        or _endless_shadow(desired.policy)
    )


def below_floor(name: str, version: str, floors: Mapping[str, str]) -> str | None:
    """Return why a version is too old for the device, None if it is not."""
    floor = floors.get(name)
    if floor is None or not is_older(version, floor):
        return None
    return (
        f"{name} {version} is older than {floor}, the version floor that a release which ran here "
        f"has set: versions below it are known to be unsafe; deploy {floor} or a newer one"
    )


def unmet(requires: Mapping[str, Any], facts: DeviceFacts) -> str | None:
    """Return what the release needs and the board has not, None if it has all of it."""
    for name, least in requires.items():
        title = REQUIREMENTS.get(name)
        if title is None:
            return (
                f"the release requires {name} {least}, which this agent cannot judge: update the "
                "agent"
            )
        value = str(getattr(facts, name))
        if value in ("", "0") and str(least) not in ("", "0"):
            return f"the release needs {title} {least} or more, this board has none that is known"
        if is_older(value, str(least)):
            return f"the release needs {title} {least} or more, this board has {value}"
    return None


def no_room(release: ReleaseSpec, room: Room | None) -> str | None:
    """Return why the download and its unpacked files do not fit on the disk, None if they do."""
    if room is None:
        return None
    fetched_bytes = room_for_download(release.blob.bytes)
    need_bytes = fetched_bytes + release.blob.bytes
    what = f"{release.name} {release.version}"
    if room.free_bytes < fetched_bytes:
        return (
            f"{what} needs {-(-fetched_bytes // _MIB)} MiB of free room for the download, and "
            f"state_dir has {room.free_bytes // _MIB} MiB: make room and deploy it again"
        )
    if room.free_bytes + room.idle_bytes < need_bytes:
        has_bytes = room.free_bytes + room.idle_bytes
        return (
            f"{what} needs {-(-need_bytes // _MIB)} MiB of room, for the download and its files, "
            f"and state_dir has {has_bytes // _MIB} MiB, with the idle slot: make room and deploy "
            "it again"
        )
    return None


def room_for_download(missing_bytes: int) -> int:
    """Return the bytes that must be free before so many are written."""
    return missing_bytes + SPARE_BYTES


def waits_for_window(policy: InstallPolicy, hour: int, minute: int) -> str | None:
    """Return what a trial waits for at this local time, None if it may begin.

    A window may go over midnight; one without a limit on one side ends or begins at midnight.
    """
    if not policy.not_before and not policy.not_after:
        return None
    begin = _minutes(policy.not_before or "00:00")
    end = _minutes(policy.not_after or "00:00")
    if begin is None or end is None:  # refused before by `refusal`
        return None
    now = 60 * hour + minute
    length = (end - begin) % _DAY_MINUTES or _DAY_MINUTES
    if (now - begin) % _DAY_MINUTES < length:
        return None
    return (
        f"it waits for its maintenance window, {policy.not_before or '00:00'} to "
        f"{policy.not_after or '24:00'} of the device's local time, where it is "
        f"{hour:02}:{minute:02}"
    )


def _bad_window(policy: InstallPolicy) -> str | None:
    for key, text in (("not_before", policy.not_before), ("not_after", policy.not_after)):
        if text and _minutes(text) is None:
            return f"the policy's {key} is {text!r}, which is no time of day: write it as 22:30"
    return None


def _endless_shadow(policy: InstallPolicy) -> str | None:
    """A gate that is not measured must not pass unseen."""
    if policy.shadow_s or policy.min_shadow_agreement is None:
        return None
    return (
        "the policy asks how well live frames agree (min_shadow_agreement), and does not say how "
        "long both engines shall run (shadow_s): set it with `tandem fleet rollout start --shadow "
        "60`"
    )


def _minutes(text: str) -> int | None:
    """Return the minutes since midnight of "22:30", None if it is no time of day."""
    hour, colon, minute = text.partition(":")
    if not colon or not (hour.isdecimal() and minute.isdecimal()):
        return None
    if text == "24:00":
        return 0
    valid = int(hour) < 24 and int(minute) < 60
    return 60 * int(hour) + int(minute) if valid else None
