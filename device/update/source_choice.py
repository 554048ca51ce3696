"""Which source a download uses: the first that gives the blob. Values and the time, no threads."""

from collections.abc import Sequence
from dataclasses import dataclass

from device.update.sources.reader import is_source

AGAIN_S = (1.0, 5.0, 15.0, 30.0)  # until the round begins anew, once no source gave anything


@dataclass(slots=True)
class _Row:
    place: str
    reason: str = ""  # why it gave nothing the last time
    unusable: bool = False  # for good


class SourceChoice:
    """The sources of a download, in order, and the one in use."""

    def __init__(self, places: Sequence[str]) -> None:
        self._rows = [_Row(place) for place in dict.fromkeys(places)]
        for row in self._rows:
            if not is_source(row.place):
                row.reason, row.unusable = f"{row.place!r} is no source that this agent reads", True
        self._current = self._next_after(-1)
        self._rounds = 0
        self._wait_until_s: float | None = None

    @property
    def current(self) -> int:
        """The number of the source in use, -1 if all are unusable."""
        return self._current

    @property
    def place(self) -> str:
        """The source in use, empty if all are unusable."""
        return "" if self._current < 0 else self._rows[self._current].place

    @property
    def count(self) -> int:
        """How many sources are left."""
        return sum(not row.unusable for row in self._rows)

    @property
    def wait_until_s(self) -> float | None:
        """When the source in use may be asked, None: now."""
        return self._wait_until_s

    @property
    def problem(self) -> str:
        """What the sources that gave nothing said, empty if there are none."""
        return "; ".join(row.reason for row in self._rows if row.reason)

    def waits(self, now_s: float) -> bool:
        """Whether the next round is not due yet."""
        if self._wait_until_s is not None and now_s >= self._wait_until_s:
            self._wait_until_s = None
        return self._wait_until_s is not None

    def on_good(self) -> None:
        """The source in use gave what fits."""
        self._rounds = 0
        if self._current >= 0:
            self._rows[self._current].reason = ""

    def on_ended(self, reason: str, now_s: float, *, permanent: bool) -> None:
        """The source in use gives nothing: take the next; after the last, wait and begin anew."""
        if self._current < 0:
            return
        row = self._rows[self._current]
        row.reason, row.unusable = reason, permanent
        before = self._current
        self._current = self._next_after(before)
        if self._current <= before:
            self._wait_until_s = now_s + AGAIN_S[min(self._rounds, len(AGAIN_S) - 1)]
            self._rounds += 1

    def _next_after(self, number: int) -> int:
        """Return the next source that is usable, from the first again after the last."""
        count = len(self._rows)
        order = [(number + step) % count for step in range(1, count + 1)]
        return next((one for one in order if not self._rows[one].unusable), -1)
