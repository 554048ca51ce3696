"""Publishes the `reported` document when it changes; progress alone is rate-limited."""

import msgspec

from device.protocol.device_key import ReportSigner
from device.protocol.documents import Reported, encode
from device.protocol.mqtt import Link

PROGRESS_S = 0.25


class Reporter:
    """Remembers the last published report."""

    def __init__(self, link: Link, topic: str, signer: ReportSigner | None = None) -> None:
        """`signer` None: reports are not signed."""
        self._signer = signer
        self._link = link
        self._topic = topic
        self._published: Reported | None = None
        self._due_s = 0.0

    def forget(self) -> None:
        """Publish the next report in any case: the broker may have lost the last."""
        self._published = None

    def due_s(self, report: Reported) -> float | None:
        """Return when `offer` publishes this report, None if it is the last published."""
        return None if report == self._published else self._due_s

    def offer(self, report: Reported, now_s: float) -> None:
        """Publish a changed report; one that differs only in received bytes waits PROGRESS_S."""
        if report == self._published:
            return
        if _same_but_progress(report, self._published) and now_s < self._due_s:
            return
        self._due_s = now_s + PROGRESS_S
        payload = encode(report)
        if self._signer is not None:
            payload = self._signer.sign(payload)
        if self._link.publish(self._topic, payload, qos=1, retain=True):
            self._published = report


def _same_but_progress(report: Reported, published: Reported | None) -> bool:
    if published is None:
        return False
    received = published.update.received_bytes
    update = msgspec.structs.replace(report.update, received_bytes=received)
    return msgspec.structs.replace(report, update=update) == published
