"""When a trial ends, and when a live release is given up: pure decisions on a pipeline's health.

A release is confirmed after it has run without a break for a time, with enough frames and few
errors. One whose source gives nothing is postponed: the source is not its fault. Times are seconds
of a steady clock.
"""

from dataclasses import dataclass, replace

from device.agent.config import UpdateTable
from device.agent.health import PipelineHealth


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What a trial has to show (see [update] of agent.toml)."""

    timeout_s: float
    confirm_after_s: float
    confirm_frames: int
    max_error_rate: float


def trial_limits(table: UpdateTable) -> TrialLimits:
    """Return the limits that agent.toml sets."""
    return TrialLimits(
        timeout_s=table.trial_timeout_s,
        confirm_after_s=table.confirm_after_s,
        confirm_frames=table.confirm_frames,
        max_error_rate=table.max_error_rate,
    )


@dataclass(frozen=True, slots=True)
class Wait:
    """The trial goes on; it is judged again at `until_s`, or when its health changes."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Confirm:
    """The release has shown what it had to."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """The release failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Postpone:
    """The source gave nothing, which says nothing of the release."""

    reason: str


Verdict = Wait | Confirm | RollBack | Postpone


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of a release on trial.

    `frame_s`: when a frame was last counted, the start before the first, the return of the source
    after its absence. `healthy_s`: since when it runs without a break, None while it does not.
    `away_s`: since when its source is away, None while it is not. `broken`: it stalled or failed.
    """

    frame_s: float
    frames: int = 0
    errors: int = 0
    healthy_s: float | None = None
    away_s: float | None = None
    broken: bool = False
    reason: str = ""

    def observed(self, health: PipelineHealth, now_s: float) -> "Trial":
        """Return the trial after a look at the health of its pipeline."""
        working = health.state == "running" and health.frames > 0
        away = health.state == "degraded"
        counted = health.frames > self.frames or (self.away_s is not None and not away)
        return replace(
            self,
            frame_s=now_s if counted else self.frame_s,
            frames=max(self.frames, health.frames),
            errors=max(self.errors, health.errors),
            healthy_s=(now_s if self.healthy_s is None else self.healthy_s) if working else None,
            away_s=(now_s if self.away_s is None else self.away_s) if away else None,
            broken=health.state in ("stalled", "failed"),
            reason=health.reason or "",
        )

    def held_up(self, for_s: float) -> "Trial":
        """Return the trial after a time in which the agent itself stood still: it proves nothing,
        for or against the release."""
        return replace(
            self,
            frame_s=self.frame_s + for_s,
            healthy_s=None if self.healthy_s is None else self.healthy_s + for_s,
            away_s=None if self.away_s is None else self.away_s + for_s,
        )


def judge(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial."""
    if trial.broken:
        return RollBack(trial.reason or "the pipeline failed and gave no reason")
    if trial.away_s is not None:
        return _judge_source(trial, trial.away_s + limits.timeout_s, limits, now_s)
    if trial.healthy_s is not None and now_s >= trial.healthy_s + limits.confirm_after_s:
        total = trial.frames + trial.errors
        if trial.errors > limits.max_error_rate * total:
            why = f": {trial.reason}" if trial.reason else ""
            return RollBack(
                f"{trial.errors} of {total} frames failed, a trial allows "
                f"{limits.max_error_rate:.0%} (max_error_rate){why}"
            )
        if trial.frames >= limits.confirm_frames:
            return Confirm()
    return _judge_silence(trial, limits, now_s)


def _judge_source(trial: Trial, until_s: float, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial whose source is away."""
    if now_s < until_s:
        return Wait(until_s)
    why = f": {trial.reason}" if trial.reason else ""
    return Postpone(f"its source gave no frame for {limits.timeout_s:g} s{why}")


def _judge_silence(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial that has not shown enough yet."""
    until_s = trial.frame_s + limits.timeout_s
    if now_s >= until_s:
        what = "no result" if trial.frames == 0 else f"no frame after {trial.frames}"
        return RollBack(f"the pipeline gave {what} within {limits.timeout_s:g} s (trial_timeout_s)")
    healthy_at_s = until_s if trial.healthy_s is None else trial.healthy_s + limits.confirm_after_s
    return Wait(min(until_s, healthy_at_s) if now_s < healthy_at_s else until_s)


@dataclass(frozen=True, slots=True)
class Crashes:
    """The crashes of a live release within a window: a value; each crash returns the next one."""

    limit: int
    window_s: float
    at_s: tuple[float, ...] = ()

    def crashed(self, now_s: float) -> "Crashes":
        """Return the value after one more crash."""
        recent = tuple(at_s for at_s in self.at_s if now_s - at_s < self.window_s)
        return replace(self, at_s=(*recent, now_s)[-self.limit :])

    @property
    def loop(self) -> bool:
        """Whether there were so many that the release is given up."""
        return len(self.at_s) >= self.limit
