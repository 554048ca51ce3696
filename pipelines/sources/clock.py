"""When a frame was captured, from its presentation time and its arrival.

Presentation times are even but have an unknown origin; arrivals have a known origin but jitter
upwards only. The smallest difference seen lately ties the two together. It holds as long as the
origin stays: GStreamer must not move presentation times to arrivals (`buffer-mode=none`).

A file that is read as fast as it goes arrives at other times than it was taken: there the first
frame is of its arrival, and presentation times say how far apart the others are.
"""

from pipelines.frame import Stamp

WINDOW_NS = 10_000_000_000  # the two clocks drift apart, so old minima are forgotten
JUMP_NS = 1_000_000_000  # a camera that counts anew: what was learned is of another origin


class CaptureClock:
    """Turns presentation times into moments; one per connection. `live`: frames arrive when they
    are taken, but for a delay."""

    def __init__(self, *, live: bool = True) -> None:
        self._live = live
        self._file_pts_ns = 0
        self._file_stamp: Stamp | None = None
        self._window_end_ns = 0
        self._previous_ns: int | None = None
        self._current_ns: int | None = None
        self._last_ns: int | None = None

    def stamp(self, pts_ns: int | None, arrival: Stamp) -> Stamp:
        """Return the capture moment of a frame that began to arrive at `arrival`."""
        if pts_ns is None:
            return arrival
        if not self._live:
            return self._in_file(pts_ns, arrival)
        delay_ns = arrival.mono_ns - pts_ns
        if self._last_ns is not None and abs(delay_ns - self._last_ns) > JUMP_NS:
            self._previous_ns = self._current_ns = None
        self._last_ns = delay_ns
        if arrival.mono_ns >= self._window_end_ns:
            self._previous_ns, self._current_ns = self._current_ns, delay_ns
            self._window_end_ns = arrival.mono_ns + WINDOW_NS
        current_ns = delay_ns if self._current_ns is None else min(self._current_ns, delay_ns)
        self._current_ns = current_ns
        least_ns = current_ns if self._previous_ns is None else min(self._previous_ns, current_ns)
        return arrival.earlier(delay_ns - least_ns)

    def _in_file(self, pts_ns: int, arrival: Stamp) -> Stamp:
        step_ns = max(0, pts_ns - self._file_pts_ns)  # one that begins again goes on
        self._file_pts_ns = pts_ns
        self._file_stamp = self._file_stamp.earlier(-step_ns) if self._file_stamp else arrival
        return self._file_stamp
