"""The counter in what the device reports: it rises over restarts, so old reports are told from new.

A counter is a stretch, in seconds since 1970, times COUNTERS_A_STRETCH, and a number in it. Only
the stretch is on the disk: it is written once a start and once a day. After a lost state the clock
alone makes it rise: a clock that was wrong then heals with the next stretch after it was set.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from device.files import read_regular, replacing

LOG = logging.getLogger("tandem.agent")
COUNTERS_A_STRETCH = 2**20
STRETCH_S = 86400
_MAX_BYTES = 20
_MAX_STRETCH = 2**40


class ReportCounter:
    """The counter of one device. One thread uses it."""

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
            with replacing(self._path, 0o600) as file:
                file.write(str(self._stretch).encode())
        except OSError as error:  # the clock makes the next start's higher, too
            LOG.warning("the counter of reports is not kept: %s", error)


def _read(path: Path) -> int:
    """Return the last stretch, 0 if none was kept or the file is none of ours."""
    with contextlib.suppress(OSError, ValueError):
        return min(max(0, int(read_regular(path, _MAX_BYTES))), _MAX_STRETCH)
    return 0
