"""Which release runs: what is tried, when a trial ends, when a live release is given up."""

import msgspec
import pytest

from device.agent.pipeline_process import Restarts
from device.protocol.documents import DOCUMENT_FORMAT, BlobSpec, Desired, ReleaseSpec
from device.protocol.messages import Heartbeat
from device.trust.exchange import TRUSTED, Refused, Unverified
from device.update import slots
from device.update.decisions import (
    Decision,
    decide,
    update_of_slots,
)
from device.update.liveness import FRAME_GAP_S, YOUNG_S, Liveness, PipelineHealth
from device.update.slots import SlotFailure, SlotRecord, SlotState
from device.update.trial import (
    Crashes,
    Trial,
    TrialLimits,
    Verdict,
    judge,
)
from device.update.update_table import UpdateTable

LIMITS = TrialLimits(timeout_s=30.0, confirm_after_s=10.0, confirm_frames=5, max_error_rate=0.1)


def seen(*looks: tuple[float, str, int, int], reason: str = "", gap_s: float = 0.0) -> Trial:
    """A trial that began at 0 s, after looks at (time, state, frames, errors)."""
    trial, signs = Trial(frame_s=0.0), Liveness()
    for now_s, state, frames, errors in looks:
        beat = Heartbeat(frames=frames, errors=errors, state="running", gap_s=gap_s)
        signs = signs.beaten(beat, now_s, owes=state == "running")
        health = PipelineHealth(state, frames, errors, reason or None, 0.0, signs)
        trial = trial.observed(health, now_s)
    return trial


@pytest.mark.parametrize(
    ("trial", "now_s", "verdict"),
    [
        # no result: up to the limit, and at it
        (seen((0, "starting", 0, 0)), 29.9, Verdict("wait", until_s=30.0)),
        (seen((0, "starting", 0, 0)), 30.0, Verdict("roll_back", "no result within 30 s")),
        # a time without a break
        (seen((1, "running", 1, 0), (10.9, "running", 9, 0)), 10.9, Verdict("wait", until_s=11.0)),
        (seen((1, "running", 1, 0), (11, "running", 9, 0)), 11.0, Verdict("confirm")),
        (
            seen((1, "running", 1, 0), (5, "starting", 1, 0), (6, "running", 9, 0)),
            15.9,
            Verdict("wait", until_s=16.0),
        ),
        # frames
        (seen((1, "running", 1, 0), (11, "running", 4, 0)), 11.0, Verdict("wait", until_s=41.0)),
        (seen((1, "running", 1, 0), (11, "running", 5, 0)), 11.0, Verdict("confirm")),
        (seen((1, "running", 4, 0)), 31.0, Verdict("roll_back", "no frame after 4 within 30 s")),
        # a slow camera: as long as it says, and no shorter than any other
        (seen((1, "running", 4, 0), gap_s=60.0), 60.9, Verdict("wait", until_s=61.0)),
        (
            seen((1, "running", 4, 0), gap_s=60.0),
            61.0,
            Verdict("roll_back", "no frame after 4 within 60 s"),
        ),
        (
            seen((1, "running", 4, 0), gap_s=20.0),
            31.0,
            Verdict("roll_back", "no frame after 4 within 30 s"),
        ),
        (seen((1, "running", 1, 0), (51, "running", 5, 0), gap_s=60.0), 51.0, Verdict("confirm")),
        # errors alone are no frames, however few they are
        (
            seen((1, "running", 90, 0), (10.9, "running", 90, 5)),
            11.0,
            Verdict("wait", until_s=31.0),
        ),
        # errors: one of ten is let pass, one of nine is not
        (seen((1, "running", 8, 0), (11, "running", 9, 1)), 11.0, Verdict("confirm")),
        (
            seen((1, "running", 8, 1)),
            11.0,
            Verdict("roll_back", "1 of 9 frames failed, a trial allows 10%"),
        ),
        # what it once gave proves nothing now: the last frame is from before its time was over,
        (seen((1, "running", 1, 0), (10.9, "running", 9, 0)), 11.0, Verdict("wait", until_s=40.9)),
        (
            seen((1, "running", 1, 0), (10.9, "running", 9, 0), (11, "running", 9, 0)),
            11.0,
            Verdict("wait", until_s=40.9),
        ),
        # or the last heartbeat is old,
        (seen((1, "running", 1, 0), (12, "running", 9, 0)), 12.0 + YOUNG_S, Verdict("confirm")),
        (
            seen((1, "running", 1, 0), (12, "running", 9, 0)),
            12.1 + YOUNG_S,
            Verdict("wait", until_s=42.0),
        ),
        # or the last frame
        (
            seen((1, "running", 1, 0), (12, "running", 9, 0), (15, "running", 9, 0)),
            12.0 + FRAME_GAP_S,
            Verdict("confirm"),
        ),
        (
            seen((1, "running", 1, 0), (12, "running", 9, 0), (15, "running", 9, 0)),
            12.1 + FRAME_GAP_S,
            Verdict("wait", until_s=42.0),
        ),
        # a source that is away stops the clock, however much ran before
        (seen((1, "degraded", 0, 0), reason="no camera"), 30.9, Verdict("wait", until_s=31.0)),
        (
            seen((1, "degraded", 0, 0), reason="no camera"),
            31.0,
            Verdict("postpone", "for 30 s: no camera"),
        ),
        (seen((1, "running", 9, 0), (9, "degraded", 9, 0)), 20.0, Verdict("wait", until_s=39.0)),
        (seen((1, "degraded", 0, 0), (28, "starting", 0, 0)), 57.9, Verdict("wait", until_s=58.0)),
        (
            seen((1, "degraded", 0, 0), (28, "starting", 0, 0)),
            58.0,
            Verdict("roll_back", "no result within"),
        ),
        # a pipeline that broke
        (seen((1, "stalled", 9, 0), reason="it hangs"), 1.0, Verdict("roll_back", "it hangs")),
        (seen((1, "failed", 0, 0)), 1.0, Verdict("roll_back", "gave no reason")),
    ],
)
def test_a_trial_ends_at_its_limits(trial: Trial, now_s: float, verdict: Verdict) -> None:
    actual = judge(trial, LIMITS, now_s)
    assert actual.word == verdict.word
    if verdict.word in ("roll_back", "postpone"):
        assert verdict.reason in actual.reason
    else:
        assert actual == verdict


@pytest.mark.parametrize(
    "trial",
    [
        seen((0, "starting", 0, 0)),
        seen((1, "running", 9, 0)),
        seen((1, "degraded", 0, 0)),
    ],
)
def test_time_in_which_the_agent_stood_still_decides_nothing(trial: Trial) -> None:
    assert judge(trial, LIMITS, 41.0).word != "wait"
    assert judge(trial.held_up(40.0), LIMITS, 41.0).word == "wait"
    assert judge(trial.held_up(40.0), LIMITS, 81.0) == judge(trial, LIMITS, 41.0)


def test_crashes_count_within_their_window() -> None:
    crashes = Crashes(limit=3, window_s=60.0)
    for now_s in (0.0, 59.0, 60.0):  # the first is out of the window of the last
        crashes = crashes.crashed(now_s)
    assert not crashes.loop
    assert crashes.crashed(118.9).loop
    assert not crashes.crashed(119.1).crashed(179.2).loop


def test_a_release_that_dies_soon_after_each_trial_time_is_given_up_by_default() -> None:
    table = UpdateTable()
    crashes = Crashes(table.max_crashes, table.crash_window_s)
    restarts, now_s = Restarts(), 0.0
    for _ in range(table.max_crashes):
        now_s += 3.0 * table.confirm_after_s  # its loading included
        crashes, restarts = crashes.crashed(now_s), restarts.started().died(now_s)
        assert restarts.at_s is not None
        now_s = restarts.at_s
    assert crashes.loop


RELEASE = "1" * 64
OTHER = "2" * 64


def record(sha256: str, *, good: bool = True) -> SlotRecord:
    return SlotRecord(
        sha256=sha256, bytes=1, name="n", version="1", request="old", good=good, commit=good * 5
    )


def desired(request: str = "new", *, retry: bool = False, profile: str = "p") -> Desired:
    blob = BlobSpec(sha256=RELEASE, bytes=1, chunk_bytes=4096, index_sha256="0" * 64)
    release = ReleaseSpec(name="n", version="1", profile=profile, blob=blob)
    return Desired(format=DOCUMENT_FORMAT, request=request, release=release, retry=retry)


def failed(phase: str, request: str = "old", at: str = "") -> SlotState:
    """The release is in the idle slot and has failed."""
    failure = SlotFailure(sha256=RELEASE, request=request, phase=phase, reason="x", at=at, commit=5)  # type: ignore[arg-type]
    state = SlotState(active="a", a=record(OTHER), b=record(RELEASE, good=False))
    return msgspec.structs.replace(state, failures=(failure,))


LIVE = SlotState(active="a", a=record(RELEASE))
STAGED = SlotState(active="a", a=record(OTHER), b=record(RELEASE, good=False))


@pytest.mark.parametrize(
    ("state", "request_", "decision"),
    [
        (SlotState(), desired(), Decision("fetch")),
        (LIVE, desired(), Decision("live")),
        (LIVE, desired(profile="q"), Decision("live")),
        (STAGED, desired(), Decision("try")),
        (STAGED, desired(profile="q"), Decision("refused", "is built for q")),
        (failed("refused"), desired("old"), Decision("refused", "x")),
        (failed("refused"), desired("new"), Decision("try")),
        (failed("rolled_back"), desired("old"), Decision("rolled_back", "x")),
        (failed("rolled_back"), desired("new"), Decision("rolled_back", "rolled back before: x;")),
        (failed("rolled_back", at="T"), desired("new"), Decision("rolled_back", "before at T: x;")),
        (failed("rolled_back"), desired("new", retry=True), Decision("try")),
        (failed("rolled_back"), desired("old", retry=True), Decision("rolled_back", "x")),
        (
            slots.postpone(slots.begin_trial(STAGED, "r"), "no camera"),
            desired(),
            Decision("postponed", "no camera"),
        ),
    ],
)
def test_what_is_done_about_a_desired_release(
    state: SlotState, request_: Desired, decision: Decision
) -> None:
    actual = decide(request_, state, profile="p", verdict=TRUSTED)
    assert actual.word == decision.word
    assert decision.reason in actual.reason
    assert ("--retry" in actual.reason) == ("before" in decision.reason)


@pytest.mark.parametrize("state", [SlotState(), STAGED, failed("refused"), failed("rolled_back")])
@pytest.mark.parametrize(
    ("verdict", "decision"),
    [
        (Refused(reason="by a stranger"), Decision("refused", "by a stranger")),
        (Refused(reason="an old timestamp", again=True), Decision("refused", "an old timestamp")),
        (Unverified(reason="no server"), Decision("verifying", "no server")),
    ],
)
def test_nothing_is_done_about_a_release_whose_signatures_do_not_fit(
    state: SlotState, verdict: Refused | Unverified, decision: Decision
) -> None:
    assert decide(desired(retry=True), state, profile="p", verdict=verdict) == decision
    assert decide(desired(), LIVE, profile="p", verdict=verdict) == Decision("live")


def test_a_failure_is_reported_until_another_release_is_live() -> None:
    on_trial = slots.begin_trial(STAGED, "r")
    rolled_back = slots.roll_back(on_trial, "x", "t")
    assert update_of_slots(rolled_back).phase == "rolled_back"
    newer = slots.stage(rolled_back, record("3" * 64))
    assert update_of_slots(slots.confirm(slots.begin_trial(newer, "r"))).phase == "live"
