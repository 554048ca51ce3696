"""The machine of the board: (state, event) -> (state, effects). It has no clock and no disk.

`STEPS` are all transitions that there are; `HANDLERS` says what each event does, `GATES` what a
release has to pass before its trial, in their order. `device.agent.updater` carries the effects
out, and what comes of one is the next event. A trial is written to the disk before it begins; a
rollback is in force even on a full disk, which gets it as soon as it has room.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from msgspec.structs import replace as altered

from device.protocol.documents import Desired, Phase
from device.trust.exchange import Trusted
from device.update import events as v
from device.update import slots
from device.update.admission import FLOOR, below_floor, waits_for_window
from device.update.decisions import decide, update_of, update_of_record, update_of_slots
from device.update.liveness import MAX_LATE_S, PipelineHealth
from device.update.slots import MAX_ATTEMPTS, MAX_REASON, Slot, SlotRecord, SlotState
from device.update.trial import Crashes, Trial, Verdict, judge, trial_limits

READ_AGAIN_S = 10.0  # between two tries to read a slot that the disk does not give
RETRY_S = 1.0  # between two tries to write to a disk that took nothing
NO_RELEASE = (
    "the policy asks how well live frames agree with the running release (min_shadow_agreement), "
    "and none runs on this board: roll it out here without that limit"
)
DIED = (
    f"the agent died in {MAX_ATTEMPTS} of {MAX_ATTEMPTS} attempts to run this release beside the "
    "live one (shadow_s); see the log of the board for the cause"
)

Word = Literal[
    "clear", "live", "refused", "rolled_back", "verifying", "postponed", "try", "fetch",
    "complete", "unpacked", "no_fetch", "fetch_failed", "whole", "damaged", "unread", "again",
    "next", "passed", "rejected", "recorded", "not_recorded", "resume", "not_started",
    "restart_due", "postpone", "roll_back", "fall_back", "restart", "stop", "accept",
]  # fmt: skip
ON_TRIAL: tuple[v.Stage, ...] = ("trial", "unstarted", "resuming")
RESTING = tuple(stage for stage in get_args(v.Stage) if stage not in ON_TRIAL)
REJECTING: tuple[v.Stage, ...] = (
    "unread", "verifying", "window", "preparing", "golden", "shadow_attempt", "shadow",
)  # fmt: skip
# What `decide` says of the desired release leads to one stage from each that has no trial; clear:
# there is none.
DECISIONS: Mapping[Word, v.Stage] = {
    "clear": "idle", "live": "live", "refused": "failed", "rolled_back": "failed",
    "verifying": "verifying", "postponed": "postponed", "try": "checking", "fetch": "downloading",
}  # fmt: skip

# (stage, word) -> stage. What has no row changes nothing, as `REFUSALS` says.
STEPS: Mapping[tuple[v.Stage, Word], v.Stage] = {
    **{(stage, word): target for stage in RESTING for word, target in DECISIONS.items()},
    **{(stage, "fall_back"): "failed" for stage in RESTING},
    **{(stage, word): stage for stage in RESTING for word in ("restart", "stop")},
    **{(stage, "roll_back"): "failed" for stage in ON_TRIAL},
    **{(stage, "again"): "checking" for stage in ("unread", "window", "postponed")},
    **{(stage, "passed"): "window" for stage in ("window", "preparing", "golden", "shadow")},
    **{(stage, "rejected"): "failed" for stage in REJECTING},
    **{(stage, "accept"): stage for stage in ON_TRIAL},
    ("idle", "resume"): "resuming",
    ("downloading", "complete"): "unpacking",
    ("downloading", "no_fetch"): "failed",
    **{(stage, "fetch_failed"): "failed" for stage in ("downloading", "unpacking")},
    ("unpacking", "unpacked"): "window",
    **{(stage, "whole"): "window" for stage in ("checking", "unread")},
    ("checking", "damaged"): "downloading",
    ("checking", "unread"): "unread",
    ("window", "next"): "preparing",
    ("preparing", "next"): "golden",
    ("golden", "next"): "shadow_attempt",
    ("shadow_attempt", "next"): "trial_attempt",
    ("shadow_attempt", "recorded"): "shadow",
    ("trial_attempt", "recorded"): "trial",
    **{(stage, "not_recorded"): "failed" for stage in ("shadow_attempt", "trial_attempt")},
    ("trial", "recorded"): "live",
    ("trial", "not_recorded"): "trial",
    ("trial", "not_started"): "unstarted",
    **{(stage, "postpone"): "postponed" for stage in ("trial", "unstarted")},
    ("unstarted", "restart_due"): "trial",
    ("resuming", "next"): "trial",
}
_BUSY = "a release is on trial: wait until that has ended"
_NONE = "no release is on trial, so none can be committed"
REFUSALS: Mapping[Word, str] = {
    **dict.fromkeys(get_args(Word), "nobody waits for it any more"),
    **dict.fromkeys(DECISIONS, _BUSY),
    **dict.fromkeys(("restart", "stop", "fall_back", "resume"), _BUSY),
    **dict.fromkeys(("accept", "roll_back", "postpone"), _NONE),
}


def step(
    setup: v.Setup, state: v.State, event: v.Event, at: v.Moment
) -> tuple[v.State, tuple[v.Effect, ...]]:
    """Return the state after an event, and what is to be done, in its order."""
    one = _Step(setup, state, at)
    if isinstance(event, v.Notice):
        NOTICES[event.word](one, event.text)
    else:
        HANDLERS[type(event)](one, event)
    return one.state, tuple(one.effects)


class _Step:
    """A state that is being changed, and the effects so far."""

    def __init__(self, setup: v.Setup, state: v.State, at: v.Moment) -> None:
        self.setup = setup
        self.state = state
        self.at = at
        self.effects: list[v.Effect] = []

    @property
    def slots(self) -> SlotState:
        return self.state.slots

    @property
    def desired(self) -> Desired:
        assert self.state.desired is not None
        return self.state.desired

    def record(self, slot: Slot | None) -> SlotRecord:
        record = self.slots.record(slot)
        assert record is not None
        return record

    def sha256_in(self, slot: Slot | None) -> str | None:
        record = self.slots.record(slot)
        return None if record is None else record.sha256

    def go(self, word: Word) -> bool:
        """Take a step; False if the word means nothing in this stage."""
        stage = STEPS.get((self.state.stage, word))
        if stage is not None:
            self.state = replace(self.state, stage=stage)
        return stage is not None

    def enter(self, word: Word) -> None:
        """Take a step to a gate, and see whether the release has passed it."""
        if self.go(word):
            GATES[self.state.stage](self)

    def ask(self, word: Word) -> bool:
        """Take a step that somebody asks for, who is told if it cannot be."""
        if not self.go(word):
            self.do("answer", REFUSALS[word])
            return False
        return True

    def do(self, word: v.DoWord, text: str = "", slot: Slot | None = None) -> None:
        self.effects.append(v.Do(word, text, slot))

    def keep(self, state: SlotState) -> None:
        """Change the slots; the disk gets that when it has room."""
        self.state = replace(self.state, slots=state)
        self.effects.append(v.Save(state))

    def tell(self, phase: Phase, reason: str = "") -> None:
        """Report on the desired release, all of which is here."""
        update = update_of(self.desired, phase, self.desired.release.blob.bytes, reason)
        self.state = replace(self.state, update=update)

    def tell_record(self, record: SlotRecord, phase: Phase, reason: str = "") -> None:
        """Report on a release in a slot."""
        self.state = replace(self.state, update=update_of_record(record, phase, reason))

    def alter(self, *, request: str | None = None, reason: str | None = None) -> None:
        update = self.state.update
        request = update.request if request is None else request
        reason = update.reason if reason is None else reason
        self.state = replace(self.state, update=altered(update, request=request, reason=reason))

    # -- the start and the end

    def on_boot(self, _text: str) -> None:
        """Start the active slot, or resume the trial that was interrupted."""
        self.state = v.State(slots=self.slots)
        if self.slots.trial is not None and self.go("resume"):
            self.do("prepare", slot=self.slots.trial)
            return
        self.run_active()
        self.prepare_active()
        self.state = replace(self.state, update=update_of_slots(self.slots))

    def on_shut_down(self, _text: str) -> None:
        """An attempt that is running does not count."""
        if self.state.on_trial:
            self.keep(slots.suspend(self.slots))
        self.do("stop", "the agent was stopped")
        self.do("pause_fetch")
        self.stop_shadow()

    # -- the desired state

    def on_desired(self, event: v.DesiredSet) -> None:
        self.state = replace(
            self.state, desired=event.desired, verdict=event.verdict, sideloaded=event.sideloaded
        )
        self.reconcile()

    def reconcile(self, _text: str = "") -> None:
        """Act on the difference between the desired state and the slots; a trial ends first."""
        desired = self.state.desired
        if desired is None or desired.request != self.state.shadow or not self.is_idle:
            self.stop_shadow()
        if self.slots.trial is not None and not self.yields():
            return
        if desired is not None:
            self.do("compare")
            return
        self.go("clear")
        self.do("pause_fetch")
        self.state = replace(self.state, update=update_of_slots(self.slots))

    def on_compared(self, event: v.Compared) -> None:
        setup = self.setup
        if self.slots.trial is not None:
            return
        decision = decide(
            self.desired, self.slots, profile=setup.profile, verdict=self.state.verdict,
            board=event.board, min_version=setup.update.min_version,
        )  # fmt: skip
        self.go(decision.word)
        if decision.word == "fetch":
            self.do("fetch")
            return
        self.do("pause_fetch")
        if decision.word == "try":
            self.do("verify")
        elif decision.word == "refused":
            self.refuse(decision.reason)
        elif decision.word == "verifying":
            update = update_of(self.desired, "verifying", reason=decision.reason)
            self.state = replace(self.state, update=update)
        else:
            self.tell(decision.word, decision.reason)

    def refuse(self, reason: str, *, final: bool = False) -> None:
        """Report that the release is refused. `final`: for this request, whatever happens."""
        desired, update = self.desired, update_of(self.desired, "refused", reason=reason)
        if update != self.state.update:
            self.do("error", f"refused {desired.release.name}: {reason}")
        if final:
            failure = slots.SlotFailure(
                sha256=update.sha256, request=update.request, phase="refused",
                reason=reason[:MAX_REASON], at=self.at.utc,
            )  # fmt: skip
            self.keep(slots.refuse(self.slots, failure))
        self.state = replace(self.state, update=update)

    def yields(self) -> bool:
        """Whether a trial that waits for its source, without an end, gives way to another release.

        One that is asked for again goes on for the new request. One that somebody has to commit is
        committed if the same release is asked for without that, and ends for another one.
        """
        desired, record = self.state.trusted, self.record(self.slots.trial)
        if desired is None:
            return False
        manual = record.policy.manual and desired.request != record.request
        if not manual and self.state.update.phase != "postponed":
            return False
        if record.sha256 == desired.release.blob.sha256:
            self.keep(slots.ask_again(self.slots, desired.request))
            self.alter(request=desired.request)
            if manual and not desired.policy.manual:
                self.on_accept()
            return False
        if manual:
            self.end_with_active("another release took its place before it was committed")
        else:
            self.do("stop", "another release is tried")
            self.postpone(self.state.update.reason)
            if self.slots.active is not None:
                self.run_active()
        return True

    def on_cancel(self, request: str) -> None:
        """End the update of this request, unless it is live; a download can be resumed."""
        desired = self.state.desired
        if desired is None or desired.request != request or self.state.update.phase == "live":
            return
        self.state = replace(self.state, desired=None)
        release = self.sha256_in(self.slots.trial)  # another may wait for the end of a trial
        if self.state.on_trial and release == desired.release.blob.sha256:
            self.roll_back("it was cancelled during its trial")
        else:
            self.reconcile()

    # -- the download

    def on_fetched(self, event: v.Fetched) -> None:
        if self.state.stage == "downloading":
            update = update_of(self.desired, "downloading", event.received_bytes, event.complaint)
            self.state = replace(self.state, update=update)

    def on_no_fetch(self, reason: str) -> None:
        """It could not begin, and may another time."""
        if self.go("no_fetch"):
            self.refuse(reason)

    def on_fetch_failed(self, reason: str) -> None:
        """Another download would end the same way."""
        if self.go("fetch_failed"):
            self.refuse(reason, final=True)

    def on_complete(self, _text: str) -> None:
        """Say so before it is unpacked, which may take long."""
        if self.go("complete"):
            self.tell("staging")
            self.do("report")
            self.do("unpack")

    # -- before the trial

    def on_unread(self, problem: str) -> None:
        if self.go("unread"):
            self.do("error", problem)
            self.tell("postponed", f"it waits for the disk: {problem}")

    def on_damaged(self, problem: str) -> None:
        """The release in the idle slot is not the one that was unpacked."""
        if self.go("damaged"):
            self.do("warning", f"{problem}; it is fetched again")
            self.keep(slots.clear(self.slots))
            self.do("fetch")

    def window(self) -> None:
        reason = waits_for_window(self.desired.policy, self.at.hour, self.at.minute)
        if reason is None:
            self.enter("next")
            return
        if self.state.update.phase != "postponed":
            release = self.desired.release
            self.do("info", f"{release.name} {release.version}: {reason}")
        self.tell("postponed", reason)

    def prepare(self) -> None:
        """Finish the segments, once those of what runs are."""
        sha256, preparing = self.desired.release.blob.sha256, self.state.preparing
        if self.state.prepared == sha256:
            self.enter("next")
            return
        if preparing not in (sha256, self.sha256_in(self.slots.active)):
            self.state = replace(self.state, preparing=sha256)
            self.do("prepare", slot=self.slots.idle)
        update = self.state.update
        if update.phase != "staging" or update.request != self.desired.request:
            self.tell("staging")

    def golden(self) -> None:
        """Run the golden inputs, unless they run or have run to their end."""
        sha256, state = self.desired.release.blob.sha256, self.state
        is_asked_for = self.desired.policy.min_golden_agreement is not None
        has_run = state.golden_of == sha256 and not state.golden_runs
        is_answered = state.golden_agreement is not None or state.golden_skipped
        if has_run and (is_answered or not is_asked_for):
            self.enter("next")
            return
        self.tell("staging", "the golden inputs of the bundle run")
        if state.golden_of != sha256 or has_run:
            self.state = replace(
                self.state, golden_of=sha256, golden_runs=True, golden_agreement=None,
                golden_skipped=False,
            )  # fmt: skip
            self.do("golden", slot=self.slots.idle)

    def shadow_attempt(self) -> None:
        """Compare the release with the live one. The attempt is written to the disk first, so that
        one that takes the board down is not run for ever."""
        policy, request = self.desired.policy, self.desired.request
        record, active = self.record(self.slots.idle), self.slots.active
        compared = record.shadow_request == request and record.shadow_agreement is not None
        if not policy.shadow_s:
            self.enter("next")
        elif active is None and policy.min_shadow_agreement is not None:
            self.reject(NO_RELEASE)
        elif active is None or compared:
            self.stop_shadow()
            self.enter("next")
        elif self.state.shadow == request and self.go("recorded"):
            self.tell("staging", "it runs beside the live release")
        else:
            self.effects.append(v.Save(slots.begin_shadow(self.slots, request), first=True))

    def begin_shadow(self) -> None:
        idle, desired = self.slots.idle, self.desired
        if self.record(idle).shadow_attempts > MAX_ATTEMPTS:
            self.reject(DIED)
            return
        self.state = replace(self.state, shadow=desired.request)
        self.tell("staging", "it starts beside the live release")
        self.do("info", f"{desired.release.name} {desired.release.version} runs in shadow")
        self.do("shadow", slot=idle)

    def stop_shadow(self) -> None:
        """End a comparison in good order: its attempt does not count."""
        request, record = self.state.shadow, self.slots.record(self.slots.idle)
        if not request:
            return
        self.do("stop_shadow")
        counted = record is not None and record.shadow_request == request
        if counted and self.slots.trial is None:
            self.keep(slots.suspend_shadow(self.slots))
        self.state = replace(self.state, shadow="")

    def trial_attempt(self) -> None:
        """Count the attempt before the start: an agent that dies from here on has made one."""
        verdict = self.state.verdict
        floor = verdict.custom.get(FLOOR) if isinstance(verdict, Trusted) else None
        trial = slots.begin_trial(
            self.slots, self.desired.request, self.desired.policy,
            floor=floor if isinstance(floor, str) else "", online=self.at.environment.online,
            sideloaded=self.state.sideloaded, golden_agreement=self.state.golden_agreement,
        )  # fmt: skip
        self.effects.append(v.Save(trial, first=True, reserve=True))

    @property
    def is_idle(self) -> bool:
        """Whether the desired release is in the idle slot, and not on trial: the live one may have
        crashed in a loop, and the board gone back to it."""
        sha256 = self.sha256_in(self.slots.idle)
        return self.slots.trial is None and self.desired.release.blob.sha256 == sha256

    def reject(self, reason: str, *, passing: bool = False) -> None:
        if self.go("rejected"):
            self.refuse(reason, final=not passing)

    def on_shadowing(self, text: str) -> None:
        if self.state.stage == "shadow":
            self.tell("staging", text)

    def on_preparing(self, text: str) -> None:
        """Note the progress of a build; the active slot runs while a resumed trial waits for it."""
        if self.state.stage == "resuming" and self.at.stopped and self.slots.active is not None:
            self.run_active()
        if self.state.update.phase == "staging":
            self.alter(reason=text)

    def on_prepared(self, event: v.Checked) -> None:
        """Try a release that was prepared, or refuse it; run what runs with its new segments."""
        sha256, desired = self.state.preparing, self.state.trusted
        self.state = replace(self.state, preparing="")
        if self.state.stage == "resuming":
            if self.state.update.phase == "staging":  # its attempt did not count meanwhile
                self.keep(slots.resume(self.slots))
            if event.problem is None:
                self.start("next")
            else:
                self.roll_back(event.problem)
        elif self.slots.trial is None and self.sha256_in(self.slots.active) == sha256:
            if event.built:
                self.do("info", "the pipeline starts again, with the prepared segments")
                self.run_active()
            if self.state.stage == "preparing":  # a release has waited
                self.reconcile()
        elif desired is not None and desired.release.blob.sha256 == sha256:
            if event.problem is None:
                self.state = replace(self.state, prepared=sha256)
                self.enter("passed")
            else:
                self.reject(event.problem)

    def on_golden(self, event: v.Checked) -> None:
        desired, sha256 = self.state.trusted, self.state.golden_of
        self.state = replace(self.state, golden_of="", golden_runs=False)
        if desired is None or desired.release.blob.sha256 != sha256:
            return  # they run again once somebody may want the result
        if event.problem is None:
            self.state = replace(
                self.state, golden_of=sha256, golden_agreement=event.agreement,
                golden_skipped=event.skipped,
            )  # fmt: skip
            self.enter("passed")
        else:
            self.reject(event.problem, passing=event.passing)

    def on_shadow(self, event: v.Checked) -> None:
        desired, request = self.state.desired, self.state.shadow
        self.state = replace(self.state, shadow="")
        if desired is None or desired.request != request or not self.is_idle:
            return
        if event.problem is None:
            agreement = event.agreement or 0.0
            self.do("info", f"on {event.frames} live frames {agreement:.2%} agree")
            self.keep(slots.end_shadow(self.slots, agreement, event.frames))
            self.enter("passed")
            return
        if event.passing:
            self.keep(slots.suspend_shadow(self.slots))
        self.reject(event.problem, passing=event.passing)

    def on_preparation_runs(self, _text: str) -> None:
        """The attempt of a trial that is resumed does not count meanwhile."""
        if self.state.stage == "resuming":
            self.keep(slots.suspend(self.slots))
            self.tell_record(self.record(self.slots.trial), "staging")

    # -- the trial

    def on_recorded(self, _text: str) -> None:
        """The disk has what had to be there first."""
        if self.state.stage == "trial_attempt":
            self.start("recorded")
        elif self.go("recorded") and self.state.stage == "shadow":
            self.begin_shadow()
        elif self.state.stage == "live":
            self.end_trial()
            record = self.record(self.slots.active)
            self.do("info", f"{record.name} {record.version} is live")
            self.tell_record(record, "live")
            self.reconcile()

    def on_not_recorded(self, problem: str) -> None:
        """An attempt that cannot be counted is not made; a commit is tried again."""
        if not self.go("not_recorded"):
            return
        if self.state.stage == "failed":
            self.refuse(problem)
            return
        reason = f"it works, and is live once the disk has recorded it: {problem}"
        if not self.state.commit_at_s:
            self.do("error", reason)
        again_s = self.at.now_s + RETRY_S
        self.state = replace(self.state, commit_at_s=again_s, judge_at_s=again_s)
        self.alter(reason=reason)

    def start(self, word: Word, effect: v.DoWord = "trial") -> None:
        """Run the release on trial, whose attempt is counted on the disk."""
        if not self.go(word):
            return
        record, now_s = self.record(self.slots.trial), self.at.now_s
        self.do("info", f"trying {record.name} {record.version} in slot {self.slots.trial}")
        self.tell_record(record, "trial")
        trial = Trial(frame_s=now_s, was_online=record.began_online, sideloaded=record.sideloaded)
        self.state = replace(self.state, trial=trial, looked_s=now_s, endless=False)
        self.do(effect, slot=self.slots.trial)

    def on_not_started(self, problem: str) -> None:
        """Let a trial wait that the system cannot start: neither would it start the active slot.
        Until it is started again the attempt does not count."""
        if self.go("not_started"):
            self.state = replace(self.state, trial=None)
            self.wait_on("error", f"{problem}; the trial is not to blame and is tried again")

    def wait_on(self, level: v.DoWord, reason: str) -> None:
        """Let the trial wait, which has not harmed the agent."""
        record = self.record(self.slots.trial)
        self.do(level, f"{record.name} {record.version} waits: {reason}")
        self.keep(slots.suspend(self.slots))
        self.tell_record(record, "postponed", reason)

    def on_restart_due(self, _text: str) -> None:
        """Start again what died, or what the system could not start."""
        if self.state.stage == "unstarted":
            self.keep(slots.resume(self.slots))
            self.start("restart_due", "trial_again")
        elif not self.state.on_trial:
            self.do("active_again")

    def on_observed(self, event: v.Observed) -> None:
        """Judge a trial; go on with what waits for the disk, its window or its source."""
        at, health, waiting = self.at, event.health, self.slots.postponed
        if at.unread and at.now_s >= self.state.read_again_s:
            self.state = replace(self.state, read_again_s=at.now_s + READ_AGAIN_S)
            if self.slots.active not in at.unread:
                self.go("again")
                self.do("verify")
            elif self.slots.trial is None:  # what runs may change with it
                self.do("check_active")
                return
        if self.state.trial is not None:
            self.judge(self.state.trial, health)
        elif self.state.stage == "window":
            if waits_for_window(self.desired.policy, at.hour, at.minute) is None:
                self.reconcile()
        elif self.state.stage == "postponed" and waiting and self.slots.idle not in at.unread:
            # One that does not work will never tell whether the source does.
            ready = health.working or health.state in ("failed", "stalled")
            if ready and (at.environment.online or not waiting.broker) and self.go("again"):
                self.state = replace(self.state, source_worked=health.working)
                self.do("verify")

    def judge(self, trial: Trial, health: PipelineHealth) -> None:
        now_s, late_s = self.at.now_s, self.at.now_s - self.state.looked_s
        trial = trial.held_up(late_s) if late_s > MAX_LATE_S else trial
        trial = trial.observed(health, now_s, self.at.environment)
        self.state = replace(self.state, trial=trial, looked_s=now_s)
        policy = self.record(self.slots.trial).policy
        verdict = judge(trial, trial_limits(self.setup.update, policy), now_s)
        if verdict.word == "wait":
            self.wait(verdict)
        elif verdict.word == "roll_back":
            self.roll_back(verdict.reason)
        elif verdict.word == "postpone":
            self.on_away(verdict)
        elif now_s >= self.state.commit_at_s:
            self.effects.append(v.Save(slots.confirm(self.slots, self.at.utc), first=True))

    def wait(self, verdict: Verdict) -> None:
        """Go on, and say what the trial of a release that works waits for."""
        self.state = replace(self.state, judge_at_s=verdict.until_s)
        if verdict.endless and not self.state.endless:  # it has not harmed the agent
            self.state = replace(self.state, endless=True)
            self.keep(slots.suspend(self.slots))
        update = self.state.update
        if update.phase == "postponed" or update.reason != verdict.reason:  # the source is back
            update = update_of_record(self.record(self.slots.trial), "trial", verdict.reason)
            update = altered(update, waits_for_commit=verdict.commit)
            self.state = replace(self.state, update=update)

    def on_away(self, verdict: Verdict) -> None:
        """Go back to the release before until a source works; without one, wait here."""
        record, earlier = self.record(self.slots.trial), self.slots.postponed
        again = earlier is not None and earlier.count + 1 >= slots.MAX_POSTPONED
        if self.slots.active is None:
            if self.state.update.phase != "postponed":
                self.wait_on("warning", verdict.reason)
            until_s = self.at.now_s + self.setup.update.trial_timeout_s
            self.state = replace(self.state, judge_at_s=until_s)
        elif again and verdict.broker:
            self.roll_back(f"{verdict.reason}; it is with the release before")
        elif again and self.state.source_worked:
            self.roll_back(f"{verdict.reason}, while that of the release before gave some")
        else:
            self.do("warning", f"{record.name} {record.version} is postponed: {verdict.reason}")
            self.do("stop", "the trial is postponed")
            self.postpone(verdict.reason, broker=verdict.broker)
            self.run_active()
            self.go_on_with_active()

    def postpone(self, reason: str, *, broker: bool = False) -> None:
        self.go("postpone")
        self.end_trial()
        self.keep(slots.postpone(self.slots, reason, broker=broker))

    def roll_back(self, reason: str) -> None:
        self.end_with_active(reason)
        self.go_on_with_active()

    def end_with_active(self, reason: str) -> None:
        record = self.record(self.slots.trial)
        self.go("roll_back")
        self.end_trial()
        self.do("stop", "the trial failed")
        self.keep(slots.roll_back(self.slots, reason, self.at.utc))
        self.run_before(record, reason)

    def run_before(self, record: SlotRecord, reason: str) -> None:
        """Say that a release is rolled back, and run the one before."""
        self.do("error", f"{record.name} {record.version} is rolled back: {reason}")
        self.tell_record(record, "rolled_back", reason[:MAX_REASON])
        self.run_active()

    def end_trial(self) -> None:
        self.state = replace(self.state, trial=None, judge_at_s=None, commit_at_s=0.0, crashes=None)

    def on_accept(self, _text: str = "") -> None:
        """Commit the release on trial as soon as it works; nobody is waited for any more, though a
        disk without room may hold it up."""
        if self.ask("accept") and self.record(self.slots.trial).policy.manual:
            self.keep(slots.accept(self.slots))
            update = altered(self.state.update, waits_for_commit=False)
            self.state = replace(self.state, update=update, judge_at_s=self.at.now_s)

    # -- what runs

    def run_active(self) -> None:
        self.state = replace(self.state, crashes=None)
        self.do("active")

    def go_on_with_active(self) -> None:
        self.prepare_active()
        self.reconcile()

    def prepare_active(self) -> None:
        """Finish what runs, which may be of before a JetPack update; it runs meanwhile."""
        sha256 = self.sha256_in(self.slots.active)
        if sha256 is not None:
            self.state = replace(self.state, preparing=sha256)
            self.do("prepare", slot=self.slots.active)

    def on_failure(self, reason: str) -> None:
        if self.state.on_trial:
            self.roll_back(reason)

    def on_exited(self, reason: str) -> None:
        if self.state.on_trial:
            self.roll_back(reason)
        else:
            self.do("error", reason)

    def on_crashed(self, reason: str) -> None:
        was_on_trial, update = self.state.on_trial, self.setup.update
        self.on_exited(reason)
        if was_on_trial:
            return
        crashes = self.state.crashes or Crashes(update.max_crashes, update.crash_window_s)
        crashes = crashes.crashed(self.at.now_s)
        self.state = replace(self.state, crashes=crashes)
        if crashes.loop:
            self.ask_to_fall_back(
                f"it crashed {update.max_crashes} times within {update.crash_window_s:g} s "
                f"(max_crashes), the last time: {reason}"
            )

    def on_go_back(self, reason: str) -> None:
        """End a trial, or go back to the release in the other slot."""
        if self.slots.trial is None:
            self.ask_to_fall_back(reason)
        else:
            self.roll_back(reason)

    def ask_to_fall_back(self, reason: str) -> None:
        """Go to the release in the other slot, if it was live and is whole."""
        state = self.slots
        earlier = state.record(state.idle)
        if state.trial is not None:
            self.do("answer", REFUSALS["fall_back"])
        elif state.active is None or earlier is None or not earlier.good:
            self.do("answer", "there is no release to go back to: the other slot has none that was "
                    "live")  # fmt: skip
        elif too_old := below_floor(earlier.name, earlier.version, state.floors):
            self.do("answer", too_old)
        else:
            self.do("fall_back", reason)

    def on_fall_back(self, reason: str) -> None:
        record, desired = self.record(self.slots.active), self.state.desired
        if self.go("fall_back"):
            if desired is not None and desired.release.blob.sha256 == record.sha256:
                record = altered(record, request=desired.request)
            at, request = self.at.utc, record.request
            self.keep(slots.give_up_active(self.slots, reason, at, request=request))
            self.run_before(record, reason)
            self.go_on_with_active()

    def on_restart(self, _text: str) -> None:
        if self.ask("restart"):
            if self.slots.active is None:
                self.do("answer", "there is no release to run")
            else:
                self.run_active()

    def on_stop(self, reason: str) -> None:
        if self.ask("stop"):
            self.do("stop", reason)


GATES: Mapping[v.Stage, Callable[[_Step], None]] = {
    "window": _Step.window, "preparing": _Step.prepare, "golden": _Step.golden,
    "shadow_attempt": _Step.shadow_attempt, "trial_attempt": _Step.trial_attempt,
}  # fmt: skip
CHECKS: Mapping[str, Callable[[_Step, v.Checked], None]] = {
    "preparation": _Step.on_prepared, "golden": _Step.on_golden, "shadow": _Step.on_shadow,
}  # fmt: skip
NOTICES: Mapping[str, Callable[[_Step, str], None]] = {
    "boot": _Step.on_boot, "shut_down": _Step.on_shut_down, "cancel": _Step.on_cancel,
    "accept": _Step.on_accept, "restart": _Step.on_restart, "stop": _Step.on_stop,
    "go_back": _Step.on_go_back, "fall_back": _Step.on_fall_back,
    "failure": _Step.on_failure, "exited": _Step.on_exited, "crashed": _Step.on_crashed,
    "restart_due": _Step.on_restart_due, "active_changed": _Step.reconcile,
    "recorded": _Step.on_recorded, "not_recorded": _Step.on_not_recorded,
    "not_started": _Step.on_not_started, "no_fetch": _Step.on_no_fetch,
    "fetch_failed": _Step.on_fetch_failed, "complete": _Step.on_complete,
    "unpacked": lambda step, _text: step.enter("unpacked"),
    "whole": lambda step, _text: step.enter("whole"),
    "damaged": _Step.on_damaged, "unread": _Step.on_unread, "preparing": _Step.on_preparing,
    "preparation_runs": _Step.on_preparation_runs,
    "shadowing": _Step.on_shadowing,
}  # fmt: skip
HANDLERS: Mapping[type[v.Event], Callable[[_Step, Any], None]] = {
    v.DesiredSet: _Step.on_desired, v.Compared: _Step.on_compared, v.Observed: _Step.on_observed,
    v.Fetched: _Step.on_fetched, v.Checked: lambda step, event: CHECKS[event.check](step, event),
}  # fmt: skip
