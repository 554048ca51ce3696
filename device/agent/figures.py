"""What the pipeline measures of the release that runs, for the gates of trials and rollouts."""

from dataclasses import dataclass
from pathlib import Path

from device.board_files import hottest_c
from device.protocol.documents import Measured
from device.protocol.messages import ChildMessage, Ready, Result, Stats
from device.update.liveness import PipelineHealth
from device.update.slots import SlotRecord

MEASURED_S = 10.0  # between two reports of figures alone
TEMPERATURE_S = 2.0  # between two looks at the sensors
_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest figures; None: not measured yet, or no sensor.

    `latency_p95_ms`: of the last frames. `temperature_c`: of the hottest zone.
    """

    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    fps: float = 0.0
    temperature_c: float | None = None


class Figures:
    """Takes the messages of the pipeline; what is reported changes every MEASURED_S at most."""

    def __init__(self, sys: Path = _SYS) -> None:
        self._sys = sys
        self._stats: Stats | None = None
        self._first_latency_ms = 0.0
        self._temperature_c: float | None = None
        self._look_s = float("-inf")
        self._measured: Measured | None = None
        self._reported: tuple[str, str] = ("", "")  # release and phase of the last report
        self._due_s = float("-inf")

    def on_message(self, message: ChildMessage) -> None:
        """Take what the pipeline says; its start begins new figures."""
        if isinstance(message, Ready):
            self._stats, self._first_latency_ms = None, 0.0
        elif isinstance(message, Result):
            self._first_latency_ms = message.latency_ms
        elif isinstance(message, Stats) and message.frames:
            self._stats = message

    def latest(self, now_s: float) -> Latest:
        """Return the newest figures."""
        if now_s >= self._look_s:
            self._look_s = now_s + TEMPERATURE_S
            self._temperature_c = hottest_c(self._sys)
        stats = self._stats
        if stats is None or not stats.recent_p95_ms:
            return Latest(temperature_c=self._temperature_c)
        return Latest(stats.recent_p50_ms, stats.recent_p95_ms, stats.fps, self._temperature_c)

    def measured(
        self, record: SlotRecord | None, phase: str, health: PipelineHealth, now_s: float
    ) -> Measured | None:
        """Return the figures for the report on the release that runs; None if none does.

        They are new at each change of release or phase, otherwise every MEASURED_S.
        """
        if record is None:
            return None
        now_reported = (record.sha256, phase)
        if now_reported == self._reported and now_s < self._due_s:
            return self._measured
        self._reported, self._due_s = now_reported, now_s + MEASURED_S
        latest = self.latest(now_s)
        self._measured = Measured(
            sha256=record.sha256,
            frames=health.frames,
            errors=health.errors,
            fps=latest.fps,
            first_latency_ms=self._first_latency_ms,
            latency_p50_ms=latest.latency_p50_ms or 0.0,
            latency_p95_ms=latest.latency_p95_ms or 0.0,
            temperature_c=latest.temperature_c,
            golden_agreement=record.golden_agreement,
            shadow_agreement=record.shadow_agreement,
            shadow_frames=record.shadow_frames,
        )
        return self._measured
