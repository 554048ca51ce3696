"""Publishes the `reported` document when it changes, progress alone at a limited rate, and beats.

Beats are spread, so that the devices of a fleet that came back together do not speak together for
ever. A report is as good as a beat.
"""

import random
from datetime import datetime, timezone

import msgspec

from device.agent.report_counter import ReportCounter
from device.protocol.device_key import ReportSigner
from device.protocol.documents import Beat, Reported, encode
from device.protocol.mqtt import Link
from device.protocol.topics import Topics

PROGRESS_S = 0.25
SPREAD = (0.6, 0.8)  # of `beat_s` until the next beat: one that is late by a fifth is in time


class Reporter:
    """Remembers the last published report. `beat_s`: as agent.toml says."""

    def __init__(
        self,
        link: Link,
        topics: Topics,
        counter: ReportCounter,
        signer: ReportSigner | None = None,
        *,
        beat_s: float,
    ) -> None:
        """`signer` None: nothing is signed."""
        self._signer = signer
        self._link = link
        self._topics = topics
        self._counter = counter
        self._beat_s = beat_s
        self._beat_due_s = 0.0
        self._published: Reported | None = None
        self._due_s = 0.0

    def forget(self) -> None:
        """Publish the next report in any case: the broker may have lost the last."""
        self._published = None

    def is_beat_due(self, now_s: float) -> bool:
        """Whether nothing was said for the time between beats."""
        return now_s >= self._beat_due_s

    def due_s(self, report: Reported) -> float:
        """Return when `offer` publishes this report, or a beat if it is the last published."""
        return self._beat_due_s if report == self._published else self._due_s

    def offer(self, report: Reported, now_s: float) -> None:
        """Publish a changed report, one that differs only in received bytes after PROGRESS_S;
        without one a beat that is due."""
        if report == self._published:
            if self.is_beat_due(now_s):
                self._beat(now_s)
            return
        if _same_but_progress(report, self._published) and now_s < self._due_s:
            return
        self._due_s = now_s + PROGRESS_S
        told = msgspec.structs.replace(report, counter=self._counter.next(), beat_s=self._beat_s)
        if self._link.publish(self._topics.reported, self._signed(told), qos=1, retain=True):
            self._published = report
            self._spread_beat(now_s)

    def _beat(self, now_s: float) -> None:
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        beat = Beat(counter=self._counter.next(), at=at)
        if self._link.publish(self._topics.beat, self._signed(beat), qos=1):
            self._spread_beat(now_s)

    def _spread_beat(self, now_s: float) -> None:
        self._beat_due_s = now_s + self._beat_s * random.uniform(*SPREAD)

    def _signed(self, document: Reported | Beat) -> bytes:
        payload = encode(document)
        return payload if self._signer is None else self._signer.sign(payload)


def _same_but_progress(report: Reported, published: Reported | None) -> bool:
    if published is None:
        return False
    received = published.update.received_bytes
    update = msgspec.structs.replace(report.update, received_bytes=received)
    return msgspec.structs.replace(report, update=update) == published
