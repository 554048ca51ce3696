"""A clock that the test moves, and a pipeline that says what it is told."""

from dataclasses import dataclass, field
from pathlib import Path

from device.protocol.documents import (
    PipelineReport,
)
from device.update.liveness import Liveness, PipelineHealth


class Clock:
    """A steady clock that stands still until the test lets time pass."""

    now_s = 0.0

    @classmethod
    def read(cls) -> float:
        return cls.now_s


@dataclass
class Pipeline:
    """A double of the pipeline runner: it starts nothing, and is as well as the test says."""

    report: PipelineReport = field(default_factory=lambda: PipelineReport(status="stopped"))
    folder: Path | None = None
    restart_at_s: float | None = None
    state: str = "starting"
    frames: int = 0

    def start(self, folder: Path, *, fresh: bool) -> bool:
        self.folder, self.state, self.frames = folder, "starting", 0
        return True

    def stop(self, reason: str) -> None:
        self.folder = None

    def health(self) -> PipelineHealth:
        signs = Liveness(Clock.now_s, Clock.now_s)
        return PipelineHealth(self.state, self.frames, 0, None, 0.0, signs)
