"""How the pipeline of the board is, as a value: what the agent decides on and reports."""

from dataclasses import dataclass

from device.agent.liveness import NO_SIGNS, Liveness


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
