"""Which subscriptions a connection does without, because of a message that is too large to take.

A broker of MQTT 3.1.1 sends a retained message at each subscription, however large. One that ends
a connection would end each of them: after MAX_ENDS in a row its subscription is left out, and tried
again with back-off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import paho.mqtt.client as paho

MAX_ENDS = 2
AGAIN_S = (60.0, 300.0, 1800.0)  # until the next try, by how many have failed
STEADY_S = 10.0  # a subscription that lasts so long has no such message


@dataclass(slots=True)
class _Row:
    """One subscription: connections that it ended in a row, when it was made, and until when it is
    left out (None: it is not)."""

    ends: int = 0
    made_s: float = 0.0
    until_s: float | None = None


class LeftOut:
    """The subscriptions of one link, by their filters. Times are seconds of a steady clock."""

    def __init__(self, filters: Sequence[str]) -> None:
        self._rows = {name: _Row() for name in filters}

    @property
    def names(self) -> tuple[str, ...]:
        """The subscriptions that are left out."""
        return tuple(name for name, row in self._rows.items() if row.until_s is not None)

    @property
    def due_s(self) -> float | None:
        """When one that is left out is tried again, None if none is."""
        return min((row.until_s for row in self._rows.values() if row.until_s), default=None)

    def connect(self, now_s: float) -> tuple[str, ...]:
        """Return what a new connection subscribes to."""
        due = self.due(now_s)
        names = tuple(name for name in self._rows if name not in self.names or name in due)
        for name in names:
            self._rows[name].made_s = now_s
        return names

    def due(self, now_s: float) -> tuple[str, ...]:
        """Return what is tried again now, on the connection that there is."""
        rows = self._rows.items()
        names = tuple(name for name, row in rows if row.until_s and now_s >= row.until_s)
        for name in names:
            self._rows[name].until_s, self._rows[name].made_s = None, now_s
        return names

    def ended(self, topic: str, now_s: float) -> tuple[str, ...]:
        """Note that a message on a topic ended the connection; return what is left out now."""
        for name, row in self._rows.items():
            if row.until_s is None and now_s - row.made_s >= STEADY_S:
                row.ends = 0
            if paho.topic_matches_sub(name, topic):
                row.ends += 1
                if row.ends >= MAX_ENDS:
                    again = min(row.ends - MAX_ENDS, len(AGAIN_S) - 1)
                    row.until_s = now_s + AGAIN_S[again]
        return self.names
