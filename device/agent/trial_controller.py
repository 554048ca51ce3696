"""What runs: the active release, or one on trial, which is committed or rolled back.

The decisions are pure functions of `device.update.trial` and `device.update.slots`. A transition
that an interrupted trial must find again is written to the disk before it happens; a rollback is in
force even on a full disk, which gets it as soon as it has room.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from device.agent.pipeline_runner import PipelineRunner
from device.agent.slot_state_cache import RETRY_S, SlotStateCache, utc_now
from device.agent.update_status import UpdateStatus
from device.errors import BundleError, StateError
from device.protocol.messages import ChildMessage, Failure
from device.update import slots
from device.update.admission import below_floor
from device.update.boot import with_whole_active
from device.update.decisions import update_of_record
from device.update.liveness import MAX_LATE_S
from device.update.slot_store import SlotStore
from device.update.slots import MAX_POSTPONED, Slot
from device.update.trial import (
    Confirm,
    Crashes,
    Environment,
    Postpone,
    RollBack,
    Trial,
    Wait,
    judge,
    trial_limits,
)
from device.update.update_table import UpdateTable

LOG = logging.getLogger("tandem.agent")


class TrialController:
    """The pipeline of the slot that runs. `on_end`: a trial has ended; is the one before back?

    `waits_for_preparation`: a trial that was interrupted does, and the active release runs.
    `source_worked`: the release before had frames when a postponed one was tried.
    """

    def __init__(
        self,
        config: UpdateTable,
        *,
        store: SlotStore,
        kept: SlotStateCache,
        pipeline: PipelineRunner,
        order: UpdateStatus,
        on_end: Callable[[bool], None],
        around: Callable[[float], Environment],
    ) -> None:
        """`around`: tells what is beside the pipeline, at a time."""
        self.waits_for_preparation = False
        self.source_worked = False
        self._config = config
        self._around = around
        self._limits = trial_limits(config)
        self._store = store
        self._kept = kept
        self._pipeline = pipeline
        self._order = order
        self._on_end = on_end
        self._trial: Trial | None = None
        self._looked_s = 0.0  # when the trial was last looked at
        self._judge_at_s: float | None = None
        self._commit_at_s = 0.0  # when a commit that found no room is tried again
        self._waits_endlessly = False
        self._crashes = self._no_crashes()

    @property
    def due_s(self) -> tuple[float | None, ...]:
        """When `advance` or `restart` has something to do without an event."""
        return self._judge_at_s, self._pipeline.restart_at_s

    @property
    def on_trial(self) -> bool:
        """Whether the pipeline that runs is that of a trial."""
        return self._kept.state.trial is not None and not self.waits_for_preparation

    # -- trial

    def start_trial(self, slot: Slot, *, fresh: bool = True) -> None:
        """Run the release in a slot, whose attempt is counted on the disk."""
        record = self._kept.record(slot)
        LOG.info("trying %s %s in slot %s", record.name, record.version, slot)
        if not self._pipeline.start(self._store.slot_folder(slot), fresh=fresh):
            self._await_room(slot)
            return
        self._order.update = update_of_record(record, "trial")
        self._looked_s = time.monotonic()
        self._limits = trial_limits(self._config, record.policy)
        self._trial = Trial(
            frame_s=self._looked_s, was_online=record.began_online, sideloaded=record.sideloaded
        )
        self._waits_endlessly = False

    def _await_room(self, slot: Slot) -> None:
        """Let a trial wait that the system cannot start: neither would it start the active slot.

        `advance` starts it again; until then the attempt does not count.
        """
        record = self._kept.record(slot)
        reason = f"{self._pipeline.report.reason}; the trial is not to blame and is tried again"
        LOG.error("%s %s waits: %s", record.name, record.version, reason)
        self._kept.note(slots.suspend(self._kept.state))
        self._order.update = update_of_record(record, "postponed", reason)

    def advance(self, now_s: float) -> None:
        """Look at the pipeline on trial; end the trial if that is due. Start again what died."""
        self._advance_trial(now_s)
        restart_at_s = self._pipeline.restart_at_s
        if restart_at_s is not None and now_s >= restart_at_s:
            self._restart()

    def _advance_trial(self, now_s: float) -> None:
        if self._trial is None:
            return
        if now_s - self._looked_s > MAX_LATE_S:
            self._trial = self._trial.held_up(now_s - self._looked_s)
        self._looked_s = now_s
        self._trial = self._trial.observed(self._pipeline.health(), now_s, self._around(now_s))
        verdict = judge(self._trial, self._limits, now_s)
        if isinstance(verdict, Wait):
            self._wait(verdict)
        elif isinstance(verdict, Confirm):
            self.commit(now_s)
        elif isinstance(verdict, RollBack):
            self.roll_back(verdict.reason)
        else:
            self._postpone(verdict, now_s)

    def _wait(self, verdict: Wait) -> None:
        """Go on, and say what the trial of a release that works waits for."""
        self._judge_at_s = verdict.until_s
        if verdict.endless and not self._waits_endlessly:
            self._waits_endlessly = True  # it has not harmed the agent
            self._kept.note(slots.suspend(self._kept.state))
        update = self._order.update
        if update.phase == "postponed" or update.reason != verdict.reason:  # the source is back
            record = self._kept.record(self._kept.state.trial)
            update = update_of_record(record, "trial", verdict.reason)
            self._order.update = msgspec.structs.replace(update, waits_for_commit=verdict.commit)

    def accept(self) -> str:
        """Commit the release on trial as soon as it works; return why it cannot."""
        state = self._kept.state
        if state.trial is None:
            return "no release is on trial, so none can be committed"
        if self._kept.record(state.trial).policy.manual:
            self._kept.note(slots.accept(state))
            self._limits = replace(self._limits, manual=False)
            # A disk without room may hold the commit up, but nobody is waited for any more.
            self._order.update = msgspec.structs.replace(self._order.update, waits_for_commit=False)
            self._judge_at_s = time.monotonic()
        return ""

    def commit(self, now_s: float) -> None:
        """Make the release live once the disk has it; a full disk is tried again."""
        if now_s < self._commit_at_s:
            return
        try:
            self._kept.save(slots.confirm(self._kept.state, utc_now()))
        except StateError as error:
            reason = f"it works, and is live once the disk has recorded it: {error}"
            if not self._commit_at_s:
                LOG.error("%s", reason)
            self._order.update = msgspec.structs.replace(self._order.update, reason=reason)
            self._commit_at_s = self._judge_at_s = now_s + RETRY_S
            return
        self.end_trial()
        record = self._kept.record(self._kept.state.active)
        LOG.info("%s %s is live", record.name, record.version)
        self._order.update = update_of_record(record, "live")
        self._on_end(False)

    def end_trial(self) -> None:
        """Judge no more."""
        self._trial = self._judge_at_s = None
        self._commit_at_s = 0.0
        self._crashes = self._no_crashes()

    def roll_back(self, reason: str) -> None:
        """End the trial with the release before, and go on."""
        self.end_with_active(reason)
        self._on_end(True)

    def end_with_active(self, reason: str) -> None:
        """End the trial with the release before."""
        self.end_trial()
        record = self._kept.record(self._kept.state.trial)
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        self._pipeline.stop("the trial failed")
        self._kept.roll_back(reason)
        self._order.update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self.start_active()

    def _postpone(self, verdict: Postpone, now_s: float) -> None:
        """Go back to the release before until a source works; without one, wait here."""
        state = self._kept.state
        record, earlier = self._kept.record(state.trial), state.postponed
        if state.active is None:
            if self._order.update.phase != "postponed":
                LOG.warning("%s %s waits: %s", record.name, record.version, verdict.reason)
                self._kept.note(slots.suspend(state))  # it has not harmed the agent
                self._order.update = update_of_record(record, "postponed", verdict.reason)
            self._judge_at_s = now_s + self._limits.timeout_s
            return
        again = earlier is not None and earlier.count + 1 >= MAX_POSTPONED
        if again and verdict.broker:
            self.roll_back(f"{verdict.reason}; it is with the release before")
            return
        if again and self.source_worked:
            self.roll_back(f"{verdict.reason}, while that of the release before gave some")
            return
        self.end_trial()
        LOG.warning("%s %s is postponed: %s", record.name, record.version, verdict.reason)
        self._pipeline.stop("the trial is postponed")
        self._kept.note(slots.postpone(state, verdict.reason, broker=verdict.broker))
        self.start_active()
        self._on_end(True)

    # -- the pipeline

    def on_message(self, message: ChildMessage) -> None:
        """Roll a trial back at a failure."""
        if self.on_trial and isinstance(message, Failure):
            self.roll_back(message.message)

    def on_exit(self, reason: str, *, crashed: bool, now_s: float) -> None:
        """Roll a trial back, and a live release that crashes in a loop.

        Any other pipeline is restarted by `advance`.
        """
        if self.on_trial:
            self.roll_back(reason)
            return
        LOG.error("%s", reason)
        if crashed:
            self._crashes = self._crashes.crashed(now_s)
            if self._crashes.loop:
                self._give_up_active(reason)

    def _give_up_active(self, reason: str) -> None:
        """Go back to the release in the other slot from one that crashes in a loop."""
        name = self._kept.record(self._kept.state.active).name
        problem = self.fall_back(
            f"it crashed {self._config.max_crashes} times within {self._config.crash_window_s:g} s "
            f"(max_crashes), the last time: {reason}"
        )
        if problem:
            LOG.error("%s crashes in a loop and stays: %s", name, problem)

    def fall_back(self, reason: str) -> str:
        """Run the release in the other slot, if it was live and is whole; return why it cannot."""
        state = self._kept.state
        earlier = state.record(state.idle)
        if state.active is None or earlier is None or not earlier.good:
            return "there is no release to go back to: the other slot has none that was live"
        too_old = below_floor(earlier.name, earlier.version, state.floors)
        if too_old is not None:
            return too_old
        try:
            self._store.verify(state.idle)
        except BundleError as error:
            return str(error)
        record, desired = self._kept.record(state.active), self._order.desired
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        if desired is not None and desired.release.blob.sha256 == record.sha256:
            record = msgspec.structs.replace(record, request=desired.request)
        self._kept.give_up_active(reason, record.request)
        self._order.update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self.start_active()
        self._on_end(True)
        return ""

    def _restart(self) -> None:
        """Start again what died, or what the system could not start."""
        trial, active = self._kept.state.trial, self._kept.state.active
        if trial is not None and self.on_trial:
            self._kept.note(slots.resume(self._kept.state))
            self.start_trial(trial, fresh=False)
            return
        self.start_active(fresh=False)
        if self._kept.state.active != active:
            self._on_end(False)

    def start_active(self, *, fresh: bool = True) -> None:
        """Start the active slot; a damaged one is given up for the idle one, if that was good."""
        state = with_whole_active(self._store, self._kept.state)
        if state != self._kept.state:
            self._kept.note(state)
        if fresh:
            self._crashes = self._no_crashes()
        if state.active is None:
            self._pipeline.stop("there is no release to run")
        else:
            self._pipeline.start(self._store.slot_folder(state.active), fresh=fresh)

    def _no_crashes(self) -> Crashes:
        return Crashes(self._config.max_crashes, self._config.crash_window_s)
