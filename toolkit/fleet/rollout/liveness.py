"""Whether a device is alive: by when it was last heard, and when it could have been heard.

A device that says beats is believed while its last word is young. One that is not heard although
the server listened for long enough is silent. Where the server listened for less nobody knows.
All times are the server's: the clocks of boards are wrong. Pure functions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Liveness = Literal["alive", "silent", "unknown", "no_beat"]
LISTENED = 0.9  # of an interval: an agent speaks after four fifths of it
SITE_LABELS = ("site", "group")  # by the first that a device has, silent ones are one event


@dataclass(frozen=True, slots=True)
class ListeningPeriod:
    """The time over which the server has heard all that was said: without a break from `since_s` to
    `until_s`, in seconds since 1970."""

    since_s: float
    until_s: float


def judge(heard_s: float, beat_s: float, ear: ListeningPeriod) -> Liveness:
    """Judge a device that was last heard at a time; `beat_s`: it says something at least so often,
    0: of an agent that says no beats."""
    if beat_s <= 0.0:
        return "no_beat"
    # A word from the future is no younger than one from the past: a clock was set.
    if abs(ear.until_s - heard_s) <= beat_s:
        return "alive"
    return "silent" if ear.until_s - ear.since_s > LISTENED * beat_s else "unknown"


@dataclass(frozen=True, slots=True)
class LastHeard:
    """A device: when it was last heard, how often it speaks (see `judge`), and its place
    (`place_of`)."""

    device: str
    heard_s: float
    beat_s: float
    place: str


@dataclass(frozen=True, slots=True)
class Outage:
    """Devices of one place that fell silent together. `place`: KEY=VALUE of their label, empty for
    devices without; `of`: how many devices are there; `since_s`: when the first was last heard."""

    place: str
    devices: tuple[str, ...]
    of: int
    since_s: float


def outages(silent: Iterable[LastHeard], sizes: Mapping[str, int]) -> tuple[Outage, ...]:
    """Return silent devices as events: those of a place whose last words are within one interval of
    the first one's are one. The oldest is first. `sizes`: how many devices each place has."""
    places: dict[str, list[LastHeard]] = {}
    for voice in silent:
        places.setdefault(voice.place, []).append(voice)
    events = [
        Outage(place, tuple(one.device for one in together), sizes[place], together[0].heard_s)
        for place, rows in places.items()
        for together in _together(rows)
    ]
    return tuple(sorted(events, key=lambda event: (event.since_s, event.place)))


def place_of(labels: Mapping[str, str]) -> str:
    """Return KEY=VALUE of the label that says where a device is, empty without one."""
    return next((f"{key}={labels[key]}" for key in SITE_LABELS if labels.get(key)), "")


def _together(silent: Sequence[LastHeard]) -> list[list[LastHeard]]:
    parts: list[list[LastHeard]] = []
    for voice in sorted(silent, key=lambda one: (one.heard_s, one.device)):
        if parts and voice.heard_s - parts[-1][0].heard_s <= max(voice.beat_s, parts[-1][0].beat_s):
            parts[-1].append(voice)
        else:
            parts.append([voice])
    return parts
