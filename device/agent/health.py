"""The health of a pipeline, as its heartbeats tell."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineHealth:
    """The health of the pipeline: its state, its frame counters, and why it is not running."""

    state: str
    frames: int
    errors: int
    reason: str | None
    since: float
