"""When a frame was captured, from its presentation time and its arrival.

Presentation times are even but have an unknown origin; arrivals have a known origin but jitter
upwards only. The smallest difference seen lately ties the two together. It holds as long as the
origin stays: GStreamer must not move presentation times to arrivals (`buffer-mode=none`).
"""

from pipelines.frame import Stamp

WINDOW_NS = 10_000_000_000  # the two clocks drift apart, so old minima are forgotten
JUMP_NS = 1_000_000_000  # a camera that counts anew: what was learned is of another origin


class CaptureClock:
    """Turns presentation times into moments; one per connection."""

    def __init__(self) -> None:
        self._window_end_ns = 0
        self._previous_ns: int | None = None
        self._current_ns: int | None = None
        self._last_ns: int | None = None

    def stamp(self, pts_ns: int | None, arrival: Stamp) -> Stamp:
        """Return the capture moment of a frame that began to arrive at `arrival`."""
        if pts_ns is None:
            return arrival
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
