"""Whether a pipeline works now: it gives heartbeats and its frames go on. Pure values.

A sign counts from its arrival, and gets old: what a pipeline once said proves nothing about it
later. Times are seconds of a steady clock.
"""

from dataclasses import dataclass, replace
from math import inf

from device.protocol.messages import Heartbeat

YOUNG_S = 1.5  # three heartbeats
# Between two looks, of which the agent takes one at least every MAX_WAIT_S (`device.agent.agent`),
# half of it; after longer it was itself held up. On a machine so loaded that it is always late it
# kills nothing, rather than a good pipeline.
MAX_LATE_S = 1.0
FRAME_GAP_S = 3.0  # between frames of a pipeline that does not say how long it may take


@dataclass(frozen=True, slots=True)
class Liveness:
    """The last signs of a pipeline that runs.

    `beat_s`: when its last heartbeat came. `frame_s`: when its count of `frames` last rose.
    `turn_s`: when it last dealt with a frame, be it that the frame was lost to an error or left out
    as its rate asks; `turns` counts these. Time in which it owed no frame does not count in either.
    `gap_s`: so long it may give no frame while it runs; 0: it has not said. `quiet_s`: so long it
    may give no heartbeat; 0: as usual.
    """

    beat_s: float = -inf
    frame_s: float = -inf
    turn_s: float = -inf
    frames: int = 0
    turns: int = 0
    gap_s: float = 0.0
    quiet_s: float = 0.0

    def beaten(self, beat: Heartbeat, at_s: float, *, owes: bool) -> "Liveness":
        """Return the value after a heartbeat. `owes`: since the last one it had to give frames, as
        its source is there."""
        first = self.beat_s == -inf
        free_s = 0.0 if owes or first else at_s - self.beat_s
        turns = beat.frames + beat.errors + beat.taken
        return Liveness(
            beat_s=at_s,
            frame_s=at_s if first or beat.frames > self.frames else self.frame_s + free_s,
            turn_s=at_s if first or turns > self.turns else self.turn_s + free_s,
            frames=max(beat.frames, self.frames),
            turns=max(turns, self.turns),
            gap_s=beat.gap_s,
            quiet_s=beat.quiet_s,
        )

    def resulted(self, at_s: float) -> "Liveness":
        """Return the value after the message of its first frame."""
        return replace(self, frame_s=at_s, turn_s=at_s, frames=max(1, self.frames))

    def works(self, now_s: float) -> bool:
        """Whether the last heartbeat and the last frame are young."""
        return now_s - self.beat_s <= YOUNG_S and now_s - self.frame_s <= self.most_s

    @property
    def idle_s(self) -> float:
        """For how long it has given heartbeats while it dealt with no frame. The time since the
        last heartbeat is silence, which has its own limit."""
        return self.beat_s - self.turn_s

    @property
    def most_s(self) -> float:
        """How long it may give no frame."""
        return max(self.gap_s or FRAME_GAP_S, self.quiet_s)

    def held_up(self, until_s: float) -> "Liveness":
        """Return the value after a time in which nobody listened: frames are owed from its end."""
        frame_s, turn_s = max(self.frame_s, until_s), max(self.turn_s, until_s)
        return replace(self, frame_s=frame_s, turn_s=turn_s)


NO_SIGNS = Liveness()


@dataclass(frozen=True, slots=True)
class PipelineHealth:
    """The health of the pipeline process.

    `state` is one of
        starting   it loads its engine or waits for its first frame
        running    frames go through every stage
        degraded   its camera gives no frames; `reason` says why
        stalled    its loop gave no sign of life for too long; it was killed and starts again
        failed     it does not run; `reason` says why
    `frames`: frames with a result, `errors`: frames lost to faults, both since its process started.
    `since`: when the state began, in seconds of `time.monotonic()`.
    `signs`: its last signs of life.
    """

    state: str
    frames: int
    errors: int
    reason: str | None
    since: float
    signs: Liveness = NO_SIGNS

    @property
    def working(self) -> bool:
        """Whether it has given frames, and its source gives more."""
        return self.state == "running" and self.frames > 0
