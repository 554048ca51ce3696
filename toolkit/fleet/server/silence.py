"""Which devices have fallen silent, as a server notices it, and what it says of them.

Devices of one place fall silent one by one, as their beats are spread: so one sentence is said an
interval after the first of them.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Set

from toolkit.fleet.rollout.liveness import (
    LISTENED,
    LastHeard,
    ListeningPeriod,
    Outage,
    judge,
    outages,
)
from toolkit.fleet.server.times import utc

LOOK_S = 1.0  # between two looks at all devices
STALL_S = 5.0  # a server that stood still for longer, or whose clock was set, begins to listen anew
NAMED = 5  # devices that a sentence names


class Watch:
    """Since when a server hears, and who is silent. One thread uses it."""

    def __init__(self) -> None:
        self.ear = ListeningPeriod(0.0, 0.0)
        self._silent: set[str] = set()
        self._unsaid: set[str] = set()
        self._said_s = 0.0  # when the silence of `_unsaid` is said
        self._looked_s = 0.0
        self._due_s = 0.0  # before it nobody can have fallen silent

    def begin(self, now_s: float) -> None:
        """A connection begins: what was said before it was not heard."""
        self.ear = ListeningPeriod(now_s, now_s)
        self._due_s = 0.0

    def caught_up(self, now_s: float) -> None:
        """All that came until now was heard."""
        if 0.0 <= now_s - self.ear.until_s <= STALL_S:
            self.ear = ListeningPeriod(self.ear.since_s, now_s)
        else:
            self.begin(now_s)

    def take(self, device: str, beat_s: float) -> bool:
        """A device speaks, and will again within `beat_s`; return whether it was silent."""
        if beat_s > 0.0:
            self._due_s = min(self._due_s, self.ear.until_s + LISTENED * beat_s)
        was_silent = device in self._silent
        self._silent.discard(device)
        self._unsaid.discard(device)
        return was_silent

    def fallen_silent(self, voices: Iterable[LastHeard]) -> Set[str]:
        """Return the devices that have fallen silent since the last look."""
        now_s = self.ear.until_s
        if 0.0 <= now_s - self._looked_s < LOOK_S or now_s < self._due_s:
            return set()
        self._looked_s, self._due_s, fallen = now_s, math.inf, {}
        for voice in voices:
            if voice.beat_s <= 0.0 or voice.device in self._silent:
                continue
            liveness = judge(voice.heard_s, voice.beat_s, self.ear)
            if liveness == "silent":
                fallen[voice.device] = voice.beat_s
            else:
                until_s = voice.heard_s + voice.beat_s if liveness == "alive" else 0.0
                due_s = max(until_s, self.ear.since_s + LISTENED * voice.beat_s)
                self._due_s = min(self._due_s, due_s)
        if fallen and not self._unsaid:
            self._said_s = self.ear.until_s + max(fallen.values())
        self._silent |= fallen.keys()
        self._unsaid |= fallen.keys()
        return set(fallen)

    def news(self, voices: Collection[LastHeard]) -> list[str]:
        """Return a sentence for each outage that was not said yet, once that is due."""
        if not self._unsaid or self.ear.until_s < self._said_s:
            return []
        silent = [voice for voice in voices if voice.device in self._unsaid]
        events = outages(silent, Counter(voice.place for voice in voices))
        self._unsaid.clear()
        return [sentence(event) for event in events]


def sentence(event: Outage) -> str:
    """Return an outage as a sentence."""
    count, since = len(event.devices), utc(event.since_s) or "ever"
    if count == 1:
        return f"{event.devices[0]} is silent, last heard {since}"
    where = f" with {event.place}" if event.place else ""
    more = "" if count <= NAMED else ", ..."
    names = ", ".join(event.devices[:NAMED])
    return f"{count} of {event.of} devices{where} fell silent together, from {since}: {names}{more}"
