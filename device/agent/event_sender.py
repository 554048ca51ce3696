"""Tells the broker the agent's events: kept in the outbox until it has acknowledged them."""

from datetime import datetime, timezone

from device.agent.events import events_of
from device.agent.outbox import Outbox
from device.protocol.documents import Reported
from device.protocol.mqtt import Link, Receipt
from device.protocol.topics import Topics

MAX_IN_FLIGHT = 16


class EventSender:
    """The events of one agent on its link."""

    def __init__(self, link: Link, topics: Topics, outbox: Outbox) -> None:
        self._link = link
        self._topics = topics
        self._outbox = outbox
        self._before: Reported | None = None
        self._in_flight: dict[str, Receipt] = {}
        self._more = True  # whether the outbox may hold events that are not in flight

    def offer(self, report: Reported) -> None:
        """Keep what this report says that the last one did not."""
        if report == self._before:
            return
        at = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        for told in events_of(self._before, report, source=self._topics.root, at=at):
            self._outbox.add(told.topic, told.event, final=told.final)
            self._more = True
        self._before = report

    def on_link_up(self) -> None:
        """Send again what the old connection did not bring to an end."""
        self._in_flight.clear()
        self._more = True

    def advance(self) -> None:
        """Forget what was acknowledged, and send what waits."""
        done = [name for name, receipt in self._in_flight.items() if receipt.acknowledged]
        if done:
            self._outbox.sent(done)
            for name in done:
                del self._in_flight[name]
        if not self._more or len(self._in_flight) >= MAX_IN_FLIGHT:
            return
        waiting = self._outbox.waiting(MAX_IN_FLIGHT)
        for row in waiting:
            if row.id in self._in_flight:
                continue
            receipt = self._link.tell(self._topics.event(row.topic), row.event)
            if receipt is None:
                return
            self._in_flight[row.id] = receipt
        self._more = len(waiting) == MAX_IN_FLIGHT

    @property
    def waits(self) -> bool:
        """Whether an acknowledgement is due."""
        return bool(self._in_flight)

    def close(self) -> None:
        """Close the outbox; what waits is sent by the next process."""
        self._outbox.close()
