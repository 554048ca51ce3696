"""Publishes the `reported` document when it changes, and mere progress not more than needed."""

import msgspec

from device.protocol.documents import Reported, encode
from device.protocol.mqtt import Link

PROGRESS_S = 0.25


class Reporter:
    """Remembers what the broker was told."""

    def __init__(self, link: Link, topic: str) -> None:
        self._link = link
        self._topic = topic
        self._published: Reported | None = None
        self._due_s = 0.0

    def forget(self) -> None:
        """A new connection: the broker may have lost what it was told."""
        self._published = None

    def due_s(self, report: Reported) -> float | None:
        """When `offer` has something to publish, None if the broker knows this report."""
        return None if report == self._published else self._due_s

    def offer(self, report: Reported, now_s: float) -> None:
        """Publish a changed report; one that differs only in received bytes waits its turn."""
        if report == self._published:
            return
        same = self._published is not None and _steady(report) == _steady(self._published)
        if same and now_s < self._due_s:
            return
        self._due_s = now_s + PROGRESS_S
        if self._link.publish(self._topic, encode(report), qos=1, retain=True):
            self._published = report


def _steady(report: Reported) -> Reported:
    update = msgspec.structs.replace(report.update, received_bytes=0)
    return msgspec.structs.replace(report, update=update)
