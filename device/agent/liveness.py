"""Whether a pipeline works now: its heart beats and its frames go on. Pure values.

A sign counts from its arrival, and gets old: what a pipeline once said proves nothing about it
later. Times are seconds of a steady clock.
"""

from dataclasses import dataclass, replace
from math import inf

YOUNG_S = 1.5  # three heartbeats
FRAME_GAP_S = 3.0  # between frames of a pipeline that does not say how long it may take


@dataclass(frozen=True, slots=True)
class Liveness:
    """The last signs of a pipeline that runs.

    `beat_s`: when its last heartbeat came. `frame_s`: when its count of frames last rose; time in
    which it owed none does not count. `gap_s`: so long it may give no frame while it runs; 0: it
    has not said.
    """

    beat_s: float = -inf
    frame_s: float = -inf
    frames: int = 0
    gap_s: float = 0.0

    def beaten(self, frames: int, gap_s: float, at_s: float, *, runs: bool) -> "Liveness":
        """Return the value after a heartbeat. `runs`: since the last one it ran, with its source
        there; otherwise it owed no frames."""
        frame_s = self.frame_s
        if frames > self.frames or self.beat_s == -inf:
            frame_s = at_s
        elif not runs:
            frame_s += at_s - self.beat_s
        return Liveness(at_s, frame_s, max(frames, self.frames), gap_s)

    def works(self, now_s: float) -> bool:
        """Whether the last heartbeat and the last frame are young."""
        return now_s - self.beat_s <= YOUNG_S and self.frameless_s(now_s) <= self.most_s

    def frameless_s(self, now_s: float) -> float:
        """Return for how long there has been no frame."""
        return now_s - self.frame_s

    @property
    def most_s(self) -> float:
        """How long it may give no frame."""
        return self.gap_s or FRAME_GAP_S

    def held_up(self, until_s: float) -> "Liveness":
        """Return the value after a time in which nobody listened: frames are owed from its end."""
        return replace(self, frame_s=max(self.frame_s, until_s))


NO_SIGNS = Liveness()
