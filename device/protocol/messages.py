"""The messages of a pipeline process to the agent: a JSON object per line on standard output.

The agent never imports numpy or cv2; these lines are all that it knows of a running pipeline.
"""

from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=10**15)]  # as in the reports that it ends up in
Gap = Annotated[float, Meta(ge=0.0, le=86400.0)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the messages; the tag is kept in `kind`. Unknown keys are ignored, so that an
    older agent reads a newer pipeline."""


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """The engine is loaded. `segments` say how each segment runs; `warm_up_s`: the time of the
    second inference, which later ones do not exceed by much. `degraded`: DLA segments that run on
    another processor, and why."""

    pipeline: str
    engine_sha256: str
    segments: tuple[str, ...] = ()
    warm_up_s: Gap = 0.0
    degraded: tuple[str, ...] = ()


class Result(_Message, frozen=True, kw_only=True, tag="result"):
    """The first frame went through every stage (the health check of a trial)."""

    seq: int
    latency_ms: float


class Stats(_Message, frozen=True, kw_only=True, tag="stats"):
    """Figures over the last interval: frames per second, latency and drops by cause.

    `recent_p50_ms`, `recent_p95_ms`: latency of the last 1,000 frames since the start; 0: none yet.
    `processors`: the frames of the interval whose inferences ran on each, such as "dla1".
    """

    frames: int
    fps: float
    latency_p50_ms: float
    latency_p99_ms: float
    stage_p50_ms: dict[str, float]
    stage_p99_ms: dict[str, float]
    dropped: dict[str, int]
    recent_p50_ms: float = 0.0
    recent_p95_ms: float = 0.0
    processors: dict[str, int] = {}


class Heartbeat(_Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The loop of the pipeline turns: twice a second and at each change of `state`. Until it
    begins, a thread says `loading`: its process runs.

    `frames` with a result, `errors`, frames lost to faults, and `taken`, all that the loop took,
    whatever became of them: since the process started.
    `state`: then starting (no frame yet), running, or degraded (the camera is away; `reason`).
    `since_s`: when it began, on the clock of `time.monotonic()`, which all processes of a board
    share. `gap_s`: while it runs, frames may be so far apart without a fault; 0: it does not say.
    `quiet_s`: the next heartbeat may take so long, as its frames take long or it ends.
    `load`: the step that a hot or slow board has made it take, and why; empty if none.
    """

    frames: Count
    errors: Count
    state: Literal["loading", "starting", "running", "degraded"]
    reason: str = ""
    since_s: float = 0.0
    load: str = ""
    gap_s: Gap = 0.0
    quiet_s: Gap = 0.0
    taken: Count = 0


class Reload(_Message, frozen=True, kw_only=True, tag="reload"):
    """pipeline.toml changed while the pipeline ran: `changes` are what it took, a sentence each, or
    `refused` says why it took nothing."""

    changes: tuple[str, ...] = ()
    refused: str = ""


class Shadow(_Message, frozen=True, kw_only=True, tag="shadow"):
    """How far a new release agrees with the one that runs, on the same live frames.

    `frames` were compared, with `counted` objects, frames or lines, of which `agreement` is the
    share that agrees. `done`: the last message.
    """

    frames: int
    agreement: float
    counted: int
    done: bool = False


class Failure(_Message, frozen=True, kw_only=True, tag="failure"):
    """The pipeline stops; `message` is the sentence that a user reads."""

    message: str


ChildMessage = Union[Ready, Result, Stats, Heartbeat, Reload, Shadow, Failure]  # noqa: UP007  (read by msgspec on 3.10)

_DECODER = msgspec.json.Decoder(ChildMessage)
_ENCODER = msgspec.json.Encoder()


def encode_message(message: ChildMessage) -> bytes:
    """Return the message as one line of JSON, line feed included."""
    return _ENCODER.encode(message) + b"\n"


def decode_message(line: bytes) -> ChildMessage | None:
    """Return the message in a line, or None if the line is not one (a stray print, say)."""
    try:
        message: ChildMessage = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return message
