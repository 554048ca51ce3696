"""Publishes the `reported` document when it changes, progress alone at a limited rate, and beats.

Beats are spread, so that the devices of a fleet that came back together do not speak together for
ever. A report is as good as a beat.
"""

import contextlib
import logging
import random
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from device.files import read_regular, replace_file
from device.protocol.device_key import ReportSigner
from device.protocol.documents import Beat, Reported, encode
from device.protocol.mqtt import Link
from device.protocol.topics import Topics

LOG = logging.getLogger("tandem.agent")
COUNTERS_A_STRETCH = 2**20
STRETCH_S = 86400
_MAX_BYTES = 20
_MAX_STRETCH = 2**40
PROGRESS_S = 0.25
SPREAD = (0.6, 0.8)  # of `beat_s` until the next beat: one that is late by a fifth is in time


class ReportCounter:
    """The counter in what a device reports: it rises over restarts, so old reports are told from
    new. One thread uses it.

    A counter is a stretch, in seconds since 1970, times COUNTERS_A_STRETCH, and a number in it.
    Only the stretch is on the disk: it is written once a start and once a day. After a lost state
    the clock alone makes it rise: a clock that was wrong then heals with the next stretch after it
    was set.
    """

    def __init__(self, path: Path, now_s: Callable[[], float] = time.time) -> None:
        """Read the last stretch; begin one with the first counter."""
        self._path = path
        self._now_s = now_s
        self._stretch = _read(path)
        self._left = 0

    def next(self) -> int:
        """Return a counter above all before."""
        if self._left == 0 or self._now_s() - self._stretch > STRETCH_S:
            self._begin()
        self._left -= 1
        return (self._stretch + 1) * COUNTERS_A_STRETCH - 1 - self._left

    def _begin(self) -> None:
        clock = min(max(0, int(self._now_s())), _MAX_STRETCH)
        self._stretch, self._left = max(self._stretch + 1, clock), COUNTERS_A_STRETCH
        try:
            replace_file(self._path, str(self._stretch).encode(), 0o600)
        except OSError as error:  # the clock makes the next start's higher, too
            LOG.warning("the counter of reports is not kept: %s", error)


def _read(path: Path) -> int:
    """Return the last stretch, 0 if none was kept or the file is none of ours."""
    with contextlib.suppress(OSError, ValueError):
        return min(max(0, int(read_regular(path, _MAX_BYTES))), _MAX_STRETCH)
    return 0


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
        numbered = msgspec.structs.replace(
            report, counter=self._counter.next(), beat_s=self._beat_s
        )
        if self._link.publish(self._topics.reported, self._signed(numbered), qos=1, retain=True):
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
