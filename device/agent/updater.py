"""Brings the board to the desired release: download, unpack, trial, commit or rollback.

The decisions are pure functions of `device.update.decisions` and `device.update.slots`; this module
carries them out in the one thread of `device.agent.agent`, with `device.agent.downloads` and
`device.agent.trial_controller`.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable

import msgspec

from device.agent.config import AgentConfig
from device.agent.downloads import Downloads
from device.agent.golden_check import MISSING, GoldenCheck, GoldenEnded, golden_refusal
from device.agent.pipeline_runner import PipelineRunner
from device.agent.preparation import (
    Preparation,
    PreparationEnded,
    Preparing,
    Row,
    built_now,
    refusal,
)
from device.agent.shadow import ShadowRun
from device.agent.shadow_process import ShadowProcess
from device.agent.slot_state_cache import SlotStateCache
from device.agent.trial_controller import TrialController
from device.agent.update_status import UpdateStatus
from device.errors import BundleError, BundleReadError, StateError
from device.protocol.documents import Desired, DeviceFacts, Update
from device.trust.exchange import Trusted, Verdict
from device.update import slots
from device.update.admission import FLOOR, BoardState, waits_for_window
from device.update.boot import with_whole_active
from device.update.decisions import (
    Failed,
    FetchIt,
    Live,
    Refuse,
    TryIdle,
    Verify,
    Waits,
    decide,
    update_of,
    update_of_record,
    update_of_slots,
)
from device.update.slot_store import SlotStore
from device.update.slots import Slot, SlotRecord, SlotState
from device.update.sources.reader import SourceEvent
from device.update.trial import Environment

LOG = logging.getLogger("tandem.agent")
READ_AGAIN_S = 10.0  # between two tries to read a slot that the disk does not give


class Updater:
    """Decides which release runs. The agent passes it events and the time."""

    def __init__(
        self,
        config: AgentConfig,
        store: SlotStore,
        pipeline: PipelineRunner,
        report: Callable[[], None],
        preparation: Preparation | None = None,
        *,
        golden: GoldenCheck | None = None,
        shadow: ShadowProcess | None = None,
        put: Callable[[SourceEvent], None] = lambda _event: None,
        around: Callable[[float], Environment] = lambda _now_s: Environment(),
        facts: Callable[[], DeviceFacts] = DeviceFacts,
        local_time: Callable[[], time.struct_time] = time.localtime,
    ) -> None:
        """`report` publishes the reported state before something that takes long.

        `preparation` finishes the segments of a slot with TensorRT; None: nothing does. `golden`
        runs golden inputs before a trial, `shadow` a release beside the live one; None: nothing
        does. `around`: what is beside the pipeline; `facts`: what the board is; `local_time`: of
        the device.
        """
        self._config = config
        self._store = store
        self._kept = SlotStateCache(store)
        self._pipeline = pipeline
        self._report = report
        self._preparation = preparation
        self._preparing = self._prepared = ""  # SHA-256 of the release in the idle slot
        self._golden = golden
        self._golden_of = ""  # SHA-256 of the release whose golden inputs run, or have run
        self._golden_agreement: float | None = None  # None: they have not run to their end
        self._read_again_s = 0.0
        self._window_reason = ""  # what a trial waits for that only time brings
        self._around = around
        self._facts = facts
        self._local_time = local_time
        self._order = UpdateStatus()
        self.downloads = Downloads(config, store, self._kept, self._order, put)
        self.shadow = ShadowRun(
            config.update,
            store=store,
            kept=self._kept,
            order=self._order,
            process=shadow,
            begin=self._begin_trial,
        )
        self.runs = TrialController(
            config.update,
            store=store,
            kept=self._kept,
            pipeline=pipeline,
            order=self._order,
            on_end=self._on_trial_end,
            around=around,
        )

    @property
    def update(self) -> Update:
        """The report on the desired release."""
        return self._order.update

    @property
    def state(self) -> SlotState:
        """The state of the slots."""
        return self._kept.state

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences on the slots that an operator should know."""
        return self._kept.problems

    # -- boot and shutdown

    def boot(self) -> None:
        """Start the active slot, or resume the trial that was interrupted."""
        self._kept.boot()
        if self.state.trial is not None:
            if not self._prepare_trial(self.state.trial):
                self.runs.start_trial(self.state.trial)
            return
        self.runs.start_active()
        self._prepare_active()
        self._order.update = update_of_slots(self.state)

    def shut_down(self) -> None:
        """Stop the pipeline; an attempt that is running does not count."""
        if self.runs.on_trial:
            self._kept.note(slots.suspend(self.state))
        self._pipeline.stop("the agent was stopped")
        self.downloads.pause()
        if self._preparation is not None:
            self._preparation.stop()
        if self._golden is not None:
            self._golden.stop()
        self.shadow.stop()

    # -- time

    def due_s(self, *, online: bool) -> tuple[float | None, ...]:
        """Return when `advance` or a request has something to do without an event."""
        return *self.runs.due_s, self._kept.retry_at_s, self.downloads.wake_at_s(online=online)

    def advance(self, now_s: float) -> None:
        """Do what is due: judge a trial, restart the pipeline, try a complete download."""
        self.runs.advance(now_s)
        self._kept.retry(now_s)
        self._read_again(now_s)
        self._try_postponed(now_s)
        self._try_in_window()
        desired = self._order.desired
        if self.downloads.advance() and desired is not None:
            self._stage(desired)

    def _on_trial_end(self, back: bool) -> None:
        """Go on once a trial has ended; `back`: the release before runs again."""
        if back:
            self._prepare_active()
        self._reconcile()

    # -- desired state

    def on_desired(
        self, desired: Desired | None, verdict: Verdict, *, sideloaded: bool = False
    ) -> None:
        """Take the desired state, None: it was cleared, and what its signatures say.

        `sideloaded`: somebody brought the release to the board.
        """
        self._order.desired, self._order.verdict = desired, verdict
        self._order.sideloaded = sideloaded
        self._reconcile()

    def _reconcile(self) -> None:
        """Act on the difference between the desired state and the slots."""
        desired = self._order.desired
        self.shadow.keep_for(desired)
        if self.state.trial is not None and not self._gives_way(desired):
            return  # called again when the trial has ended
        if desired is None:
            self.downloads.pause()
            self._order.update = update_of_slots(self.state)
            return
        total_bytes = desired.release.blob.bytes
        decision = decide(
            desired,
            self.state,
            profile=self._config.profile,
            verdict=self._order.verdict,
            board=self._board(),
            min_version=self._config.update.min_version,
        )
        if not isinstance(decision, FetchIt):
            self.downloads.pause()
        if isinstance(decision, Live):
            self._order.update = update_of(desired, "live", total_bytes)
        elif isinstance(decision, Refuse):
            self._order.refuse(desired, decision.reason)
        elif isinstance(decision, Verify):
            self._order.update = update_of(desired, "verifying", reason=decision.reason)
        elif isinstance(decision, Failed):
            received = total_bytes if decision.phase == "rolled_back" else 0
            self._order.update = update_of(desired, decision.phase, received, decision.reason)
        elif isinstance(decision, Waits):
            self._order.update = update_of(desired, "postponed", total_bytes, decision.reason)
        elif isinstance(decision, TryIdle):
            self._try_idle(desired)
        else:
            self.downloads.begin(desired)

    def _gives_way(self, desired: Desired | None) -> bool:
        """Whether a trial that waits for its source, without an end, gives way to another release.

        One that is asked for again goes on for the new request.
        """
        if desired is None or not isinstance(self._order.verdict, Trusted):
            return False
        record = self._kept.record(self.state.trial)
        if record.policy.manual and desired.request != record.request:
            return self._ends_manual(desired, record)
        if self._order.update.phase != "postponed":
            return False
        if record.sha256 == desired.release.blob.sha256:
            self._kept.note(slots.ask_again(self.state, desired.request))
            self._order.update = msgspec.structs.replace(
                self._order.update, request=desired.request
            )
            return False
        self.runs.end_trial()
        self._pipeline.stop("another release is tried")
        self._kept.note(slots.postpone(self.state, self._order.update.reason))
        return True

    def _ends_manual(self, desired: Desired, record: SlotRecord) -> bool:
        """Commit a trial that somebody has to commit if the same release is asked for without that;
        end it for another one. Return whether there is no trial any more."""
        if record.sha256 == desired.release.blob.sha256:
            self._kept.note(slots.ask_again(self.state, desired.request))
            update = msgspec.structs.replace(self._order.update, request=desired.request)
            self._order.update = update
            if not desired.policy.manual:
                self.runs.accept()
            return False
        self.runs.end_with_active("another release took its place before it was committed")
        return True

    def cancel(self, request: str) -> None:
        """End the update of this request, unless it is live; a download can be resumed."""
        desired = self._order.desired
        if desired is None or desired.request != request or self._order.update.phase == "live":
            return
        self._order.desired = None
        if self.runs.on_trial:
            self.runs.roll_back("it was cancelled during its trial")
        else:
            self._reconcile()

    def restart(self) -> str:
        """Start the pipeline of the live release anew; return why it cannot be."""
        if self.state.trial is not None:
            return "a release is on trial: wait until that has ended"
        if self.state.active is None:
            return "there is no release to run"
        self.runs.start_active()
        return ""

    def set_pipeline(self, status: str) -> str:
        """Start or stop the pipeline of the live release; return why it cannot be."""
        if status == "running":
            stopped = self._pipeline.report.status == "stopped"
            return self.restart() if stopped else ""
        if self.state.trial is not None:
            return "a release is on trial: wait until that has ended"
        self._pipeline.stop("it was stopped by a command")
        return ""

    def go_back(self, reason: str) -> str:
        """End a trial, or go back to the release in the other slot; return why it cannot."""
        if self.state.trial is None:
            return self.runs.fall_back(reason)
        self.runs.waits_for_preparation = False
        self.runs.roll_back(reason)
        return ""

    def _try_idle(self, desired: Desired) -> None:
        try:
            self._store.verify(self.state.idle)
        except BundleReadError as error:  # it is read again by `_read_again`
            LOG.error("%s", error)
            self._order.update = update_of(
                desired, "postponed", desired.release.blob.bytes, f"it waits for the disk: {error}"
            )
            return
        except BundleError as error:
            LOG.warning("%s; it is fetched again", error)
            self._kept.note(slots.clear(self.state))
            self.downloads.begin(desired)
            return
        self._begin_trial(desired)

    def _stage(self, desired: Desired) -> None:
        """Check the whole bundle, unpack it into the idle slot and begin its trial."""
        self._order.update = update_of(desired, "staging", desired.release.blob.bytes)
        self._report()
        if self.downloads.stage(desired):
            self._begin_trial(desired)

    # -- preparation

    def _prepare(self, desired: Desired) -> bool:
        """Finish the DLA segments of the idle slot; return whether its trial waits for that."""
        sha256, preparation = desired.release.blob.sha256, self._preparation
        if preparation is None or self._prepared == sha256:
            return False
        folder = self._store.slot_folder(self.state.idle)
        if preparation.folder == folder and self._preparing != sha256:
            preparation.stop()  # of a release that was there before
        if preparation.folder is None:
            if not preparation.start(folder):
                return False
            self._preparing = sha256
        if self._order.update.phase != "staging":
            self._order.update = update_of(desired, "staging", desired.release.blob.bytes)
        return True

    def _prepare_active(self) -> None:
        """Finish what runs, which may be of before a JetPack update; it runs meanwhile."""
        if self._preparation is not None and self.state.active is not None:
            self._preparation.start(self._store.slot_folder(self.state.active))

    def _prepare_trial(self, slot: Slot) -> bool:
        """Finish a trial that is resumed, as `_prepare_active`; return whether it waits for that.

        The attempt does not count meanwhile.
        """
        if self._preparation is None or not self._preparation.start(self._store.slot_folder(slot)):
            return False
        self.runs.waits_for_preparation = True
        self._kept.note(slots.suspend(self.state))
        self._order.update = update_of_record(self._kept.record(slot), "staging")
        return True

    def _resume_trial(self, slot: Slot, rows: tuple[Row, ...]) -> None:
        """Start a trial that was prepared after a restart, or roll it back: it cannot run here."""
        self.runs.waits_for_preparation = False
        self._kept.note(slots.resume(self.state))
        reason = refusal(rows)
        if reason is not None:
            self.runs.roll_back(reason)
        else:
            self.runs.start_trial(slot)

    def on_preparing(self, event: Preparing) -> None:
        """Note the progress of a build; the active slot runs while a resumed trial waits for it."""
        if self._preparation is None or not self._preparation.is_running(event):
            return
        idle = self._pipeline.report.status == "stopped" and self._pipeline.restart_at_s is None
        if self.runs.waits_for_preparation and idle and self.state.active is not None:
            self.runs.start_active()
        if self._order.update.phase == "staging":
            reason = f"TensorRT builds segment {event.segment}, {event.seconds:.0f} s so far"
            self._order.update = msgspec.structs.replace(self._order.update, reason=reason)

    def on_prepared(self, event: PreparationEnded) -> None:
        """Try a release that was prepared, or refuse it; run what runs with its new plans."""
        folder = None if self._preparation is None else self._preparation.ended(event)
        if folder is None:
            return
        rows = _said(event)
        active, trial = self.state.active, self.state.trial
        if trial is not None:
            if self.runs.waits_for_preparation:
                self._resume_trial(trial, rows)
            return
        if active is not None and folder == self._store.slot_folder(active):
            if built_now(rows):
                LOG.info("the pipeline starts again, with the segments that were prepared")
                self.runs.start_active()
            self._reconcile()  # a release may have waited
        elif folder == self._store.slot_folder(self.state.idle):
            self._try_prepared(rows)

    def _try_prepared(self, rows: tuple[Row, ...]) -> None:
        """Try the release in the idle slot, or refuse it: it cannot run on this board."""
        desired = self._order.trusted
        if desired is None or desired.release.blob.sha256 != self._preparing:
            return
        reason = refusal(rows)
        if reason is not None:
            self._kept.refuse(desired, reason)
            self._order.refuse(desired, reason)
            return
        self._prepared = desired.release.blob.sha256
        self._begin_trial(desired)

    # -- golden inputs

    def _check_golden(self, desired: Desired) -> bool:
        """Run the golden inputs of the idle slot; return whether its trial waits for that, or is
        refused for want of them."""
        sha256, golden = desired.release.blob.sha256, self._golden
        if golden is None:
            return False
        if self._golden_of == sha256 and (golden.running or self._golden_agreement is not None):
            return golden.running
        self._golden_of, self._golden_agreement = sha256, None
        try:
            waits = golden.start(
                self._store.slot_folder(self.state.idle), desired.policy.min_golden_agreement
            )
        except BundleError as error:  # the slot is verified before each trial
            LOG.error("%s", error)
            return False
        if not waits and desired.policy.min_golden_agreement is not None:
            self._kept.refuse(desired, MISSING)
            self._order.refuse(desired, MISSING)
            return True
        if waits:
            reason = "the golden inputs of the bundle run"
            total_bytes = desired.release.blob.bytes
            self._order.update = update_of(desired, "staging", total_bytes, reason)
        return waits

    def on_golden(self, event: GoldenEnded) -> None:
        """Try a release whose golden inputs agree, or refuse it."""
        if self._golden is None or not self._golden.ended(event):
            return
        desired = self._order.trusted
        if desired is None or desired.release.blob.sha256 != self._golden_of:
            return
        if self.state.trial is not None:
            return
        reason = golden_refusal(event, desired.policy)
        if reason is not None:
            if not event.passing:
                self._kept.refuse(desired, reason)
            self._order.refuse(desired, reason)
            return
        assert event.result is not None
        self._golden_agreement = event.result.agreement
        self._begin_trial(desired)

    # -- trial

    def _begin_trial(self, desired: Desired) -> None:
        if self._waits_for_window(desired):
            return  # called again when that begins
        if self._prepare(desired):
            return  # called again when the preparation has ended
        if self._check_golden(desired):
            return  # called again when they agree
        if self.shadow.waits(desired):
            return  # called again when it has been compared with the live release
        # Written before the start: an agent that dies from here on counts this attempt.
        try:
            self._store.reserve()
            self._kept.save(self._with_trial(desired))
        except StateError as error:
            self._order.refuse(desired, str(error))
            return
        self.runs.start_trial(self.state.idle)

    def _with_trial(self, desired: Desired) -> SlotState:
        """Return the state with the trial of the release in the idle slot."""
        verdict = self._order.verdict
        floor = verdict.custom.get(FLOOR) if isinstance(verdict, Trusted) else None
        return slots.begin_trial(
            self.state,
            desired.request,
            desired.policy,
            floor=floor if isinstance(floor, str) else "",
            online=self._around(time.monotonic()).online,
            sideloaded=self._order.sideloaded,
            golden_agreement=self._golden_agreement,
        )

    def _waits_for_window(self, desired: Desired) -> bool:
        """Whether the trial waits for its maintenance window; the report says so."""
        now = self._local_time()
        reason = waits_for_window(desired.policy, now.tm_hour, now.tm_min) or ""
        if reason and not self._window_reason:
            LOG.info("%s %s: %s", desired.release.name, desired.release.version, reason)
        self._window_reason = reason
        if reason:
            total_bytes = desired.release.blob.bytes
            self._order.update = update_of(desired, "postponed", total_bytes, reason)
        return bool(reason)

    def _try_in_window(self) -> None:
        """Go on with a release whose maintenance window has begun."""
        desired = self._order.desired
        if not self._window_reason or desired is None or self.state.trial is not None:
            return
        now = self._local_time()
        if waits_for_window(desired.policy, now.tm_hour, now.tm_min) is None:
            self._window_reason = ""
            self._reconcile()

    def _board(self) -> BoardState:
        """Return what a release is compared with before it is fetched."""
        room, desired = self._store.room(self.state), self._order.desired
        blob = None if desired is None else desired.release.blob
        if room is not None and blob and self._store.sideloaded(blob.sha256, blob.bytes):
            room = dataclasses.replace(
                room, free_bytes=room.free_bytes + blob.bytes
            )  # there, and not copied
        return BoardState(self._facts(), room, self.state.floors)

    def _try_postponed(self, now_s: float) -> None:
        """Try a release that waits, once the source of the active one gives frames.

        Also if the active one does not work: it will never tell.
        """
        desired, waiting = self._order.desired, self.state.postponed
        if desired is None or waiting is None or self._order.update.phase != "postponed":
            return
        if self.state.idle in self._store.unread:
            return
        if waiting.broker and not self._around(now_s).online:
            return
        health = self._pipeline.health()
        frames = health.state == "running" and health.frames > 0
        if self.state.trial is None and (frames or health.state in ("failed", "stalled")):
            self.runs.source_worked = frames
            self._try_idle(desired)

    def _read_again(self, now_s: float) -> None:
        """Judge the slots again that the disk did not give."""
        if not self._store.unread or now_s < self._read_again_s:
            return
        self._read_again_s = now_s + READ_AGAIN_S
        if self.state.active in self._store.unread:
            if with_whole_active(self._store, self.state) != self.state:
                self.runs.start_active()
                self._reconcile()
            return
        waits = self._order.update.phase == "postponed" and self.state.trial is None
        if self._order.desired is not None and waits:
            self._try_idle(self._order.desired)
        else:
            with contextlib.suppress(BundleError):  # judged again before it is used
                self._store.verify(self.state.idle)


def _said(event: PreparationEnded) -> tuple[Row, ...]:
    """Log what a preparation could not do; return its rows."""
    if event.rows is None:
        LOG.error("the segments were not prepared: %s", event.problem)
    rows = event.rows or ()
    for row in rows:
        if row.problem is not None:
            LOG.warning("segment %s does not run through TensorRT: %s", row.segment, row.problem)
    return rows
