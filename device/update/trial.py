"""When a trial ends, and when a live release is given up: pure decisions on a pipeline's health.

A release is confirmed after it has run without a break for a time, with enough frames and few
errors, if it works at that moment: its last heartbeat and its last frame are young. One whose
source gives nothing is postponed: the source is not its fault. Times are seconds of a steady clock.
"""

from dataclasses import dataclass, replace
from typing import Literal

from device.protocol.documents import InstallPolicy
from device.update.liveness import NO_SIGNS, Liveness, PipelineHealth
from device.update.update_table import UpdateTable


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What a trial has to show (see [update] of agent.toml). `manual`: somebody has to say, too,
    that its release stays."""

    timeout_s: float
    confirm_after_s: float
    confirm_frames: int
    max_error_rate: float
    broker_timeout_s: float = 300.0
    max_latency_p95_ms: float | None = None
    max_temperature_c: float | None = None
    manual: bool = False


def trial_limits(table: UpdateTable, policy: InstallPolicy | None = None) -> TrialLimits:
    """Return the limits that a policy sets, or agent.toml where it says nothing."""
    policy = policy or InstallPolicy()
    confirm_after_s, max_error_rate = policy.confirm_after_s, policy.max_error_rate
    return TrialLimits(
        timeout_s=table.trial_timeout_s,
        confirm_after_s=table.confirm_after_s if confirm_after_s is None else confirm_after_s,
        confirm_frames=table.confirm_frames,
        max_error_rate=table.max_error_rate if max_error_rate is None else max_error_rate,
        broker_timeout_s=table.broker_timeout_s,
        max_latency_p95_ms=policy.max_latency_p95_ms,
        max_temperature_c=policy.max_temperature_c,
        manual=policy.manual,
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """What is known beside the pipeline's health; None: not measured, or no sensor.

    `online`: the broker is reachable. `latency_p95_ms`: of the last frames.
    """

    online: bool = True
    latency_p95_ms: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a trial. It is judged again at `until_s`, or when its health changes.

    `reason`: what a release that works waits for, or why it does not stay. postpone: the source
    gave nothing, or the broker is away (`broker`); that may not be the release's fault. `endless`:
    it waits for as long as that takes; `commit`: for somebody to say that it stays.
    """

    word: Literal["wait", "confirm", "roll_back", "postpone"]
    reason: str = ""
    until_s: float = 0.0
    endless: bool = False
    commit: bool = False
    broker: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of a release on trial.

    `frame_s`: when a frame was last counted, the start before the first, the return of the source
    after its absence. `healthy_s`: since when it runs without a break, None while it does not.
    `away_s`: since when its source is away, None while it is not. `broken`: it stalled or failed.
    `signs`: its last signs of life.
    `was_online`: the broker was reachable when it began, or since; `offline_s`: since when it is
    not, None while it is. `sideloaded`: somebody brought the release to the board.
    """

    frame_s: float
    frames: int = 0
    errors: int = 0
    healthy_s: float | None = None
    away_s: float | None = None
    broken: bool = False
    signs: Liveness = NO_SIGNS
    reason: str = ""
    was_online: bool = True
    sideloaded: bool = False
    offline_s: float | None = None
    latency_p95_ms: float | None = None
    temperature_c: float | None = None

    def observed(
        self, health: PipelineHealth, now_s: float, environment: Environment = Environment()
    ) -> "Trial":
        """Return the trial after a look at the health of its pipeline and its environment."""
        offline_s = now_s if self.offline_s is None else self.offline_s
        away = health.state == "degraded"
        healthy_s = now_s if self.healthy_s is None else self.healthy_s
        counted = health.frames > self.frames or (self.away_s is not None and not away)
        return replace(
            self,
            frame_s=now_s if counted else self.frame_s,
            frames=max(self.frames, health.frames),
            errors=max(self.errors, health.errors),
            healthy_s=healthy_s if health.working else None,
            away_s=(now_s if self.away_s is None else self.away_s) if away else None,
            broken=health.state in ("stalled", "failed"),
            signs=health.signs,
            reason=health.reason or "",
            was_online=self.was_online or environment.online,
            offline_s=None if environment.online else offline_s,
            latency_p95_ms=environment.latency_p95_ms,
            temperature_c=environment.temperature_c,
        )

    def held_up(self, for_s: float) -> "Trial":
        """Return the trial after a time in which the agent itself stood still: it proves nothing,
        for or against the release."""
        return replace(
            self,
            frame_s=self.frame_s + for_s,
            healthy_s=None if self.healthy_s is None else self.healthy_s + for_s,
            away_s=None if self.away_s is None else self.away_s + for_s,
            offline_s=None if self.offline_s is None else self.offline_s + for_s,
        )


def judge(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial."""
    if trial.broken:
        return Verdict("roll_back", trial.reason or "the pipeline failed and gave no reason")
    too_hot = _too_hot(trial, limits)
    if too_hot is not None:
        return Verdict("roll_back", too_hot)
    if trial.away_s is not None:
        return _judge_source(trial, trial.away_s + limits.timeout_s, limits, now_s)
    if trial.healthy_s is not None and now_s >= trial.healthy_s + limits.confirm_after_s:
        total = trial.frames + trial.errors
        if trial.errors > limits.max_error_rate * total:
            why = f": {trial.reason}" if trial.reason else ""
            return Verdict(
                "roll_back",
                f"{trial.errors} of {total} frames failed, a trial allows "
                f"{limits.max_error_rate:.0%} (max_error_rate){why}",
            )
        if trial.frames >= limits.confirm_frames:
            return (
                _judge_latency(trial, limits, now_s)
                or _judge_manual(limits, now_s)
                or _judge_broker(trial, limits, now_s)
                or _judge_now(trial, limits, now_s)
            )
    return _judge_silence(trial, limits, now_s)


def _too_hot(trial: Trial, limits: TrialLimits) -> str | None:
    """Return what the policy says against the temperature, None if nothing."""
    limit_c, actual_c = limits.max_temperature_c, trial.temperature_c
    if limit_c is None:
        return None
    if actual_c is None:
        return (
            "the policy limits the temperature (max_temperature_c), and this board has no sensor "
            "that can be read: leave it out for this board"
        )
    if actual_c <= limit_c:
        return None
    return (
        f"the hottest zone of the board has {actual_c:.1f} C, the policy allows {limit_c:g} C "
        "(max_temperature_c)"
    )


def _judge_latency(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict | None:
    """Return what the latency does to a trial that has shown all else, None if nothing."""
    limit_ms, actual_ms = limits.max_latency_p95_ms, trial.latency_p95_ms
    if limit_ms is None:
        return None
    if actual_ms is None:
        healthy_s = now_s if trial.healthy_s is None else trial.healthy_s
        until_s = healthy_s + limits.confirm_after_s + limits.timeout_s
        if now_s < until_s:
            return Verdict("wait", "its latency is not measured yet", until_s)
        return Verdict(
            "roll_back",
            "the pipeline has not measured its latency, which the policy limits "
            "(max_latency_p95_ms)",
        )
    if actual_ms <= limit_ms:
        return None
    return Verdict(
        "roll_back",
        f"95 % of the last frames took up to {actual_ms:.1f} ms, the policy allows {limit_ms:g} ms "
        "(max_latency_p95_ms)",
    )


def _judge_broker(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict | None:
    """Return what an unreachable broker does to a trial that has shown all else, None if nothing.

    A release that may have cut the device off gives way to the one before. With that the broker is
    reachable again, or it is not, which tells whose fault it is. Where the broker was away before
    the trial, the release before could not reach it either; one that was brought by hand to a board
    without a broker waits for none.
    """
    if trial.offline_s is None or (trial.sideloaded and not trial.was_online):
        return None
    if not trial.was_online:
        reason = "it works, and is live once the broker is reachable, which it was not before"
        return Verdict("wait", reason, now_s + limits.timeout_s, endless=True)
    until_s = trial.offline_s + limits.broker_timeout_s
    if now_s < until_s:
        reason = "it works, and is live once the broker is reachable again"
        return Verdict("wait", reason, until_s)
    return Verdict(
        "postpone",
        f"the broker was reachable before its trial, and not for the last "
        f"{limits.broker_timeout_s:g} s of it (broker_timeout_s)",
        broker=True,
    )


def _judge_now(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict:
    """Confirm a release that works at this moment, with a frame since its time was over.

    One that has frozen by now waits for a frame, and its watchdog ends it.
    """
    healthy_s = now_s if trial.healthy_s is None else trial.healthy_s
    if trial.signs.works(now_s) and trial.signs.frame_s >= healthy_s + limits.confirm_after_s:
        return Verdict("confirm")
    return _judge_silence(trial, limits, now_s)


def _judge_manual(limits: TrialLimits, now_s: float) -> Verdict | None:
    """Let a release that works wait for somebody, if it has to."""
    if not limits.manual:
        return None
    reason = (
        "it works, and is live once it is committed (`tandem flash --commit`); a restart goes back"
    )
    return Verdict("wait", reason, now_s + limits.timeout_s, endless=True, commit=True)


def _judge_source(trial: Trial, until_s: float, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial whose source is away."""
    if now_s < until_s:
        return Verdict("wait", until_s=until_s)
    why = f": {trial.reason}" if trial.reason else ""
    return Verdict("postpone", f"its source gave no frame for {limits.timeout_s:g} s{why}")


def _judge_silence(trial: Trial, limits: TrialLimits, now_s: float) -> Verdict:
    """Return what becomes of a trial that has not shown enough yet."""
    patience_s = max(limits.timeout_s, trial.signs.gap_s)  # of a camera with a frame each minute
    until_s = trial.frame_s + patience_s
    if now_s >= until_s:
        what = "no result" if trial.frames == 0 else f"no frame after {trial.frames}"
        return Verdict(
            "roll_back", f"the pipeline gave {what} within {patience_s:g} s (trial_timeout_s)"
        )
    healthy_at_s = until_s if trial.healthy_s is None else trial.healthy_s + limits.confirm_after_s
    soon_s = min(until_s, healthy_at_s) if now_s < healthy_at_s else until_s
    return Verdict("wait", until_s=soon_s)


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
