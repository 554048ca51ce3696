"""Brings the board to the desired release: download, unpack, trial, commit or rollback.

The decisions are pure functions of `device.update.decisions`, `device.update.slots`,
`device.update.transfer` and `device.agent.trial`; this module carries them out in the one thread of
`device.agent.agent`. A transition that an interrupted update must find again is written to the disk
before it happens, and a release is live only once the disk has it. A rollback is in force even on a
full disk, which gets it as soon as it has room.
"""

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from device.agent.config import AgentConfig
from device.agent.fetch_options import fetch_options
from device.agent.kept_state import RETRY_S, KeptState, utc_now
from device.agent.pipeline_runner import MAX_LATE_S, PipelineRunner
from device.agent.preparation import (
    Preparation,
    PreparationEnded,
    Preparing,
    Row,
    built_now,
    refusal,
)
from device.agent.trial import (
    Confirm,
    Crashes,
    Postpone,
    RollBack,
    Trial,
    Wait,
    judge,
    trial_limits,
)
from device.errors import BundleError, BundleReadError, StateError, TandemError
from device.protocol.documents import BlobGet, Desired, Update
from device.protocol.messages import ChildMessage, Failure
from device.trust.exchange import TRUSTED, Trusted, Verdict
from device.update import slots
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
from device.update.fetching import Fetching
from device.update.slot_store import SlotStore
from device.update.slots import MAX_POSTPONED, Slot, SlotFailure, SlotState
from device.update.sources.reader import SourceEvent

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
        put: Callable[[SourceEvent], None] = lambda _event: None,
    ) -> None:
        """`report` publishes the reported state before something that takes long.

        `preparation` finishes the segments of a slot with TensorRT; None: nothing does.
        """
        self.update = Update(phase="idle")
        self._config = config
        self._limits = trial_limits(config.update)
        self._store = store
        self._kept = KeptState(store)
        self._pipeline = pipeline
        self._report = report
        self._preparation = preparation
        self._preparing = self._prepared = ""  # SHA-256 of the release in the idle slot
        self._resuming = False  # a trial waits for its preparation after a restart
        self._desired: Desired | None = None
        self._verdict: Verdict = TRUSTED  # on `_desired`
        self._fetching = Fetching(store.downloads, config.update.window_chunks, put)
        self._trial: Trial | None = None
        self._looked_s = 0.0  # when the trial was last looked at
        self._judge_at_s: float | None = None
        self._commit_at_s = 0.0  # when a commit that found no room is tried again
        self._crashes = self._no_crashes()
        self._read_again_s = 0.0
        self._source_worked = False  # the release before had frames when a postponed one was tried

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
                self._start_trial(self.state.trial)
            return
        self._start_active()
        self._prepare_active()
        self.update = update_of_slots(self.state)

    def shut_down(self) -> None:
        """Stop the pipeline; an attempt that is running does not count."""
        if self._on_trial:
            self._kept.note(slots.suspend(self.state))
        self._pipeline.stop("the agent was stopped")
        self._fetching.pause()
        if self._preparation is not None:
            self._preparation.stop()

    # -- time

    def due_s(self, *, online: bool) -> tuple[float | None, ...]:
        """Return when `advance` or `next_request` has something to do without an event."""
        wakes = online or not self._fetching.needs_broker
        wake_at_s = self._fetching.wake_at_s if wakes else None
        return self._judge_at_s, self._kept.retry_at_s, self._pipeline.restart_at_s, wake_at_s

    def advance(self, now_s: float) -> None:
        """Do what is due: judge a trial, restart the pipeline, try a complete download."""
        self._advance_trial(now_s)
        restart_at_s = self._pipeline.restart_at_s
        if restart_at_s is not None and now_s >= restart_at_s:
            self._restart()
        self._kept.retry(now_s)
        self._read_again(now_s)
        self._try_postponed()
        self._advance_download()

    # -- desired state

    def on_desired(self, desired: Desired | None, verdict: Verdict) -> None:
        """Take the desired state, None: it was cleared, and what its signatures say."""
        self._desired, self._verdict = desired, verdict
        self._reconcile()

    def _reconcile(self) -> None:
        """Act on the difference between the desired state and the slots."""
        desired = self._desired
        if self.state.trial is not None and not self._gives_way(desired):
            return  # called again when the trial has ended
        if desired is None:
            self._fetching.pause()
            self.update = update_of_slots(self.state)
            return
        total_bytes = desired.release.blob.bytes
        decision = decide(
            desired,
            self.state,
            profile=self._config.profile,
            verdict=self._verdict,
            min_version=self._config.update.min_version,
        )
        if not isinstance(decision, FetchIt):
            self._fetching.pause()
        if isinstance(decision, Live):
            self.update = update_of(desired, "live", total_bytes)
        elif isinstance(decision, Refuse):
            self._refuse(desired, decision.reason)
        elif isinstance(decision, Verify):
            self.update = update_of(desired, "verifying", reason=decision.reason)
        elif isinstance(decision, Failed):
            received = total_bytes if decision.phase == "rolled_back" else 0
            self.update = update_of(desired, decision.phase, received, decision.reason)
        elif isinstance(decision, Waits):
            self.update = update_of(desired, "postponed", total_bytes, decision.reason)
        elif isinstance(decision, TryIdle):
            self._try_idle(desired)
        else:
            self._start_fetching(desired)

    def _gives_way(self, desired: Desired | None) -> bool:
        """Whether a trial that waits for its source, without an end, gives way to another release.

        One that is asked for again goes on for the new request.
        """
        if desired is None or self.update.phase != "postponed":
            return False
        if not isinstance(self._verdict, Trusted):
            return False
        record = self._kept.record(self.state.trial)
        if record.sha256 == desired.release.blob.sha256:
            self._kept.note(slots.ask_again(self.state, desired.request))
            self.update = msgspec.structs.replace(self.update, request=desired.request)
            return False
        self._end_trial()
        self._pipeline.stop("another release is tried")
        self._kept.note(slots.postpone(self.state, self.update.reason))
        return True

    def _refuse(self, desired: Desired, reason: str) -> None:
        LOG.error("refused %s: %s", desired.release.name, reason)
        self.update = update_of(desired, "refused", reason=reason)

    def _try_idle(self, desired: Desired) -> None:
        try:
            self._store.verify(self.state.idle)
        except BundleReadError as error:  # it is read again by `_read_again`
            LOG.error("%s", error)
            self.update = update_of(
                desired, "postponed", desired.release.blob.bytes, f"it waits for the disk: {error}"
            )
            return
        except BundleError as error:
            LOG.warning("%s; it is fetched again", error)
            self._kept.note(slots.clear(self.state))
            self._start_fetching(desired)
            return
        self._begin_trial(desired)

    # -- download

    def _start_fetching(self, desired: Desired) -> None:
        blob = desired.release.blob
        try:
            bases = self._store.bundles(self.state)
            self._fetching.begin(blob, fetch_options(desired, self._config.update, bases))
        except (TandemError, OSError) as error:
            self._refuse(desired, _reason(error))
            return
        received = self._fetching.received_bytes
        LOG.info(
            "fetching %s: %d of %d bytes are there", desired.release.name, received, blob.bytes
        )
        self.update = update_of(desired, "downloading", received)

    def on_part(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a blob that arrived: "index" or "7", after a slash the peer's name."""
        try:
            self._fetching.take(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))

    def on_cast(self, sha256: str, part: str, payload: bytes, now_s: float) -> None:
        """Take a part of a broadcast: "index", "7" or "end"."""
        try:
            self._fetching.take_cast(sha256, part, payload, now_s)
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))

    def on_source(self, event: SourceEvent, now_s: float) -> None:
        """Take what a source other than MQTT gave."""
        try:
            self._fetching.on_source(event, now_s)
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))

    @property
    def cast_sha256(self) -> str:
        """The blob whose broadcast is to be heard, empty if none is."""
        return self._fetching.cast_sha256

    def on_reconnect(self) -> None:
        """Forget the requests of the old connection: they are not answered."""
        self._fetching.forget_requests()

    def next_request(self, now_s: float, *, online: bool = True) -> BlobGet | None:
        """Return the request to send now, or None; its chunks count as in flight from here on."""
        return self._fetching.next_request(now_s, online=online)

    def _advance_download(self) -> None:
        """Note the progress of the download; stage a complete one."""
        desired = self._desired
        if not self._fetching.running or desired is None:
            return
        received, reason = self._fetching.received_bytes, self._fetching.complaint
        self.update = msgspec.structs.replace(self.update, received_bytes=received, reason=reason)
        failure = self._fetching.advance(time.monotonic())
        if self._fetching.complete:
            self._stage(desired)
        elif failure:
            self._give_up_fetching(failure)

    def _give_up_fetching(self, reason: str) -> None:
        """Refuse this request for good: another download would end the same way."""
        desired = self._desired
        if not self._fetching.running or desired is None:
            return
        self._fetching.remove()
        self._kept.note(slots.refuse(self.state, _failure(desired, reason)))
        self._refuse(desired, reason)

    def _stage(self, desired: Desired) -> None:
        """Check the whole bundle, unpack it into the idle slot and begin its trial."""
        self.update = update_of(desired, "staging", desired.release.blob.bytes)
        self._report()
        try:
            self._kept.stage(self._fetching.finish(), desired, self._config.profile)
        except (TandemError, OSError) as error:
            self._give_up_fetching(_reason(error))
            return
        self._fetching.remove()
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
        if self.update.phase != "staging":
            self.update = update_of(desired, "staging", desired.release.blob.bytes)
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
        self._resuming = True
        self._kept.note(slots.suspend(self.state))
        self.update = update_of_record(self._kept.record(slot), "staging")
        return True

    def _resume_trial(self, slot: Slot, rows: tuple[Row, ...]) -> None:
        """Start a trial that was prepared after a restart, or roll it back: it cannot run here."""
        self._resuming = False
        self._kept.note(slots.resume(self.state))
        reason = refusal(rows)
        if reason is not None:
            self._roll_back(reason)
        else:
            self._start_trial(slot)

    @property
    def _on_trial(self) -> bool:
        """Whether the pipeline that runs is that of a trial."""
        return self.state.trial is not None and not self._resuming

    def on_preparing(self, event: Preparing) -> None:
        """Note the progress of a build; the active slot runs while a resumed trial waits for it."""
        if self._preparation is None or not self._preparation.is_running(event):
            return
        idle = self._pipeline.report.status == "stopped" and self._pipeline.restart_at_s is None
        if self._resuming and idle and self.state.active is not None:
            self._start_active()
        if self.update.phase == "staging":
            reason = f"TensorRT builds segment {event.segment}, {event.seconds:.0f} s so far"
            self.update = msgspec.structs.replace(self.update, reason=reason)

    def on_prepared(self, event: PreparationEnded) -> None:
        """Try a release that was prepared, or refuse it; run what runs with its new plans."""
        folder = None if self._preparation is None else self._preparation.ended(event)
        if folder is None:
            return
        if event.rows is None:
            LOG.error("the segments were not prepared: %s", event.problem)
        rows = event.rows or ()
        for row in rows:
            if row.problem is not None:
                LOG.warning(
                    "segment %s does not run through TensorRT: %s", row.segment, row.problem
                )
        active, trial = self.state.active, self.state.trial
        if trial is not None:
            if self._resuming:
                self._resume_trial(trial, rows)
            return
        if active is not None and folder == self._store.slot_folder(active):
            if built_now(rows):
                LOG.info("the pipeline starts again, with the segments that were prepared")
                self._start_active()
            self._reconcile()  # a release may have waited
        elif folder == self._store.slot_folder(self.state.idle):
            self._try_prepared(rows)

    def _try_prepared(self, rows: tuple[Row, ...]) -> None:
        """Try the release in the idle slot, or refuse it: it cannot run on this board."""
        desired = self._desired if isinstance(self._verdict, Trusted) else None
        if desired is None or desired.release.blob.sha256 != self._preparing:
            return
        reason = refusal(rows)
        if reason is not None:
            self._kept.note(slots.refuse(self.state, _failure(desired, reason)))
            self._refuse(desired, reason)
            return
        self._prepared = desired.release.blob.sha256
        self._begin_trial(desired)

    # -- trial

    def _begin_trial(self, desired: Desired) -> None:
        if self._prepare(desired):
            return  # called again when the preparation has ended
        # Written before the start: an agent that dies from here on counts this attempt.
        try:
            self._store.reserve()
            self._kept.save(slots.begin_trial(self.state, desired.request))
        except StateError as error:
            self._refuse(desired, str(error))
            return
        self._start_trial(self.state.idle)

    def _start_trial(self, slot: Slot, *, fresh: bool = True) -> None:
        record = self._kept.record(slot)
        LOG.info("trying %s %s in slot %s", record.name, record.version, slot)
        if not self._pipeline.start(self._store.slot_folder(slot), fresh=fresh):
            self._await_room(slot)
            return
        self.update = update_of_record(record, "trial")
        self._looked_s = time.monotonic()
        self._trial = Trial(frame_s=self._looked_s)

    def _await_room(self, slot: Slot) -> None:
        """Let a trial wait that the system cannot start: neither would it start the active slot.

        `advance` starts it again; until then the attempt does not count.
        """
        record = self._kept.record(slot)
        reason = f"{self._pipeline.report.reason}; the trial is not to blame and is tried again"
        LOG.error("%s %s waits: %s", record.name, record.version, reason)
        self._kept.note(slots.suspend(self.state))
        self.update = update_of_record(record, "postponed", reason)

    def _advance_trial(self, now_s: float) -> None:
        """Look at the pipeline on trial; end the trial if that is due."""
        if self._trial is None:
            return
        if now_s - self._looked_s > MAX_LATE_S:
            self._trial = self._trial.held_up(now_s - self._looked_s)
        self._looked_s = now_s
        self._trial = self._trial.observed(self._pipeline.health(), now_s)
        verdict = judge(self._trial, self._limits, now_s)
        if isinstance(verdict, Wait):
            self._judge_at_s = verdict.until_s
            if self.update.phase == "postponed":  # the source is back
                self.update = update_of_record(self._kept.record(self.state.trial), "trial")
        elif isinstance(verdict, Confirm):
            self._commit_trial(now_s)
        elif isinstance(verdict, RollBack):
            self._roll_back(verdict.reason)
        else:
            self._postpone(verdict, now_s)

    def _commit_trial(self, now_s: float) -> None:
        """Make the release live once the disk has it; a full disk is tried again."""
        if now_s < self._commit_at_s:
            return
        try:
            self._kept.save(slots.confirm(self.state, utc_now()))
        except StateError as error:
            reason = f"it works, and is live once the disk has recorded it: {error}"
            if not self._commit_at_s:
                LOG.error("%s", reason)
            self.update = msgspec.structs.replace(self.update, reason=reason)
            self._commit_at_s = self._judge_at_s = now_s + RETRY_S
            return
        self._end_trial()
        record = self._kept.record(self.state.active)
        LOG.info("%s %s is live", record.name, record.version)
        self.update = update_of_record(record, "live")
        self._reconcile()

    def _end_trial(self) -> None:
        self._trial = self._judge_at_s = None
        self._commit_at_s = 0.0
        self._crashes = self._no_crashes()

    def _roll_back(self, reason: str) -> None:
        self._end_trial()
        record = self._kept.record(self.state.trial)
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        self._pipeline.stop("the trial failed")
        self._kept.roll_back(reason)
        self.update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self._start_active()
        self._prepare_active()
        self._reconcile()

    def _postpone(self, verdict: Postpone, now_s: float) -> None:
        """Go back to the release before until a source works; without one, wait here."""
        record, earlier = self._kept.record(self.state.trial), self.state.postponed
        if self.state.active is None:
            if self.update.phase != "postponed":
                LOG.warning("%s %s waits: %s", record.name, record.version, verdict.reason)
                self._kept.note(slots.suspend(self.state))  # it has not harmed the agent
                self.update = update_of_record(record, "postponed", verdict.reason)
            self._judge_at_s = now_s + self._limits.timeout_s
            return
        if self._source_worked and earlier is not None and earlier.count + 1 >= MAX_POSTPONED:
            self._roll_back(f"{verdict.reason}, while that of the release before gave some")
            return
        self._end_trial()
        LOG.warning("%s %s is postponed: %s", record.name, record.version, verdict.reason)
        self._pipeline.stop("the trial is postponed")
        self._kept.note(slots.postpone(self.state, verdict.reason))
        self._start_active()
        self._prepare_active()
        self._reconcile()

    def _try_postponed(self) -> None:
        """Try a release that waits, once the source of the active one gives frames.

        Also if the active one does not work: it will never tell.
        """
        desired, waiting = self._desired, self.state.postponed
        if desired is None or waiting is None or self.update.phase != "postponed":
            return
        if self.state.idle in self._store.unread:
            return
        health = self._pipeline.health()
        frames = health.state == "running" and health.frames > 0
        if self.state.trial is None and (frames or health.state in ("failed", "stalled")):
            self._source_worked = frames
            self._try_idle(desired)

    def _read_again(self, now_s: float) -> None:
        """Judge the slots again that the disk did not give."""
        if not self._store.unread or now_s < self._read_again_s:
            return
        self._read_again_s = now_s + READ_AGAIN_S
        if self.state.active in self._store.unread:
            if with_whole_active(self._store, self.state) != self.state:
                self._start_active()
                self._reconcile()
            return
        waits = self.update.phase == "postponed" and self.state.trial is None
        if self._desired is not None and waits:
            self._try_idle(self._desired)
        else:
            with contextlib.suppress(BundleError):  # judged again before it is used
                self._store.verify(self.state.idle)

    # -- the pipeline

    def on_pipeline_message(self, message: ChildMessage) -> None:
        """Roll a trial back at a failure."""
        if self._on_trial and isinstance(message, Failure):
            self._roll_back(message.message)

    def on_pipeline_exit(self, reason: str, *, crashed: bool, now_s: float) -> None:
        """Roll a trial back, and a live release that crashes in a loop.

        Any other pipeline is restarted by `advance`.
        """
        if self._on_trial:
            self._roll_back(reason)
            return
        LOG.error("%s", reason)
        if crashed:
            self._crashes = self._crashes.crashed(now_s)
            if self._crashes.loop:
                self._give_up_active(reason)

    def _give_up_active(self, reason: str) -> None:
        """Go back to the release in the other slot, if it was live and is whole."""
        limits = self._config.update
        problem = self._fall_back(
            f"it crashed {limits.max_crashes} times within {limits.crash_window_s:g} s "
            f"(max_crashes), the last time: {reason}"
        )
        if problem:
            LOG.error("%s", problem)

    def cancel(self, request: str) -> None:
        """End the update of this request, unless it is live; a download can be resumed."""
        desired = self._desired
        if desired is None or desired.request != request or self.update.phase == "live":
            return
        self._desired = None
        if self._on_trial:
            self._roll_back("it was cancelled during its trial")
        else:
            self._reconcile()

    def go_back(self, reason: str) -> str:
        """End a trial, or go back to the release in the other slot; return why it cannot."""
        if self.state.trial is None:
            return self._fall_back(reason)
        self._resuming = False
        self._roll_back(reason)
        return ""

    def _fall_back(self, reason: str) -> str:
        """Run the release in the other slot, if it was live and is whole; return why it cannot."""
        earlier = self.state.record(self.state.idle)
        if self.state.active is None or earlier is None or not earlier.good:
            return "there is no release to go back to: the other slot has none that was live"
        try:
            self._store.verify(self.state.idle)
        except BundleError as error:
            return str(error)
        record, desired = self._kept.record(self.state.active), self._desired
        LOG.error("%s %s is rolled back: %s", record.name, record.version, reason)
        if desired is not None and desired.release.blob.sha256 == record.sha256:
            record = msgspec.structs.replace(record, request=desired.request)
        self._kept.give_up_active(reason, record.request)
        self.update = update_of_record(record, "rolled_back", reason[: slots.MAX_REASON])
        self._start_active()
        self._prepare_active()
        self._reconcile()
        return ""

    def _restart(self) -> None:
        """Start again what died, or what the system could not start."""
        if self.state.trial is not None and self._on_trial:
            self._kept.note(slots.resume(self.state))
            self._start_trial(self.state.trial, fresh=False)
            return
        active = self.state.active
        self._start_active(fresh=False)
        if self.state.active != active:
            self._reconcile()

    def _start_active(self, *, fresh: bool = True) -> None:
        """Start the active slot; a damaged one is given up for the idle one, if that was good."""
        state = with_whole_active(self._store, self.state)
        if state != self.state:
            self._kept.note(state)
        if fresh:
            self._crashes = self._no_crashes()
        if state.active is None:
            self._pipeline.stop("there is no release to run")
        else:
            self._pipeline.start(self._store.slot_folder(state.active), fresh=fresh)

    def _no_crashes(self) -> Crashes:
        return Crashes(self._config.update.max_crashes, self._config.update.crash_window_s)


def _said(event: PreparationEnded) -> tuple[Row, ...]:
    """Log what a preparation could not do; return its rows."""
    if event.rows is None:
        LOG.error("the segments were not prepared: %s", event.problem)
    rows = event.rows or ()
    for row in rows:
        if row.problem is not None:
            LOG.warning("segment %s does not run through TensorRT: %s", row.segment, row.problem)
    return rows


def _failure(desired: Desired, reason: str) -> SlotFailure:
    """A refusal of this request for good."""
    return SlotFailure(
        sha256=desired.release.blob.sha256,
        request=desired.request,
        phase="refused",
        reason=reason[: slots.MAX_REASON],
        at=utc_now(),
    )


def _reason(error: Exception) -> str:
    return f"the disk failed: {error}" if isinstance(error, OSError) else str(error)
