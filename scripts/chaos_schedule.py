"""What `scripts/chaos.py` does to whom and what must hold: tables, and schedules by seed."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to hurt a part: `seconds` bound how long it lasts, `weight` how often it comes."""

    part: str
    action: str
    seconds: tuple[float, float]
    weight: int


# kill: SIGKILL, and the part is started again at the end; freeze: SIGSTOP until the end; end:
# SIGTERM; cut: its connections are reset and refused until the end; fill: not a byte can be written
# by the agent and what it starts; deploy: a release is sent; giant, garbage: hostile messages.
FAULTS: tuple[Fault, ...] = (
    Fault("agent", "kill", (0.0, 3.0), 4),
    Fault("agent", "freeze", (0.5, 6.0), 2),
    Fault("agent", "end", (0.0, 2.0), 1),
    Fault("pipeline", "kill", (0.0, 0.0), 3),
    Fault("pipeline", "freeze", (0.5, 20.0), 2),
    Fault("broker", "kill", (0.0, 6.0), 3),
    Fault("broker", "freeze", (0.5, 5.0), 2),
    Fault("broker", "cut", (0.1, 4.0), 3),
    Fault("camera", "kill", (0.0, 8.0), 3),
    Fault("camera", "freeze", (0.5, 8.0), 2),
    Fault("camera", "cut", (0.1, 4.0), 2),
    Fault("disk", "fill", (0.5, 6.0), 3),
    Fault("deployer", "deploy", (0.0, 0.0), 6),
    Fault("deployer", "kill", (0.0, 0.0), 2),
    Fault("deployer", "freeze", (0.5, 5.0), 1),
    Fault("broker", "garbage", (0.0, 0.0), 1),
    Fault("broker", "giant", (0.0, 0.0), 1),
)
RELEASES = ("one", "two", "broken")
PAUSES_S = (0.0, 0.5, 2.0, 8.0, 15.0)  # most invariants can only be judged in quiet times


@dataclass(frozen=True, slots=True)
class Step:
    """A fault at a time of the run, in seconds; `release` is what a deploy sends."""

    at_s: float
    part: str
    action: str
    for_s: float
    release: str


def schedule(seed: int, seconds: float) -> tuple[Step, ...]:
    """Return the faults of a run; equal seeds give equal faults, longer runs only add some."""
    draw = random.Random(seed)
    steps: list[Step] = []
    at_s = 1.0
    while True:
        fault = draw.choices(FAULTS, [row.weight for row in FAULTS])[0]
        step = Step(
            at_s=round(at_s, 3),
            part=fault.part,
            action=fault.action,
            for_s=round(draw.uniform(*fault.seconds), 3),
            release=draw.choice(RELEASES),
        )
        at_s += draw.choice(PAUSES_S) * draw.uniform(0.5, 1.0) + 0.1
        if step.at_s >= seconds:
            return tuple(steps)
        steps.append(step)


@dataclass(frozen=True, slots=True)
class Invariant:
    """What must hold; it is broken when it does not for `grace_s` of quiet.

    `despite`: faults of this part do not break the quiet, as the invariant is about them. The grace
    is multiplied by --patience on busy machines.
    """

    name: str
    grace_s: float
    despite: str = ""


INVARIANTS: tuple[Invariant, ...] = (
    # A good release runs, or the report says why not.
    Invariant("runs-or-says-why", 5.0),
    # What the report says of the release and its process is what the process table shows.
    Invariant("report-is-true", 5.0),
    # The agent is back at the broker: its longest back-off is 15 s.
    Invariant("agent-is-online", 25.0),
    # Nothing of the run lives that the agent did not start or has lost.
    Invariant("no-orphaned-pipeline", 5.0),
    Invariant("no-orphaned-camera-reader", 5.0),
    # At most one pipeline, below its bound of memory; the agent below its own.
    Invariant("one-pipeline", 5.0),
    Invariant("memory-is-flat", 5.0),
    # The state folder holds the two slots and nothing that grows.
    Invariant("disk-is-bounded", 5.0),
    # The release that was live last is still in a slot.
    Invariant("slots-are-never-lost", 5.0),
    # A camera that is away makes the report say so: half of stall_s of the source, and 2 s.
    Invariant("camera-away-is-said", 3.0, despite="camera"),
    # A pipeline that hangs is killed: STALL_S, and 2 s.
    Invariant("hung-pipeline-is-killed", 6.0, despite="pipeline"),
)
STALL_S = 4.0  # of the agent: below the longest freeze of a pipeline
AGENT_BYTES = 160 << 20
PIPELINE_BYTES = 700 << 20
STATE_BYTES = 64 << 20
