"""Tells the broker the agent's events: kept in the outbox until it has acknowledged them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from device.agent.outbox import Outbox
from device.protocol.cloud_events import CloudEvent
from device.protocol.documents import Phase, Reported
from device.protocol.mqtt import Link, Receipt
from device.protocol.topics import Topics

MAX_IN_FLIGHT = 16
FINAL: tuple[Phase, ...] = ("live", "rolled_back", "refused")
UPDATE_TYPE = "edge.tandem.update."  # and the phase
PIPELINE_TYPE = "edge.tandem.pipeline."  # and the status


@dataclass(frozen=True, slots=True)
class TopicEvent:
    """An event with the last part of its topic. `final`: it must not be lost."""

    topic: str
    event: CloudEvent
    final: bool


class UpdateEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event about an update; `reason` is empty for `live`."""

    phase: Phase
    request: str
    sha256: str
    reason: str


def events_of(
    before: Reported | None, now: Reported, *, source: str, at: str
) -> Iterator[TopicEvent]:
    """Yield what a report says that the one before did not.

    `before`: None for the first report of a process, whose update may have ended in the last one.
    The id of an event follows from what it says: one that is told again is known to be the same.
    """
    update = now.update
    if update.phase in FINAL and update.request and (before is None or before.update != update):
        ended = UpdateEnded(
            phase=update.phase, request=update.request, sha256=update.sha256, reason=update.reason
        )
        name = f"{source} {update.request} {update.phase} {update.sha256}"
        event = _event(name, UPDATE_TYPE + update.phase, ended, source, at)
        yield TopicEvent("update", event, final=True)
    if before is not None and before.pipeline.status != now.pipeline.status:
        status = now.pipeline
        name = f"{source} {now.session} {status.status} {at}"
        yield TopicEvent(
            "pipeline", _event(name, PIPELINE_TYPE + status.status, status, source, at), False
        )


def _event(name: str, kind: str, data: msgspec.Struct, source: str, at: str) -> CloudEvent:
    """Return an event whose id follows from its name."""
    return CloudEvent(
        id=hashlib.sha256(name.encode()).hexdigest()[:32],
        source=source,
        type=kind,
        time=at,
        data=msgspec.Raw(msgspec.json.encode(data)),
    )


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
        for change in events_of(self._before, report, source=self._topics.root, at=at):
            self._outbox.add(change.topic, change.event, final=change.final)
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
